import torch, torch.nn as nn


def cb(i, o):
    return nn.Sequential(
        nn.Conv2d(i, o, 3, padding=1),
        nn.GroupNorm(8, o),
        nn.SiLU(),
        nn.Conv2d(o, o, 3, padding=1),
        nn.GroupNorm(8, o),
        nn.SiLU(),
    )


class U(nn.Module):
    def __init__(s):
        super().__init__()
        s.d1, s.d2, s.d3 = cb(3, 32), cb(32, 64), cb(64, 128)
        s.u2, s.u1 = cb(192, 64), cb(96, 32)
        s.o = nn.Conv2d(32, 3, 1)

    def forward(s, x):
        p, up = nn.functional.max_pool2d, nn.functional.interpolate
        a = s.d1(x)
        b = s.d2(p(a, 2))
        c = s.d3(p(b, 2))
        b = s.u2(torch.cat([up(c, scale_factor=2.0), b], 1))
        a = s.u1(torch.cat([up(b, scale_factor=2.0), a], 1))
        return s.o(a)


m = U().cuda()
f = torch.compile(m)
o = torch.optim.Adam(m.parameters())
for i in range(5):
    x = torch.randn(16, 3, 128, 128, device="cuda")
    nn.functional.mse_loss(f(x), x).backward()
    o.step()
    o.zero_grad()
    print("step", i)
