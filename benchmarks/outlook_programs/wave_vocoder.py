"""Kind: audio; leaks: no. A vocoder against a multi-scale discriminator, on crops of fixed length."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class ResStack(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Sequential(nn.LeakyReLU(0.1), nn.Conv1d(c, c, 3, padding=d, dilation=d), nn.LeakyReLU(0.1), nn.Conv1d(c, c, 3, padding=1))
            for d in (1, 3, 9)
        )

    def forward(self, x):
        for conv in self.convs:
            x = x + conv(x)
        return x


class Vocoder(nn.Module):
    def __init__(self, mels=80, c=256):
        super().__init__()
        layers = [nn.Conv1d(mels, c, 7, padding=3)]
        for r in (8, 8, 2, 2):
            layers += [nn.LeakyReLU(0.1), nn.ConvTranspose1d(c, c // 2, 2 * r, r, r // 2 + r % 2), ResStack(c // 2)]
            c //= 2
        self.net = nn.Sequential(*layers, nn.LeakyReLU(0.1), nn.Conv1d(c, 1, 7, padding=3), nn.Tanh())

    def forward(self, mel):
        return self.net(mel)


class ScaleD(nn.Module):
    def __init__(self):
        super().__init__()
        widths = [1, 16, 64, 256, 512]
        self.layers = nn.ModuleList(nn.Conv1d(a, b, 15, 4 if a > 1 else 1, 7) for a, b in zip(widths, widths[1:]))
        self.post = nn.Conv1d(512, 1, 3, padding=1)

    def forward(self, x):
        maps = []
        for layer in self.layers:
            x = F.leaky_relu(layer(x), 0.2)
            maps.append(x)
        return self.post(x), maps


gen = Vocoder().cuda()
discs = nn.ModuleList(ScaleD() for _ in range(3)).cuda()
opt_g = torch.optim.AdamW(gen.parameters(), 2e-4, (0.8, 0.99))
opt_d = torch.optim.AdamW(discs.parameters(), 2e-4, (0.8, 0.99))
for i in range(8):
    mel, wave = torch.randn(32, 80, 64).cuda(), torch.randn(32, 1, 64 * 256).cuda()
    fake = gen(mel)[..., : wave.size(-1)]
    loss_d = 0
    a, b = wave, fake.detach()
    for d in discs:
        loss_d = loss_d + (1 - d(a)[0]).pow(2).mean() + d(b)[0].pow(2).mean()
        a, b = F.avg_pool1d(a, 4, 2, 2), F.avg_pool1d(b, 4, 2, 2)
    opt_d.zero_grad()
    loss_d.backward()
    opt_d.step()

    loss_g, a, b = 0, wave, fake
    for d in discs:
        score, maps = d(b)
        with torch.no_grad():
            real_maps = d(a)[1]
        loss_g = loss_g + (1 - score).pow(2).mean() + 2 * sum(F.l1_loss(m, r) for m, r in zip(maps, real_maps))
        a, b = F.avg_pool1d(a, 4, 2, 2), F.avg_pool1d(b, 4, 2, 2)
    opt_g.zero_grad()
    loss_g.backward()
    opt_g.step()
    print("step", i, loss_d.item(), loss_g.item())
