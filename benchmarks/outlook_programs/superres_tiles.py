"""Kind: inference; leaks: no. Super-resolution of whole photographs, tile by tile, the result put together on the GPU."""

import random

import torch
import torch.nn as nn

random.seed(31)


class RDB(nn.Module):
    def __init__(self, c=64, g=32):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(c + i * g, g if i < 4 else c, 3, padding=1) for i in range(5))

    def forward(self, x):
        feats = [x]
        for conv in self.convs[:-1]:
            feats.append(nn.functional.leaky_relu(conv(torch.cat(feats, 1)), 0.2))
        return x + 0.2 * self.convs[-1](torch.cat(feats, 1))


class SR(nn.Module):
    def __init__(self, c=64, n=4):
        super().__init__()
        self.first = nn.Conv2d(3, c, 3, padding=1)
        self.body = nn.Sequential(*[RDB(c) for _ in range(n)])
        self.up = nn.Sequential(nn.Conv2d(c, 4 * c, 3, padding=1), nn.PixelShuffle(2), nn.LeakyReLU(0.2), nn.Conv2d(c, 3, 3, padding=1))

    def forward(self, x):
        x = self.first(x)
        return self.up(x + self.body(x))


def upscale(model, photo, tile=256, margin=16):
    _, _, h, w = photo.shape
    result = torch.zeros(1, 3, 2 * h, 2 * w, device=photo.device)
    for top in range(0, h, tile):
        for left in range(0, w, tile):
            t, l = max(0, top - margin), max(0, left - margin)
            b, r = min(h, top + tile + margin), min(w, left + tile + margin)
            part = model(photo[:, :, t:b, l:r])
            bottom, right = min(h, top + tile), min(w, left + tile)
            part = part[:, :, 2 * (top - t) : 2 * (bottom - t), 2 * (left - l) : 2 * (right - l)]
            result[:, :, 2 * top : 2 * bottom, 2 * left : 2 * right] = part
    return result


model = SR().cuda().eval()
with torch.no_grad():
    for i in range(10):
        h, w = random.randint(400, 1600), random.randint(400, 2000)
        out = upscale(model, torch.rand(1, 3, h, w).cuda())
        image = (out.clamp(0, 1) * 255).byte().cpu()
        print("step", i, tuple(image.shape))
