"""Kind: vision; leaks: no. A detector over images of any size, padded to the largest of their batch."""

import random

import torch
import torch.nn as nn
import torch.nn.functional as F

random.seed(41)


class ConvBN(nn.Sequential):
    def __init__(self, cin, cout, s=1):
        super().__init__(nn.Conv2d(cin, cout, 3, s, 1, bias=False), nn.BatchNorm2d(cout), nn.SiLU())


class Detector(nn.Module):
    def __init__(self, n_classes=20):
        super().__init__()
        self.stem = ConvBN(3, 32, 2)
        widths = [32, 64, 128, 256, 384]
        self.stages = nn.ModuleList(
            nn.Sequential(ConvBN(a, b, 2), ConvBN(b, b), ConvBN(b, b)) for a, b in zip(widths, widths[1:])
        )
        self.lateral = nn.ModuleList(nn.Conv2d(w, 128, 1) for w in widths[2:])
        self.cls = nn.Sequential(ConvBN(128, 128), nn.Conv2d(128, n_classes, 3, padding=1))
        self.box = nn.Sequential(ConvBN(128, 128), nn.Conv2d(128, 4, 3, padding=1))

    def forward(self, x):
        x = self.stem(x)
        feats = []
        for stage in self.stages:
            x = stage(x)
            feats.append(x)
        maps = [lat(f) for lat, f in zip(self.lateral, feats[1:])]
        for i in range(len(maps) - 1, 0, -1):
            maps[i - 1] = maps[i - 1] + F.interpolate(maps[i], size=maps[i - 1].shape[-2:])
        cls = torch.cat([self.cls(m).flatten(2) for m in maps], dim=2)
        box = torch.cat([self.box(m).flatten(2) for m in maps], dim=2)
        return cls, box


def load_batch(n=6):
    sizes = [(random.randint(320, 640), random.randint(320, 800)) for _ in range(n)]
    h = -(-max(s[0] for s in sizes) // 32) * 32
    w = -(-max(s[1] for s in sizes) // 32) * 32
    images = torch.zeros(n, 3, h, w)
    return images, [torch.rand(random.randint(1, 30), 4) for _ in range(n)]


model = Detector().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True)
for step in range(12):
    images, boxes = load_batch()
    images, boxes = images.cuda(), [b.cuda() for b in boxes]
    cls, pred = model(images)
    loss = cls.sigmoid().pow(2).mean()
    for p, b in zip(pred, boxes):
        cost = torch.cdist(p.t(), b, p=1)
        loss = loss + cost.min(dim=0).values.mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} {tuple(images.shape[-2:])} loss {loss.item():.3f}")
