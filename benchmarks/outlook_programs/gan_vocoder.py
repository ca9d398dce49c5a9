"""Kind: audio; leaks: no. A vocoder and three discriminators at three scales, trained in turn."""

import torch
import torch.nn as nn
import torch.nn.functional as F


def conv(cin, cout, k=15, groups=1):
    return nn.Conv1d(cin, cout, k, padding=k // 2, groups=groups)


class Res(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.a, self.b = conv(c, c, 7), conv(c, c, 7)

    def forward(self, x):
        return x + self.b(F.leaky_relu(self.a(F.leaky_relu(x))))


class Generator(nn.Module):
    def __init__(self, c=256):
        super().__init__()
        self.pre, self.post = conv(80, c), conv(c >> 3, 1)
        self.up = nn.ModuleList(nn.ConvTranspose1d(c >> i, c >> i + 1, 8, 4, 2) for i in range(3))
        self.res = nn.ModuleList(nn.Sequential(Res(c >> i + 1), Res(c >> i + 1)) for i in range(3))

    def forward(self, x):
        x = self.pre(x)
        for up, res in zip(self.up, self.res):
            x = res(up(F.leaky_relu(x)))
        return torch.tanh(self.post(x))


class Discriminator(nn.Module):
    def __init__(self, w=32):
        super().__init__()
        self.layers = nn.ModuleList([
            conv(1, w), conv(w, 2 * w, 41, 4), conv(2 * w, 4 * w, 41, 4), conv(4 * w, 8 * w, 41, 4),
            conv(8 * w, 8 * w, 5), conv(8 * w, 1, 3),
        ])

    def forward(self, x):
        features = []
        for layer in self.layers:
            x = F.leaky_relu(layer(x), 0.1)
            features.append(x)
        return features


net_g, net_d = Generator().cuda(), nn.ModuleList(Discriminator() for _ in range(3)).cuda()
opt_g, opt_d = torch.optim.AdamW(net_g.parameters()), torch.optim.AdamW(net_d.parameters())
for step in range(8):
    mel, wave = torch.randn(16, 80, 128).cuda(), torch.randn(16, 1, 8192).cuda()
    fake = net_g(mel)
    opt_d.zero_grad()
    loss_d = 0
    for i, d in enumerate(net_d):
        loss_d = loss_d + ((d(F.avg_pool1d(wave, 2**i))[-1] - 1) ** 2).mean()
        loss_d = loss_d + (d(F.avg_pool1d(fake.detach(), 2**i))[-1] ** 2).mean()
    loss_d.backward()
    opt_d.step()

    opt_g.zero_grad()
    loss_g = 45 * (fake - wave).abs().mean()
    for i, d in enumerate(net_d):
        real, made = d(F.avg_pool1d(wave, 2**i)), d(F.avg_pool1d(fake, 2**i))
        loss_g = loss_g + ((made[-1] - 1) ** 2).mean()
        loss_g = loss_g + sum((a - b.detach()).abs().mean() for a, b in zip(made, real))
    loss_g.backward()
    opt_g.step()
    print(f"step {step} {loss_g.item():.3f}")
