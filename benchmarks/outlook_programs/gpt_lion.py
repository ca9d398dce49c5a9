"""Kind: language; leaks: no. A GPT trained with a Lion optimizer of one's own; a checkpoint is saved halfway."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["m"] = torch.zeros_like(p)
                m = state["m"]
                update = (m * b1 + p.grad * (1 - b1)).sign_()
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])
                m.mul_(b2).add_(p.grad, alpha=1 - b2)


class TinyGPT(nn.Module):
    def __init__(self, vocab=12000, d=512, n=6, ctx=512):
        super().__init__()
        self.emb, self.pos = nn.Embedding(vocab, d), nn.Embedding(ctx, d)
        self.ln = nn.ModuleList([nn.LayerNorm(d) for _ in range(2 * n)])
        self.qkv = nn.ModuleList([nn.Linear(d, 3 * d) for _ in range(n)])
        self.o = nn.ModuleList([nn.Linear(d, d) for _ in range(n)])
        self.up = nn.ModuleList([nn.Linear(d, 4 * d) for _ in range(n)])
        self.dn = nn.ModuleList([nn.Linear(4 * d, d) for _ in range(n)])
        self.register_buffer("mask", torch.tril(torch.ones(ctx, ctx, dtype=torch.bool)))

    def forward(self, ids):
        b, t = ids.shape
        x = self.emb(ids) + self.pos.weight[:t]
        for i, (qkv, o, up, dn) in enumerate(zip(self.qkv, self.o, self.up, self.dn)):
            q, k, v = qkv(self.ln[2 * i](x)).view(b, t, 3, 8, -1).permute(2, 0, 3, 1, 4)
            att = (q @ k.transpose(-1, -2)) / q.size(-1) ** 0.5
            att = att.masked_fill(~self.mask[:t, :t], float("-inf")).softmax(-1)
            x = x + o((att @ v).transpose(1, 2).reshape(b, t, -1))
            x = x + dn(F.gelu(up(self.ln[2 * i + 1](x))))
        return x @ self.emb.weight.t()


model = TinyGPT().cuda()
opt = Lion(model.parameters(), lr=1e-4, weight_decay=0.1)
for it in range(10):
    ids = torch.randint(0, 12000, (6, 385), device="cuda")
    logits = model(ids[:, :-1])
    loss = F.cross_entropy(logits.reshape(-1, 12000), ids[:, 1:].reshape(-1))
    loss.backward()
    opt.step()
    opt.zero_grad()
    print("step", it, loss.item())
    if it == 4:
        torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, "ckpt.pt")
