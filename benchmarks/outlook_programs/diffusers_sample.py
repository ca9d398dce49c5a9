"""Kind: framework; leaks: no. Sampling with a diffusers U-Net and DDIM, then a VAE decodes, for batches of any size."""

import random

import torch
from diffusers import AutoencoderKL, DDIMScheduler, UNet2DModel

random.seed(109)


class Sampler:
    def __init__(self):
        self.unet = UNet2DModel(
            sample_size=32, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(96, 192, 288),
            down_block_types=("DownBlock2D", "AttnDownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
        ).cuda().half().eval()
        self.vae = AutoencoderKL(
            block_out_channels=(64, 128, 128), latent_channels=4, sample_size=128,
            down_block_types=("DownEncoderBlock2D",) * 3, up_block_types=("UpDecoderBlock2D",) * 3,
        ).cuda().half().eval()
        self.scheduler = DDIMScheduler(num_train_timesteps=1000)

    @torch.no_grad()
    def __call__(self, n, side, steps=6):
        x = torch.randn(n, 4, side, side, device="cuda", dtype=torch.float16)
        self.scheduler.set_timesteps(steps)
        for t in self.scheduler.timesteps:
            eps = self.unet(x, t).sample
            x = self.scheduler.step(eps, t, x).prev_sample
        return self.vae.decode(x / 0.18215).sample.clamp(-1, 1).cpu()


sampler = Sampler()
for i in range(8):
    images = sampler(random.choice([2, 4, 8, 12]), random.choice([32, 48, 64]))
    print("step", i, tuple(images.shape))
