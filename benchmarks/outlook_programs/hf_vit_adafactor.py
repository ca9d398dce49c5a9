"""Kind: framework; leaks: no. A ViT of transformers in the Trainer with Adafactor, saved on the way."""

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments, ViTConfig, ViTForImageClassification


class Pictures(torch.utils.data.Dataset):
    def __len__(self):
        return 300

    def __getitem__(self, i):
        return {"pixel_values": torch.zeros(3, 160, 160), "labels": i % 10}


class Report(TrainerCallback):
    def on_step_end(self, args, state, control, **kw):
        print("step", state.global_step)


config = ViTConfig(
    image_size=160, patch_size=16, hidden_size=384, num_hidden_layers=8, num_attention_heads=6,
    intermediate_size=1536, num_labels=10,
)
trainer = Trainer(
    model=ViTForImageClassification(config),
    args=TrainingArguments(
        "vit", per_device_train_batch_size=64, max_steps=8, optim="adafactor", learning_rate=1e-3, save_steps=4,
        save_total_limit=1, report_to=[], disable_tqdm=True, logging_strategy="no",
    ),
    train_dataset=Pictures(),
    callbacks=[Report()],
)
trainer.train()
