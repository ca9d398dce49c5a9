import torch, torch.nn as nn

m = nn.Sequential(
    *[l for _ in range(8) for l in (nn.Linear(2048, 2048), nn.SiLU(), nn.LayerNorm(2048))],
    nn.Linear(2048, 10),
).cuda()
m.compile()
o = torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)
for i in range(6):
    x = torch.randn(4096, 2048, device="cuda")
    y = torch.randint(0, 10, (4096,), device="cuda")
    o.zero_grad()
    nn.functional.cross_entropy(m(x), y).backward()
    o.step()
    print("step", i)
