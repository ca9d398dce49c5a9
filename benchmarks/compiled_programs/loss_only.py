import torch
from gpt_common import *

m = GPT(layers=4).cuda()
o = torch.optim.AdamW(m.parameters())


@torch.compile
def loss_of(h, w, y):
    return F.cross_entropy((h @ w.t()).float().view(-1, w.size(0)), y.view(-1))


class H(GPT):
    pass


def hidden(idx):
    x = m.wte(idx) + m.wpe(torch.arange(idx.size(1), device=idx.device))
    for b in m.blocks:
        x = b(x)
    return m.ln(x)


for i in range(5):
    x, y = data(8, 1024)
    loss_of(hidden(x), m.head.weight, y).backward()
    o.step()
    o.zero_grad()
    print("step", i)
