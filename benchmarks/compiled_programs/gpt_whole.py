import torch
from gpt_common import *

m = GPT().cuda()
o = torch.optim.AdamW(m.parameters(), lr=1e-4)
f = torch.compile(m)
for i in range(5):
    loss = f(*data(8, 1024))
    loss.backward()
    o.step()
    o.zero_grad()
    print("step", i)
