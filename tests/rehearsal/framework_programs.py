"""Small training programs over the frameworks that people train with, from configurations alone.

Each is an ordinary program that needs no network. ``PEAK_BYTES`` has what the allocator of PyTorch
2.12.1 itself (the CUDA build, on a simulated GPU of compute capability 9.0) counted for it:
``torch.cuda.max_memory_allocated()`` at its end, with transformers 5.23.0, accelerate 1.15.0,
peft 0.21.2, lightning 2.6.6, timm 1.0.31 and diffusers 0.42.1. The simulated GPU has no values,
so it cannot say how many tokens the masks of TRL 1.16.0 keep: its trainers only have to run.
"""

from __future__ import annotations

from typing import Final

TRANSFORMERS: Final = """
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    class Tokens(torch.utils.data.Dataset):
        def __len__(self):
            return 64
        def __getitem__(self, i):
            ids = torch.full((128,), i % 50)
            return {"input_ids": ids, "labels": ids}

    model = GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=256, n_head=4, vocab_size=8000))
    arguments = TrainingArguments("out", per_device_train_batch_size=8, max_steps=4, bf16=True,
                                  report_to=[], save_strategy="no", logging_steps=1)
    Trainer(model=model, args=arguments, train_dataset=Tokens()).train()
"""

ACCELERATE_PEFT: Final = """
    import torch
    from accelerate import Accelerator
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    accelerator = Accelerator(mixed_precision="bf16")
    model = LlamaForCausalLM(LlamaConfig(hidden_size=256, intermediate_size=688, vocab_size=8000,
        num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2))
    model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    model, optimizer = accelerator.prepare(model, optimizer)
    for step in range(4):
        ids = torch.randint(0, 8000, (8, 128), device=accelerator.device)
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
"""

LIGHTNING: Final = """
    import lightning
    import torch
    from torch import nn

    class Classifier(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(),
                nn.Conv2d(64, 128, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                nn.Linear(128, 10))
        def training_step(self, batch, _):
            x, y = batch
            return nn.functional.cross_entropy(self.net(x), y)
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    data = torch.utils.data.TensorDataset(torch.zeros(64, 3, 64, 64), torch.zeros(64).long())
    trainer = lightning.Trainer(accelerator="gpu", devices=1, max_steps=4, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(Classifier(), torch.utils.data.DataLoader(data, batch_size=16))
"""

TIMM: Final = """
    import timm
    import torch
    from timm.optim import create_optimizer_v2

    model = timm.create_model("vit_tiny_patch16_224", num_classes=10).cuda()
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3)
    scaler = torch.amp.GradScaler("cuda")
    for step in range(4):
        x = torch.randn(8, 3, 224, 224, device="cuda")
        with torch.autocast("cuda", torch.float16):
            loss = torch.nn.functional.cross_entropy(model(x), torch.zeros(8).long().cuda())
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
"""

DIFFUSERS: Final = """
    import torch
    from diffusers import DDPMScheduler, UNet2DModel

    model = UNet2DModel(sample_size=32, block_out_channels=(64, 128, 128), layers_per_block=1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D")).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = DDPMScheduler(num_train_timesteps=1000)
    for step in range(4):
        clean = torch.randn(8, 3, 32, 32, device="cuda")
        noise = torch.randn_like(clean)
        times = torch.randint(0, 1000, (8,), device="cuda")
        noisy = scheduler.add_noise(clean, noise, times)
        loss = torch.nn.functional.mse_loss(model(noisy, times).sample, noise)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""

TRL: Final = """
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from trl import {name}Config, {name}Trainer

    vocabulary = {{"<pad>": 0, "<eos>": 1, "a": 2, "b": 3}}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>",
        eos_token="<eos>", unk_token="<pad>")
    rows = [{row} for i in range(32)]
    config = LlamaConfig(hidden_size=256, intermediate_size=688, vocab_size=2000,
        num_hidden_layers=3, num_attention_heads=4, max_position_embeddings=256)
    arguments = {name}Config("out", max_steps=4, per_device_train_batch_size=4, bf16=True,
        report_to=[], save_strategy="no", max_length=128, gradient_checkpointing=False)
    {name}Trainer(model=LlamaForCausalLM(config), processing_class=tokenizer, args=arguments,
        train_dataset=Dataset.from_list(rows){more}).train()
"""

TRL_SFT: Final = TRL.format(name="SFT", row='{"text": "a b " * (20 + i)}', more="")
TRL_DPO: Final = TRL.format(
    name="DPO",
    row='{"prompt": "a " * 30, "chosen": "a b " * (9 + i), "rejected": "b " * 20}',
    more=", ref_model=LlamaForCausalLM(config)",
)

PROGRAMS: Final = {
    "transformers": TRANSFORMERS,
    "peft": ACCELERATE_PEFT,
    "lightning": LIGHTNING,
    "timm": TIMM,
    "diffusers": DIFFUSERS,
    "trl": TRL_SFT,
    "trl.trainer.dpo_trainer": TRL_DPO,
}
"""By the module that a program cannot do without."""

PEAK_BYTES: Final = {
    "transformers": 338_387_456,
    "peft": 242_245_120,
    "lightning": 135_929_344,
    "timm": 310_151_168,
    "diffusers": 258_353_152,
}
