"""Kind: leak; leaks: yes. Forward hooks collect features of each batch, and nobody empties their list."""

from collections import defaultdict

import torch
import torch.nn as nn


class FeatureRecorder:
    """Keeps what chosen layers put out."""

    def __init__(self, model, kinds=(nn.MaxPool2d,)):
        self.features = defaultdict(list)
        for name, module in model.named_modules():
            if isinstance(module, kinds):
                module.register_forward_hook(self.hook(name))

    def hook(self, name):
        def fn(module, args, output):
            self.features[name].append(output)

        return fn


def make_net():
    layers, c = [], 3
    for w in (32, 64, 128, 256):
        layers += [nn.Conv2d(c, w, 3, padding=1), nn.BatchNorm2d(w), nn.ReLU(), nn.MaxPool2d(2)]
        c = w
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(c, 10))


def main():
    net = make_net().cuda()
    recorder = FeatureRecorder(net)
    optimizer = torch.optim.Adam(net.parameters())
    loss_fn = nn.CrossEntropyLoss()
    for step in range(10):
        images = torch.randn(48, 3, 96, 96, device="cuda")
        labels = torch.randint(0, 10, (48,), device="cuda")
        optimizer.zero_grad()
        loss = loss_fn(net(images), labels)
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.3f} maps {len(recorder.features['3'])}")


main()
