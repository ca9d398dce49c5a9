import torch, torch.nn as nn

m = nn.Sequential(*[l for _ in range(6) for l in (nn.Linear(1024, 1024), nn.GELU())]).cuda()
f = torch.compile(m, mode="reduce-overhead")
o = torch.optim.SGD(m.parameters(), lr=0.1)
for i in range(8):
    torch.compiler.cudagraph_mark_step_begin()
    f(torch.randn(2048, 1024, device="cuda")).sum().backward()
    o.step()
    o.zero_grad()
    print("step", i)
