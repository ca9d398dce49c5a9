"""Kind: generative; leaks: no. WGAN with a gradient penalty: gradients of gradients, RMSprop."""

import torch
import torch.nn as nn


class Generator(nn.Module):
    def __init__(self, z=128, c=512):
        super().__init__()
        self.fc = nn.Linear(z, c * 16)
        blocks = []
        for _ in range(3):
            blocks += [nn.Upsample(scale_factor=2), nn.Conv2d(c, c // 2, 3, 1, 1), nn.BatchNorm2d(c // 2), nn.ReLU()]
            c //= 2
        self.net = nn.Sequential(*blocks, nn.Conv2d(c, 3, 3, 1, 1), nn.Tanh())

    def forward(self, z):
        return self.net(self.fc(z).view(len(z), -1, 4, 4))


class Critic(nn.Module):
    def __init__(self, c=128):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, c, 3, 1, 1), nn.LeakyReLU(0.2), nn.Conv2d(c, 2 * c, 4, 2, 1), nn.LeakyReLU(0.2),
            nn.Conv2d(2 * c, 4 * c, 4, 2, 1), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(4 * c * 64, 1),
        )

    def forward(self, x):
        return self.net(x)


def gradient_penalty(critic, real, fake):
    eps = torch.rand(len(real), 1, 1, 1, device=real.device)
    mixed = (eps * real + (1 - eps) * fake).requires_grad_(True)
    score = critic(mixed)
    (grad,) = torch.autograd.grad(score.sum(), mixed, create_graph=True)
    return ((grad.flatten(1).norm(2, dim=1) - 1) ** 2).mean()


G, D = Generator().cuda(), Critic().cuda()
optG, optD = torch.optim.RMSprop(G.parameters(), lr=5e-5), torch.optim.RMSprop(D.parameters(), lr=5e-5)
for it in range(8):
    for _ in range(2):
        real = torch.rand(96, 3, 32, 32, device="cuda")
        with torch.no_grad():
            fake = G(torch.randn(96, 128, device="cuda"))
        lossD = D(fake).mean() - D(real).mean() + 10 * gradient_penalty(D, real, fake)
        optD.zero_grad()
        lossD.backward()
        optD.step()
    lossG = -D(G(torch.randn(96, 128, device="cuda"))).mean()
    optG.zero_grad()
    lossG.backward()
    optG.step()
    print(f"step {it} D {lossD.item():.3f} G {lossG.item():.3f}")
