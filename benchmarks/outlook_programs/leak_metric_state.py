"""Kind: leak; leaks: yes. A metric stores scores and targets of all pixels until compute(), never called."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class PixelAUC:
    def __init__(self):
        self.scores, self.targets = [], []

    def update(self, scores, targets):
        self.scores.append(scores)
        self.targets.append(targets)

    def compute(self):
        s, t = torch.cat(self.scores), torch.cat(self.targets)
        order = s.argsort(descending=True)
        return (t[order].cumsum(0) / torch.arange(1, len(t) + 1, device=t.device)).mean()


class FCN(nn.Module):
    def __init__(self, c=32):
        super().__init__()
        self.a = nn.Sequential(nn.Conv2d(3, c, 3, padding=1), nn.ReLU(), nn.Conv2d(c, 2 * c, 3, 2, 1), nn.ReLU())
        self.b = nn.Sequential(nn.Conv2d(2 * c, 4 * c, 3, 2, 1), nn.ReLU(), nn.Conv2d(4 * c, 4 * c, 3, padding=1), nn.ReLU())
        self.out = nn.Conv2d(4 * c, 1, 1)

    def forward(self, x):
        return F.interpolate(self.out(self.b(self.a(x))), scale_factor=4, mode="bilinear")


net, metric = FCN().cuda(), PixelAUC()
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
for i in range(12):
    x = torch.rand(24, 3, 256, 256).cuda()
    y = torch.zeros(24, 1, 256, 256).cuda()
    logits = net(x)
    loss = F.binary_cross_entropy_with_logits(logits, y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    with torch.no_grad():
        for s, t in zip(logits.sigmoid(), y):
            metric.update(s.flatten().clone(), t.flatten().double())
    print("step", i, loss.item())
