import torch
from gpt_common import *

m = GPT(layers=4).cuda()
o = torch.optim.AdamW(m.parameters())
f = torch.compile(m, dynamic=True)
for i in range(4):
    f(*data(6, 512)).backward()
    o.step()
    o.zero_grad()
    print("step", i)
m.eval()
with torch.no_grad():
    for n in (300, 700, 1000):
        f(*data(12, n)).item()
