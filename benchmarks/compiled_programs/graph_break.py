import torch, torch.nn as nn


class N(nn.Module):
    def __init__(s):
        super().__init__()
        s.a = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024))
        s.b = nn.Sequential(
            nn.LayerNorm(1024), nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)
        )

    def forward(s, x):
        x = s.a(x)
        torch._dynamo.graph_break()
        return s.b(x).pow(2).mean()


m = N().cuda()
f = torch.compile(m)
o = torch.optim.Adam(m.parameters())
for i in range(6):
    f(torch.randn(8192, 1024, device="cuda")).backward()
    o.step()
    o.zero_grad()
    print("step", i)
