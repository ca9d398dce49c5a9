import torch
from gpt_common import *

m = GPT(vocab=8000, d=768, layers=4, heads=12, ctx=512, drop=0.1).cuda()
o = torch.optim.AdamW(m.parameters(), fused=True)
f = torch.compile(m)
for i in range(5):
    f(*data(16, 512, 8000)).backward()
    o.step()
    o.zero_grad()
    print("step", i)
