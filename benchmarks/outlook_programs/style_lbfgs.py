"""Kind: vision; leaks: no. Style transfer: the pixels of one picture are optimised by L-BFGS."""

import torch
import torch.nn as nn
import torch.nn.functional as F

device = "cuda"


def vgg_like():
    cfg, layers, c = [64, 64, "M", 128, 128, "M", 256, 256, 256, "M", 512, 512], [], 3
    for v in cfg:
        if v == "M":
            layers.append(nn.MaxPool2d(2, 2))
        else:
            layers += [nn.Conv2d(c, v, 3, padding=1), nn.ReLU(inplace=False)]
            c = v
    return nn.Sequential(*layers).to(device).eval()


def features(net, x, at=(0, 5, 10, 17)):
    out = []
    for i, layer in enumerate(net):
        x = layer(x)
        if i in at:
            out.append(x)
    return out


def gram(x):
    b, c, h, w = x.shape
    f = x.reshape(b * c, h * w)
    return f @ f.t() / f.numel()


net = vgg_like()
for p in net.parameters():
    p.requires_grad_(False)
content, style = torch.rand(1, 3, 512, 512).to(device), torch.rand(1, 3, 512, 512).to(device)
with torch.no_grad():
    content_target = features(net, content)[-1]
    style_targets = [gram(f) for f in features(net, style)]
image = content.clone().requires_grad_(True)
optimizer = torch.optim.LBFGS([image], max_iter=4, history_size=20, tolerance_grad=-1, tolerance_change=-1)

for run in range(8):

    def closure():
        optimizer.zero_grad()
        feats = features(net, image)
        loss = F.mse_loss(feats[-1], content_target)
        for f, target in zip(feats, style_targets):
            loss = loss + 1e5 * F.mse_loss(gram(f), target)
        loss.backward()
        return loss

    value = optimizer.step(closure)
    with torch.no_grad():
        image.clamp_(0, 1)
    print("step", run, value.item())
