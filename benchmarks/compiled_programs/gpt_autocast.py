import torch
from gpt_common import *

m = GPT(layers=8).cuda()
o = torch.optim.AdamW(m.parameters(), fused=True)
f = torch.compile(m)
for i in range(5):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = f(*data(12, 1024))
    loss.backward()
    o.step()
    o.zero_grad()
    print("step", i)
