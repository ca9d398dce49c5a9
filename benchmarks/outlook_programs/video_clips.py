"""Kind: vision; leaks: no. 3D convolutions on clips of 8, 16 or 32 frames, fp16 with a gradient scaler."""

import random

import torch
import torch.nn as nn

random.seed(101)


class C3D(nn.Module):
    def __init__(self, classes=50):
        super().__init__()
        widths = [3, 32, 64, 128, 256]
        blocks = []
        for i, (a, b) in enumerate(zip(widths, widths[1:])):
            blocks += [nn.Conv3d(a, b, 3, padding=1), nn.BatchNorm3d(b), nn.ReLU()]
            blocks += [nn.MaxPool3d((1, 2, 2) if i == 0 else 2)]
        self.features = nn.Sequential(*blocks)
        self.fc = nn.Linear(widths[-1], classes)

    def forward(self, x):
        return self.fc(self.features(x).mean((2, 3, 4)))


def main():
    model = C3D().cuda()
    scaler = torch.amp.GradScaler("cuda")
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    criterion = nn.CrossEntropyLoss().cuda()
    for i in range(10):
        frames = random.choice([8, 16, 16, 32])
        clip, label = torch.randn(8, 3, frames, 112, 112), torch.randint(0, 50, (8,))
        clip, label = clip.cuda(non_blocking=True), label.cuda(non_blocking=True)
        with torch.autocast("cuda", torch.float16):
            output = model(clip)
            loss = criterion(output, label)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        print("step", i, "frames", frames, loss.item())


main()
