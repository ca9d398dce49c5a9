"""Kind: structure; leaks: no. A click predictor: large tables with sparse gradients under a dense tower."""

import random

import torch
import torch.nn as nn
import torch.nn.functional as F


def main():
    tables = nn.ModuleList([nn.EmbeddingBag(n, 128, sparse=True, mode="sum") for n in (400_000, 200_000, 100_000)]).cuda()
    tower = nn.Sequential(nn.Linear(384 + 64, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 1)).cuda()
    so = torch.optim.SparseAdam(list(tables.parameters()), 1e-3)
    do = torch.optim.Adam(tower.parameters(), 1e-3)
    rng = random.Random(21)
    for step in range(18):
        b = 8192
        dense, y = torch.randn(b, 64).cuda(), torch.rand(b).cuda()
        bags = []
        for t in tables:
            n = rng.randrange(2, 9)
            bags.append(t(torch.randint(0, 100_000, (b, n)).cuda()))
        out = tower(torch.cat([*bags, dense], 1)).squeeze(1)
        loss = F.binary_cross_entropy_with_logits(out, y)
        so.zero_grad(); do.zero_grad()
        loss.backward()
        so.step(); do.step()
        print("step", step)


main()
