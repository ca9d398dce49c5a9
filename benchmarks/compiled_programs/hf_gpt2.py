import torch
from transformers import GPT2Config, GPT2LMHeadModel

m = GPT2LMHeadModel(GPT2Config(n_layer=6, n_embd=512, n_head=8, vocab_size=20000)).cuda()
f = torch.compile(m)
o = torch.optim.AdamW(m.parameters())
for i in range(5):
    x = torch.randint(0, 20000, (8, 512), device="cuda")
    f(input_ids=x, labels=x).loss.backward()
    o.step()
    o.zero_grad()
    print("step", i)
