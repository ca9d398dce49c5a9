"""Kind: vision; leaks: no. A U-Net with skip connections segments tiles; dice and cross entropy, Adam."""

import torch
import torch.nn as nn
import torch.nn.functional as F


def double_conv(cin, cout):
    return nn.Sequential(
        nn.Conv2d(cin, cout, 3, padding=1), nn.BatchNorm2d(cout), nn.ReLU(inplace=True),
        nn.Conv2d(cout, cout, 3, padding=1), nn.BatchNorm2d(cout), nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    def __init__(self, classes=5, widths=(32, 64, 128, 256)):
        super().__init__()
        self.downs = nn.ModuleList()
        cin = 3
        for w in widths:
            self.downs.append(double_conv(cin, w))
            cin = w
        self.bottom = double_conv(cin, 2 * cin)
        self.ups, self.merges = nn.ModuleList(), nn.ModuleList()
        for w in reversed(widths):
            self.ups.append(nn.ConvTranspose2d(2 * w, w, 2, stride=2))
            self.merges.append(double_conv(2 * w, w))
        self.out = nn.Conv2d(widths[0], classes, 1)

    def forward(self, x):
        skips = []
        for down in self.downs:
            x = down(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.bottom(x)
        for up, merge in zip(self.ups, self.merges):
            x = merge(torch.cat([skips.pop(), up(x)], dim=1))
        return self.out(x)


def dice_loss(logits, target, eps=1.0):
    prob = logits.softmax(1)
    hot = F.one_hot(target, logits.size(1)).permute(0, 3, 1, 2).float()
    inter = (prob * hot).sum((0, 2, 3))
    return 1 - ((2 * inter + eps) / (prob.sum((0, 2, 3)) + hot.sum((0, 2, 3)) + eps)).mean()


net = UNet().to("cuda")
optimizer = torch.optim.Adam(net.parameters(), lr=1e-4)
for it in range(9):
    tiles = torch.rand(6, 3, 256, 256).to("cuda")
    masks = torch.randint(0, 5, (6, 256, 256)).to("cuda")
    logits = net(tiles)
    loss = F.cross_entropy(logits, masks) + dice_loss(logits, masks)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("step", it, round(loss.item(), 4))
