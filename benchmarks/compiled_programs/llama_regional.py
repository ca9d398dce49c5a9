import torch
from transformers import LlamaConfig, LlamaForCausalLM

c = LlamaConfig(vocab_size=16000, hidden_size=768, intermediate_size=2048, num_hidden_layers=6, num_attention_heads=12, num_key_value_heads=4)
m = LlamaForCausalLM(c).cuda().bfloat16()
for layer in m.model.layers:
    layer.compile()
o = torch.optim.AdamW(m.parameters(), lr=1e-4)
for i in range(5):
    x = torch.randint(0, 16000, (4, 1024), device="cuda")
    m(input_ids=x, labels=x).loss.backward()
    torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)
    o.step()
    o.zero_grad()
    torch.empty(40961 + i, dtype=torch.uint8, device="cuda")  # ends a step
