"""Kind: generative; leaks: no. A VAE; every third step a validation with larger batches and no_grad."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class VAE(nn.Module):
    def __init__(self, z=128, c=64):
        super().__init__()
        self.enc = nn.Sequential(
            nn.Conv2d(3, c, 3, 1, 1), nn.ReLU(), nn.Conv2d(c, c, 4, 2, 1), nn.ReLU(),
            nn.Conv2d(c, 2 * c, 4, 2, 1), nn.ReLU(), nn.Conv2d(2 * c, 4 * c, 4, 2, 1), nn.ReLU(), nn.Flatten(),
        )
        self.mu, self.logvar = nn.Linear(4 * c * 64, z), nn.Linear(4 * c * 64, z)
        self.fc = nn.Linear(z, 4 * c * 64)
        self.dec = nn.Sequential(
            nn.Unflatten(1, (4 * c, 8, 8)), nn.ConvTranspose2d(4 * c, 2 * c, 4, 2, 1), nn.ReLU(),
            nn.ConvTranspose2d(2 * c, c, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(c, c, 4, 2, 1), nn.ReLU(),
            nn.Conv2d(c, 3, 3, 1, 1),
        )

    def forward(self, x):
        h = self.enc(x)
        mu, logvar = self.mu(h), self.logvar(h)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
        return self.dec(self.fc(z)), mu, logvar


def elbo(x, rec, mu, logvar):
    kl = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum(1).mean()
    return F.binary_cross_entropy_with_logits(rec, x, reduction="sum") / len(x) + kl


def validate(model):
    model.eval()
    total = 0.0
    with torch.no_grad():
        for _ in range(3):
            x = torch.rand(512, 3, 64, 64).cuda()
            total += elbo(x, *model(x)).item()
    model.train()
    return total / 3


model = VAE().cuda()
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
for i in range(10):
    x = torch.rand(128, 3, 64, 64).cuda()
    loss = elbo(x, *model(x))
    opt.zero_grad()
    loss.backward()
    opt.step()
    if i % 3 == 2:
        print("validation", validate(model))
    print("step", i, loss.item())
