"""Kind: framework; leaks: no. Features of pictures at several resolutions from a timm ConvNeXt, kept in host memory."""

import random

import timm
import torch

random.seed(107)

model = timm.create_model("convnext_nano", pretrained=False, features_only=True).cuda().eval().half()
store = []


@torch.inference_mode()
def extract(images):
    maps = model(images.cuda().half())
    return [m.mean((2, 3)).float().cpu() for m in maps]


for i in range(12):
    n = random.choice([8, 16, 24, 32])
    h, w = (32 * random.randint(6, 14) for _ in range(2))
    store.append(extract(torch.zeros(n, 3, h, w)))
    print("step", i, (n, h, w), len(store))
