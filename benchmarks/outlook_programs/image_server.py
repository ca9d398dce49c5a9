"""Kind: inference; leaks: no. A classifier answers requests with as many pictures as come, of a few sizes."""

import random

import torch
import torch.nn as nn

random.seed(19)


def inverted(cin, cout, stride, expand=4):
    hidden = cin * expand
    return nn.Sequential(
        nn.Conv2d(cin, hidden, 1, bias=False), nn.BatchNorm2d(hidden), nn.ReLU6(inplace=True),
        nn.Conv2d(hidden, hidden, 3, stride, 1, groups=hidden, bias=False), nn.BatchNorm2d(hidden), nn.ReLU6(inplace=True),
        nn.Conv2d(hidden, cout, 1, bias=False), nn.BatchNorm2d(cout),
    )


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU6(inplace=True))
        spec = [(32, 48, 2), (48, 48, 1), (48, 96, 2), (96, 96, 1), (96, 192, 2), (192, 192, 1), (192, 320, 2)]
        self.body = nn.Sequential(*[inverted(*s) for s in spec])
        self.fc = nn.Linear(320, 1000)

    def forward(self, x):
        return self.fc(self.body(self.stem(x)).mean((2, 3)))


class Service:
    def __init__(self):
        self.model = Net().cuda().eval()
        self.mean = torch.tensor([0.485, 0.456, 0.406], device="cuda").view(1, 3, 1, 1)
        self.std = torch.tensor([0.229, 0.224, 0.225], device="cuda").view(1, 3, 1, 1)

    @torch.inference_mode()
    def __call__(self, pictures):
        x = (pictures.cuda().float() / 255 - self.mean) / self.std
        x = nn.functional.interpolate(x, size=(320, 320), mode="bilinear", antialias=True)
        return self.model(x).softmax(-1).topk(5).indices.cpu()


service = Service()
for i in range(12):
    n, side = random.choice([1, 4, 8, 16, 32, 48, 64]), random.choice([256, 480, 640])
    print("step", i, service(torch.zeros(n, 3, side, side, dtype=torch.uint8)).shape)
