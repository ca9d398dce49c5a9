"""Kind: generative; leaks: no. A DCGAN with two Adams, the generator and discriminator in turn."""

import torch
import torch.nn as nn

nz, ngf, ndf, size = 100, 96, 96, 64


def up(cin, cout, k=4, s=2, p=1):
    return [nn.ConvTranspose2d(cin, cout, k, s, p, bias=False), nn.BatchNorm2d(cout), nn.ReLU(True)]


def down(cin, cout):
    return [nn.Conv2d(cin, cout, 4, 2, 1, bias=False), nn.BatchNorm2d(cout), nn.LeakyReLU(0.2, inplace=True)]


netG = nn.Sequential(
    *up(nz, ngf * 8, 4, 1, 0), *up(ngf * 8, ngf * 4), *up(ngf * 4, ngf * 2), *up(ngf * 2, ngf),
    nn.ConvTranspose2d(ngf, 3, 4, 2, 1, bias=False), nn.Tanh(),
).cuda()
netD = nn.Sequential(
    nn.Conv2d(3, ndf, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True),
    *down(ndf, ndf * 2), *down(ndf * 2, ndf * 4), *down(ndf * 4, ndf * 8),
    nn.Conv2d(ndf * 8, 1, 4, 1, 0, bias=False), nn.Flatten(0),
).cuda()

criterion = nn.BCEWithLogitsLoss()
fixed_noise = torch.randn(64, nz, 1, 1, device="cuda")
optD = torch.optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
optG = torch.optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))
img_list = []

for i in range(10):
    netD.zero_grad()
    real = torch.rand(256, 3, size, size).cuda()
    label = torch.full((256,), 1.0, device="cuda")
    errD_real = criterion(netD(real), label)
    errD_real.backward()
    noise = torch.randn(256, nz, 1, 1, device="cuda")
    fake = netG(noise)
    label.fill_(0)
    errD_fake = criterion(netD(fake.detach()), label)
    errD_fake.backward()
    optD.step()

    netG.zero_grad()
    label.fill_(1)
    errG = criterion(netD(fake), label)
    errG.backward()
    optG.step()
    if i % 4 == 0:
        with torch.no_grad():
            img_list.append(netG(fixed_noise).detach().cpu())
    print(f"step {i} Loss_D: {(errD_real + errD_fake).item():.4f} Loss_G: {errG.item():.4f}")
