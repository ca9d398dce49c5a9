"""Kind: vision; leaks: no. Pictures that become larger every four steps."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, cin, cout, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(cin, cout, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(cout, cout, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(cout), nn.BatchNorm2d(cout)
        self.short = nn.Conv2d(cin, cout, 1, stride) if stride > 1 or cin != cout else nn.Identity()

    def forward(self, x):
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.short(x))


w = 40
net = nn.Sequential(
    nn.Conv2d(3, w, 3, 1, 1), Block(w, w, 1), Block(w, 2 * w, 2), Block(2 * w, 2 * w, 1),
    Block(2 * w, 4 * w, 2), Block(4 * w, 4 * w, 1), Block(4 * w, 8 * w, 2), Block(8 * w, 8 * w, 1),
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * w, 100),
).cuda()
opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
step = 0
for size in (64, 96, 128, 160):
    for _ in range(4):
        x, y = torch.randn(32, 3, size, size).cuda(), torch.randint(0, 100, (32,)).cuda()
        loss = F.cross_entropy(net(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} {loss.item():.3f}")
        step += 1
