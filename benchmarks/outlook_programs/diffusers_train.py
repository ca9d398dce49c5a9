"""Kind: framework; leaks: no. A conditional diffusers U-Net trained with its noise scheduler, 8-step accumulation off."""

import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler, UNet2DConditionModel
from diffusers.optimization import get_scheduler


def build():
    return UNet2DConditionModel(
        sample_size=32, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(64, 128, 256),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=256, attention_head_dim=8,
    )


def main():
    unet = build().to("cuda")
    scheduler = DDPMScheduler(num_train_timesteps=1000)
    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-4)
    lr = get_scheduler("constant_with_warmup", optimizer, num_warmup_steps=2)
    for step in range(8):
        latents = torch.randn(16, 4, 32, 32).to("cuda")
        text = torch.randn(16, 77, 256).to("cuda")
        noise = torch.randn_like(latents)
        t = torch.randint(0, 1000, (16,), device="cuda").long()
        noisy = scheduler.add_noise(latents, noise, t)
        pred = unet(noisy, t, text).sample
        loss = F.mse_loss(pred.float(), noise.float())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(unet.parameters(), 1.0)
        optimizer.step()
        lr.step()
        optimizer.zero_grad()
        print("step", step, loss.item())


main()
