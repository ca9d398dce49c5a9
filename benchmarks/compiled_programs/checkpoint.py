import torch
from gpt_common import *
from torch.utils.checkpoint import checkpoint


class C(GPT):
    def forward(s, idx, targets):
        x = s.wte(idx) + s.wpe(torch.arange(idx.size(1), device=idx.device))
        for b in s.blocks:
            x = checkpoint(b, x, use_reentrant=False)
        l = s.head(s.ln(x))
        return F.cross_entropy(l.view(-1, l.size(-1)), targets.view(-1))


m = C(vocab=4000).cuda()
o = torch.optim.AdamW(m.parameters())
f = torch.compile(m)
for i in range(5):
    f(*data(16, 1024, 4000)).backward()
    o.step()
    o.zero_grad()
    print("step", i)
