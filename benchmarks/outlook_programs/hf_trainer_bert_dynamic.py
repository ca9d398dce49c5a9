"""Kind: framework; leaks: no. A BERT classifier in the Trainer, each batch padded to its longest text."""

import random

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments

random.seed(61)


class Reviews(torch.utils.data.Dataset):
    def __init__(self, n=400):
        self.lengths = [min(510, max(8, int(random.lognormvariate(5.0, 0.6)))) for _ in range(n)]

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, i):
        return {"input_ids": torch.randint(5, 20000, (self.lengths[i],)), "labels": i % 2}


def collate(rows):
    ids = torch.nn.utils.rnn.pad_sequence([r["input_ids"] for r in rows], batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(r["input_ids"]) for r in rows], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([r["labels"] for r in rows])}


class Log(TrainerCallback):
    def on_step_end(self, args, state, control, **kw):
        print("step", state.global_step)


config = BertConfig(vocab_size=20000, hidden_size=512, num_hidden_layers=6, num_attention_heads=8, intermediate_size=2048)
model = BertForSequenceClassification(config)
args = TrainingArguments(
    "out", per_device_train_batch_size=24, max_steps=10, fp16=True, learning_rate=3e-5,
    save_strategy="no", report_to=[], disable_tqdm=True, logging_strategy="no", seed=1,
)
Trainer(model=model, args=args, train_dataset=Reviews(), data_collator=collate, callbacks=[Log()]).train()
