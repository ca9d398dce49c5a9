import torch
from transformers import LlamaConfig, LlamaForCausalLM

c = LlamaConfig(vocab_size=8000, hidden_size=768, intermediate_size=2048, num_hidden_layers=2, num_attention_heads=12, num_key_value_heads=4, eos_token_id=None, pad_token_id=0)
m = LlamaForCausalLM(c).cuda().bfloat16().eval()
for i in range(3):
    x = torch.randint(1, 8000, (8, 96), device="cuda")
    out = m.generate(x, attention_mask=torch.ones_like(x), max_new_tokens=40, min_new_tokens=40, do_sample=False, cache_implementation="static")
    print(out.shape)
    torch.empty(40961 + i, dtype=torch.uint8, device="cuda")  # ends a step
