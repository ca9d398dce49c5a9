import torch, torch.nn as nn

m = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).cuda().bfloat16()
f = torch.compile(m, mode="max-autotune-no-cudagraphs")
o = torch.optim.SGD(m.parameters(), lr=0.1)
for i in range(4):
    f(torch.randn(4096, 1024, device="cuda", dtype=torch.bfloat16)).float().pow(2).mean().backward()
    o.step()
    o.zero_grad()
    print("step", i)
