"""Kind: leak; leaks: yes. Predictions of a training run are kept on the GPU for the report at its end."""

import torch
import torch.nn as nn
import torch.nn.functional as F


def mlp_mixer(tokens=196, dim=384, depth=6):
    class Mixer(nn.Module):
        def __init__(self):
            super().__init__()
            self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
            self.tok = nn.Sequential(nn.Linear(tokens, 2 * tokens), nn.GELU(), nn.Linear(2 * tokens, tokens))
            self.ch = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

        def forward(self, x):
            x = x + self.tok(self.n1(x).transpose(1, 2)).transpose(1, 2)
            return x + self.ch(self.n2(x))

    return nn.Sequential(nn.Conv2d(3, dim, 16, 16), nn.Flatten(2), Transpose(), *[Mixer() for _ in range(depth)])


class Transpose(nn.Module):
    def forward(self, x):
        return x.transpose(1, 2)


model = nn.Sequential(mlp_mixer(), nn.Linear(384, 1000)).cuda()
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
all_tokens, all_targets = [], []
for i in range(12):
    x, y = torch.randn(24, 3, 224, 224).cuda(), torch.randint(0, 1000, (24,)).cuda()
    tokens = model(x)
    loss = F.cross_entropy(tokens.mean(1), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    all_tokens.append(tokens.detach())
    all_targets.append(y)
    print("step", i, loss.item())
print("report", len(torch.cat(all_targets)))
