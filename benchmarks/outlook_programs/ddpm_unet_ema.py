"""Kind: generative; leaks: no. A small diffusion U-Net with an EMA copy, samples drawn now and then."""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

T = 1000


class Res(nn.Module):
    def __init__(self, cin, cout, temb=256):
        super().__init__()
        self.n1, self.c1 = nn.GroupNorm(8, cin), nn.Conv2d(cin, cout, 3, padding=1)
        self.t = nn.Linear(temb, cout)
        self.n2, self.c2 = nn.GroupNorm(8, cout), nn.Conv2d(cout, cout, 3, padding=1)
        self.skip = nn.Conv2d(cin, cout, 1) if cin != cout else nn.Identity()

    def forward(self, x, t):
        h = self.c1(F.silu(self.n1(x)))
        h = h + self.t(F.silu(t))[:, :, None, None]
        return self.c2(F.silu(self.n2(h))) + self.skip(x)


class UNet(nn.Module):
    def __init__(self, ch=64, mult=(1, 2, 4)):
        super().__init__()
        self.temb = nn.Sequential(nn.Linear(64, 256), nn.SiLU(), nn.Linear(256, 256))
        self.inp = nn.Conv2d(3, ch, 3, padding=1)
        widths = [ch * m for m in mult]
        self.down = nn.ModuleList([Res(a, b) for a, b in zip([ch] + widths[:-1], widths)])
        self.mid = Res(widths[-1], widths[-1])
        self.up = nn.ModuleList([Res(2 * b, a) for a, b in zip([ch] + widths[:-1], widths)][::-1])
        self.out = nn.Conv2d(ch, 3, 3, padding=1)

    def forward(self, x, t):
        freqs = torch.exp(torch.linspace(0, -9, 32, device=x.device))
        ang = t[:, None].float() * freqs
        t = self.temb(torch.cat([ang.sin(), ang.cos()], dim=1))
        x, skips = self.inp(x), []
        for block in self.down:
            x = block(x, t)
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.mid(x, t)
        for block in self.up:
            x = F.interpolate(x, scale_factor=2)
            x = block(torch.cat([x, skips.pop()], dim=1), t)
        return self.out(x)


@torch.no_grad()
def sample(net, n=16, steps=5):
    x = torch.randn(n, 3, 64, 64, device="cuda")
    for t in reversed(range(steps)):
        eps = net(x, torch.full((n,), t, device="cuda"))
        x = x - 0.1 * eps
    return x.clamp(-1, 1).cpu()


net = UNet().cuda()
ema = copy.deepcopy(net).eval().requires_grad_(False)
opt = torch.optim.Adam(net.parameters(), lr=2e-4)
abar = torch.cumprod(1 - torch.linspace(1e-4, 0.02, T), 0).cuda()
for it in range(10):
    x0 = torch.rand(32, 3, 64, 64).cuda() * 2 - 1
    t = torch.randint(0, T, (32,), device="cuda")
    noise = torch.randn_like(x0)
    a = abar[t].view(-1, 1, 1, 1)
    loss = F.mse_loss(net(a.sqrt() * x0 + (1 - a).sqrt() * noise, t), noise)
    opt.zero_grad()
    loss.backward()
    opt.step()
    with torch.no_grad():
        for p, q in zip(ema.parameters(), net.parameters()):
            p.lerp_(q, 0.001)
    if it % 4 == 3:
        sample(ema)
    print(f"step {it} {loss.item():.4f}")
