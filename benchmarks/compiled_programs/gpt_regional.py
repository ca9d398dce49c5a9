import torch
from gpt_common import *

m = GPT().cuda()
o = torch.optim.AdamW(m.parameters(), lr=1e-4, fused=True)
for i, b in enumerate(m.blocks):
    m.blocks[i] = torch.compile(b)
for i in range(5):
    loss = m(*data(8, 1024))
    loss.backward()
    o.step()
    o.zero_grad()
    print("step", i)
