"""Kind: vision; leaks: no. SGD with momentum, and an average of the weights made before the first step."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.swa_utils import AveragedModel


def block(cin, cout, stride):
    return nn.Sequential(
        nn.Conv2d(cin, cout, 3, stride, 1, bias=False), nn.BatchNorm2d(cout), nn.ReLU(),
        nn.Conv2d(cout, cout, 3, 1, 1, bias=False), nn.BatchNorm2d(cout), nn.ReLU(),
    )


w = 64
net = nn.Sequential(
    nn.Conv2d(3, w, 3, 1, 1), block(w, w, 1), block(w, 2 * w, 2), block(2 * w, 4 * w, 2),
    block(4 * w, 8 * w, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * w, 100),
).cuda()
average = AveragedModel(net)
opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
for step in range(10):
    x, y = torch.randn(48, 3, 96, 96).cuda(), torch.randint(0, 100, (48,)).cuda()
    loss = F.cross_entropy(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    average.update_parameters(net)
    print(f"step {step} {loss.item():.3f}")
