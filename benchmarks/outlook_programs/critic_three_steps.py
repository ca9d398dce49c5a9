"""Kind: generative; leaks: no. Three steps of a critic with gradient penalty for one of the generator."""

import torch
import torch.nn as nn

N, PIXELS = 512, 12288

generator = nn.Sequential(
    nn.Linear(128, 1024), nn.ReLU(), nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, PIXELS)
).cuda()
critic = nn.Sequential(
    nn.Linear(PIXELS, 4096), nn.ReLU(), nn.Linear(4096, 1024), nn.ReLU(), nn.Linear(1024, 1)
).cuda()
opt_g = torch.optim.Adam(generator.parameters(), lr=1e-4, betas=(0.0, 0.9))
opt_c = torch.optim.Adam(critic.parameters(), lr=1e-4, betas=(0.0, 0.9))


def penalty(real, fake):
    share = torch.rand(N, 1, device="cuda")
    mixed = (share * real + (1 - share) * fake).requires_grad_()
    (grad,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
    return 10 * ((grad.norm(2, dim=1) - 1) ** 2).mean()


for step in range(9):
    for _ in range(3):
        real = torch.randn(N, PIXELS, device="cuda")
        with torch.no_grad():
            fake = generator(torch.randn(N, 128, device="cuda"))
        loss = critic(fake).mean() - critic(real).mean() + penalty(real, fake)
        opt_c.zero_grad()
        loss.backward()
        opt_c.step()
    loss = -critic(generator(torch.randn(N, 128, device="cuda"))).mean()
    opt_g.zero_grad()
    loss.backward()
    opt_g.step()
    print(f"step {step} {loss.item():.3f}")
