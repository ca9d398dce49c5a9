import torch, torch._functorch.config as c
from gpt_common import *

c.activation_memory_budget = 0.5
m = GPT(vocab=4000).cuda()
o = torch.optim.AdamW(m.parameters())
f = torch.compile(m)
for i in range(4):
    f(*data(16, 1024, 4000)).backward()
    o.step()
    o.zero_grad()
    print("step", i)
