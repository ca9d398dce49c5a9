"""Kind: framework; leaks: no. GPT-2 from a configuration in the Trainer of transformers, in bfloat16."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments


class Blocks(torch.utils.data.Dataset):
    def __init__(self, n, length, vocab):
        self.n, self.length, self.vocab = n, length, vocab

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        ids = torch.randint(0, self.vocab, (self.length,))
        return {"input_ids": ids, "labels": ids.clone()}


class Progress(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        print(f"step {state.global_step}")


def main():
    config = GPT2Config(vocab_size=20000, n_positions=512, n_embd=512, n_layer=6, n_head=8)
    model = GPT2LMHeadModel(config)
    args = TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=8,
        max_steps=8,
        learning_rate=5e-4,
        bf16=True,
        logging_steps=4,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_num_workers=0,
    )
    trainer = Trainer(model=model, args=args, train_dataset=Blocks(256, 512, 20000), callbacks=[Progress()])
    trainer.train()


main()
