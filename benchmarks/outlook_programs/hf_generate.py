"""Kind: framework; leaks: no. A Llama answers chats of any length, token by token over a dynamic cache."""

import random

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

random.seed(71)


def load(dtype=torch.bfloat16):
    config = LlamaConfig(
        vocab_size=32000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=6, num_attention_heads=16,
        num_key_value_heads=16, max_position_embeddings=4096,
    )
    return LlamaForCausalLM(config).to(dtype).to("cuda").eval()


@torch.inference_mode()
def chat(model, ids, new):
    cache = DynamicCache()
    answer = []
    for _ in range(new):
        out = model(input_ids=ids, past_key_values=cache, use_cache=True)
        ids = out.logits[:, -1].float().softmax(-1).argmax(-1, keepdim=True)
        answer.append(ids)
    return torch.cat(answer, 1).cpu()


model = load()
for turn in range(9):
    n, prompt = random.choice([4, 8, 12]), random.randint(100, 700)
    answer = chat(model, torch.randint(3, 32000, (n, prompt), device="cuda"), new=random.randint(6, 16))
    print("step", turn, n, prompt, tuple(answer.shape))
