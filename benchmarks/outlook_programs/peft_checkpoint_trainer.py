"""Kind: framework; leaks: no. LoRA with gradient checkpointing and accumulation in the Trainer, wide vocabulary."""

import random

import torch
from peft import LoraConfig, TaskType, get_peft_model
from transformers import Qwen2Config, Qwen2ForCausalLM, Trainer, TrainerCallback, TrainingArguments

random.seed(103)


class Instructions(torch.utils.data.Dataset):
    def __init__(self, n=200):
        self.lengths = [random.randint(60, 600) for _ in range(n)]

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, i):
        return torch.randint(0, 60000, (self.lengths[i],))


def collate(rows):
    t = max(len(r) for r in rows)
    ids = torch.stack([torch.cat([r, torch.zeros(t - len(r), dtype=torch.long)]) for r in rows])
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids}


class Say(TrainerCallback):
    def on_step_end(self, args, state, control, **kw):
        print("step", state.global_step)


config = Qwen2Config(
    vocab_size=60000, hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8,
    num_key_value_heads=2, tie_word_embeddings=True, max_position_embeddings=1024,
)
base = Qwen2ForCausalLM(config).to(torch.bfloat16)
base.gradient_checkpointing_enable({"use_reentrant": False})
base.enable_input_require_grads()
model = get_peft_model(base, LoraConfig(task_type=TaskType.CAUSAL_LM, r=8, target_modules="all-linear"))
args = TrainingArguments(
    "out", per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=7, bf16=True, learning_rate=1e-4,
    save_strategy="no", report_to=[], disable_tqdm=True, logging_strategy="no", gradient_checkpointing=True,
    gradient_checkpointing_kwargs={"use_reentrant": False}, remove_unused_columns=False,
)
Trainer(model=model, args=args, train_dataset=Instructions(), data_collator=collate, callbacks=[Say()]).train()
