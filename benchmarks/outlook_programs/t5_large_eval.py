"""Kind: framework; leaks: no. T5 in the Seq2SeqTrainer, evaluated in between on batches four times as large."""

import random

import torch
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration, TrainerCallback

random.seed(127)


class Pairs(torch.utils.data.Dataset):
    def __init__(self, n):
        self.rows = [(random.randint(60, 300), random.randint(10, 60)) for _ in range(n)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        src, tgt = self.rows[i]
        return {"input_ids": torch.randint(2, 16000, (src,)), "labels": torch.randint(2, 16000, (tgt,))}


def pad(rows):
    ids = torch.nn.utils.rnn.pad_sequence([r["input_ids"] for r in rows], batch_first=True)
    labels = torch.nn.utils.rnn.pad_sequence([r["labels"] for r in rows], batch_first=True, padding_value=-100)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


class Tell(TrainerCallback):
    def on_step_end(self, args, state, control, **kw):
        print("step", state.global_step)


config = T5Config(
    vocab_size=16000, d_model=384, d_kv=64, d_ff=1024, num_layers=4, num_heads=6, decoder_start_token_id=0,
    pad_token_id=0, eos_token_id=None,
)
model = T5ForConditionalGeneration(config)
args = Seq2SeqTrainingArguments(
    "t5", per_device_train_batch_size=16, per_device_eval_batch_size=64, max_steps=8, eval_strategy="steps",
    eval_steps=4, save_strategy="no", report_to=[],
    disable_tqdm=True, logging_strategy="no", learning_rate=1e-3,
)
Seq2SeqTrainer(
    model=model, args=args, train_dataset=Pairs(200), eval_dataset=Pairs(128), data_collator=pad, callbacks=[Tell()]
).train()
