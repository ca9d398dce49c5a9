import torch, random
from gpt_common import *

random.seed(5)
m = GPT(layers=4).cuda()
o = torch.optim.AdamW(m.parameters())
f = torch.compile(m)
for i in range(8):
    f(*data(8, random.randrange(200, 1000))).backward()
    o.step()
    o.zero_grad()
    print("step", i)
