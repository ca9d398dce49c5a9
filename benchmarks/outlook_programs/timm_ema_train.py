"""Kind: framework; leaks: no. A timm EfficientNet with its EMA, mixup, a LAMB optimizer and channels_last."""

import timm
import torch
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.utils import ModelEmaV3


def main():
    model = timm.create_model("efficientnet_b0", pretrained=False, num_classes=100, drop_rate=0.2)
    model = model.cuda().to(memory_format=torch.channels_last)
    ema = ModelEmaV3(model, decay=0.999)
    optimizer = create_optimizer_v2(model, opt="lamb", lr=5e-3, weight_decay=0.02)
    mixup = Mixup(mixup_alpha=0.2, num_classes=100)
    criterion = SoftTargetCrossEntropy()
    model.train()
    for i in range(8):
        x, y = torch.zeros(40, 3, 192, 192), torch.randint(0, 100, (40,))
        x, y = mixup(x.cuda(), y.cuda())
        x = x.contiguous(memory_format=torch.channels_last)
        with torch.autocast("cuda", torch.bfloat16):
            loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update(model, step=i)
        print("step", i, loss.item())


main()
