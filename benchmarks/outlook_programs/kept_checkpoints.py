"""Kind: vision; leaks: no. Every fifth step copies model and optimizer on the GPU; the last two stay."""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F


class Conv(nn.Module):
    def __init__(self, i, o, stride=1):
        super().__init__()
        self.c1, self.c2 = nn.Conv2d(i, o, 3, stride, 1, bias=False), nn.Conv2d(o, o, 3, 1, 1, bias=False)
        self.b1, self.b2 = nn.BatchNorm2d(o), nn.BatchNorm2d(o)
        self.skip = nn.Conv2d(i, o, 1, stride, bias=False)

    def forward(self, x):
        y = self.b2(self.c2(F.relu(self.b1(self.c1(x)))))
        return F.relu(y + self.skip(x))


class Net(nn.Module):
    def __init__(self, w=32, classes=100, depth=4):
        super().__init__()
        self.stem = nn.Conv2d(3, w, 3, 1, 1)
        self.stages = nn.Sequential(*[Conv(w * 2**max(i - 1, 0), w * 2**i, 2 if i else 1) for i in range(depth)])
        self.fc = nn.Linear(w * 2 ** (depth - 1), classes)

    def forward(self, x):
        return self.fc(self.stages(self.stem(x)).mean((2, 3)))


def main():
    model = Net(64, 1000, 4).cuda()
    opt = torch.optim.Adam(model.parameters())
    kept = []
    for step in range(24):
        x, y = torch.randn(16, 3, 96, 96).cuda(), torch.randint(0, 1000, (16,)).cuda()
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print("step", step)
        if step % 5 == 4:
            state = {"model": {k: v.clone() for k, v in model.state_dict().items()},
                     "opt": copy.deepcopy(opt.state_dict())}
            kept = [*kept, state][-2:]


main()
