import torch
from gpt_common import *

m = GPT(vocab=32000, d=1024, layers=8, heads=16).cuda().bfloat16().eval()
f = torch.compile(m)
with torch.no_grad():
    for i in range(4):
        f(data(8, 1024, 32000)[0]).argmax(-1)
        print("step", i)
