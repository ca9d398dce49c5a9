import torch, torch.nn as nn

m = nn.Sequential(*[nn.Linear(3000, 3000) for _ in range(6)]).cuda()
o = torch.optim.AdamW(m.parameters())
step = torch.compile(o.step)
f = torch.compile(m)
for i in range(5):
    f(torch.randn(256, 3000, device="cuda")).square().mean().backward()
    step()
    o.zero_grad()
    print("step", i)
