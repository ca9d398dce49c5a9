"""Kind: vision; leaks: no. A convolutional autoencoder, four small batches to an update."""

import torch
import torch.nn as nn

ACCUMULATE = 4


class AutoEncoder(nn.Module):
    def __init__(self, ch=48):
        super().__init__()
        enc, dec, c = [], [], 3
        for i in range(4):
            n = ch * 2**i
            enc += [nn.Conv2d(c, n, 4, 2, 1), nn.InstanceNorm2d(n), nn.LeakyReLU(0.2)]
            c = n
        for i in reversed(range(4)):
            n = 3 if i == 0 else ch * 2 ** (i - 1)
            dec += [nn.ConvTranspose2d(c, n, 4, 2, 1)]
            dec += [nn.InstanceNorm2d(n), nn.ReLU()] if i else [nn.Sigmoid()]
            c = n
        self.encoder, self.decoder = nn.Sequential(*enc), nn.Sequential(*dec)

    def forward(self, x):
        return self.decoder(self.encoder(x))


class Trainer:
    def __init__(self):
        self.model = AutoEncoder().cuda()
        self.opt = torch.optim.Adam(self.model.parameters(), lr=1e-3, amsgrad=True)
        self.criterion = nn.L1Loss()

    def update(self):
        total = 0.0
        self.opt.zero_grad()
        for _ in range(ACCUMULATE):
            x = torch.rand(16, 3, 256, 256, device="cuda")
            loss = self.criterion(self.model(x), x) / ACCUMULATE
            loss.backward()
            total += loss.item()
        self.opt.step()
        return total


trainer = Trainer()
for i in range(8):
    print("step", i, trainer.update())
