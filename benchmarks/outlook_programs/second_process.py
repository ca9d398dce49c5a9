"""Kind: settings; leaks: no; other process: 600 MiB. Depth estimation beside a notebook that holds memory."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Encoder(nn.Module):
    def __init__(self, widths=(32, 64, 128, 256)):
        super().__init__()
        self.stages = nn.ModuleList()
        cin = 3
        for w in widths:
            self.stages.append(nn.Sequential(
                nn.Conv2d(cin, w, 3, 2, 1), nn.GroupNorm(8, w), nn.ELU(), nn.Conv2d(w, w, 3, 1, 1), nn.GroupNorm(8, w), nn.ELU(),
            ))
            cin = w

    def forward(self, x):
        feats = []
        for stage in self.stages:
            x = stage(x)
            feats.append(x)
        return feats


class DepthNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.up = nn.ModuleList([nn.Conv2d(256 + 128, 128, 3, padding=1), nn.Conv2d(128 + 64, 64, 3, padding=1), nn.Conv2d(64 + 32, 32, 3, padding=1)])
        self.disp = nn.Conv2d(32, 1, 3, padding=1)

    def forward(self, x):
        feats = self.encoder(x)
        y = feats[-1]
        for conv, skip in zip(self.up, reversed(feats[:-1])):
            y = F.elu(conv(torch.cat([F.interpolate(y, scale_factor=2), skip], 1)))
        return F.interpolate(self.disp(y).sigmoid(), scale_factor=2)


def smoothness(disp, image):
    dx = (disp[..., 1:] - disp[..., :-1]).abs() * (-(image[..., 1:] - image[..., :-1]).abs().mean(1, True)).exp()
    return dx.mean()


net = DepthNet().cuda()
opt = torch.optim.Adam(net.parameters(), lr=1e-4)
for i in range(10):
    image, depth = torch.rand(12, 3, 256, 512).cuda(), torch.rand(12, 1, 256, 512).cuda()
    disp = net(image)
    loss = F.l1_loss(disp, depth) + 0.1 * smoothness(disp, image)
    opt.zero_grad()
    loss.backward()
    opt.step()
    print("step", i, loss.item())
