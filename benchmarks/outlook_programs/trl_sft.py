"""Kind: framework; leaks: no. Supervised fine-tuning with TRL's SFTTrainer on tokenised chats, LoRA."""

import random

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import SFTConfig, SFTTrainer

random.seed(137)


def make_tokenizer():
    vocab = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"w{i}": i + 3 for i in range(500)}}
    inner = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


class Tick(TrainerCallback):
    def on_step_end(self, args, state, control, **kw):
        print("step", state.global_step)


rows = [{"input_ids": [random.randrange(3, 500) for _ in range(random.randint(80, 500))]} for _ in range(120)]
config = LlamaConfig(
    vocab_size=32000, hidden_size=512, intermediate_size=1408, num_hidden_layers=6, num_attention_heads=8,
    num_key_value_heads=4, pad_token_id=0, bos_token_id=1, eos_token_id=1,
)
trainer = SFTTrainer(
    model=LlamaForCausalLM(config).to(torch.bfloat16),
    args=SFTConfig(
        "sft", per_device_train_batch_size=6, max_steps=8, max_length=512, bf16=True, report_to=[], disable_tqdm=True,
        save_strategy="no", logging_strategy="no", gradient_checkpointing=False, learning_rate=2e-4,
    ),
    train_dataset=Dataset.from_list(rows),
    processing_class=make_tokenizer(),
    peft_config=LoraConfig(r=16, task_type="CAUSAL_LM", target_modules="all-linear"),
    callbacks=[Tick()],
)
trainer.train()
