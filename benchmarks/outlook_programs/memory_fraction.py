"""Kind: settings; leaks: no. A shared GPU: the process may have four fifths of it; a ConvNeXt with AdamW."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.cuda.set_per_process_memory_fraction(0.8)


class ConvNeXtBlock(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dw = nn.Conv2d(dim, dim, 7, padding=3, groups=dim)
        self.norm = nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.gamma = nn.Parameter(1e-6 * torch.ones(dim))

    def forward(self, x):
        y = self.norm(self.dw(x).permute(0, 2, 3, 1))
        y = self.gamma * self.down(F.gelu(self.up(y)))
        return x + y.permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    def __init__(self, dims=(64, 128, 256, 512), depths=(2, 2, 4, 2), classes=200):
        super().__init__()
        stages, cin = [], 3
        for i, (d, n) in enumerate(zip(dims, depths)):
            k = 4 if i == 0 else 2
            stages += [nn.Conv2d(cin, d, k, k), *[ConvNeXtBlock(d) for _ in range(n)]]
            cin = d
        self.stages, self.head = nn.Sequential(*stages), nn.Linear(cin, classes)

    def forward(self, x):
        return self.head(self.stages(x).mean((2, 3)))


model = ConvNeXt().cuda()
opt = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.05)
for i in range(9):
    x, y = torch.randn(32, 3, 192, 192).cuda(), torch.randint(0, 200, (32,)).cuda()
    loss = F.cross_entropy(model(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    print("step", i, loss.item())
