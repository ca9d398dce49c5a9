"""Kind: leak; leaks: yes. The best weights are kept after each epoch, as copies on the GPU."""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F


class Tabular(nn.Module):
    def __init__(self, n_in=256, width=2048, depth=4):
        super().__init__()
        dims = [n_in] + [width] * depth
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(dims, dims[1:]))
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in range(depth))
        self.out = nn.Linear(width, 2)

    def forward(self, x):
        for layer, norm in zip(self.layers, self.norms):
            x = F.dropout(F.relu(norm(layer(x))), 0.2, self.training)
        return self.out(x)


class History:
    def __init__(self):
        self.best = float("inf")
        self.snapshots = []

    def update(self, epoch, value, model):
        if value <= self.best:
            self.best = value
            self.snapshots.append((epoch, copy.deepcopy(model.state_dict())))


def run_epoch(model, opt, batches=5, n=2048):
    model.train()
    for _ in range(batches):
        x, y = torch.randn(n, 256).cuda(), torch.randint(0, 2, (n,)).cuda()
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
    return 0.0 * loss.item()


model = Tabular().cuda()
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
history = History()
for epoch in range(12):
    value = run_epoch(model, opt)
    history.update(epoch, value, model)
    print("step", epoch, value, len(history.snapshots))
