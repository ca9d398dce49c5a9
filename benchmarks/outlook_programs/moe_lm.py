"""Kind: language; leaks: no. A mixture of experts with a fixed capacity per expert, AdamW."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class MoE(nn.Module):
    def __init__(self, d, n_experts=8, k=2, factor=1.25):
        super().__init__()
        self.k, self.factor = k, factor
        self.router = nn.Linear(d, n_experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(d, 3 * d), nn.SiLU(), nn.Linear(3 * d, d)) for _ in range(n_experts)
        )

    def forward(self, x):
        b, t, d = x.shape
        flat = x.reshape(b * t, d)
        probs = self.router(flat).softmax(-1)
        capacity = int(self.factor * self.k * len(flat) / len(self.experts))
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            gate, index = probs[:, i].topk(capacity)
            out.index_add_(0, index, expert(flat[index]) * gate[:, None])
        aux = probs.mean(0).pow(2).sum() * len(self.experts)
        return out.view(b, t, d), aux


class Layer(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.n1, self.n2 = nn.RMSNorm(d), nn.RMSNorm(d)
        self.attn = nn.MultiheadAttention(d, heads, batch_first=True, bias=False)
        self.moe = MoE(d)

    def forward(self, x, mask):
        h = self.n1(x)
        x = x + self.attn(h, h, h, attn_mask=mask, need_weights=False)[0]
        y, aux = self.moe(self.n2(x))
        return x + y, aux


class Model(nn.Module):
    def __init__(self, vocab=16000, d=384, layers=4):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.layers = nn.ModuleList(Layer(d, 6) for _ in range(layers))
        self.head = nn.Linear(d, vocab, bias=False)

    def forward(self, ids):
        t = ids.size(1)
        mask = torch.full((t, t), float("-inf"), device=ids.device).triu(1)
        x, aux = self.emb(ids), 0.0
        for layer in self.layers:
            x, a = layer(x, mask)
            aux = aux + a
        return self.head(x), aux


model = Model().cuda()
opt = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95))
for step in range(9):
    ids = torch.randint(0, 16000, (8, 257)).cuda()
    logits, aux = model(ids[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()) + 0.01 * aux
    opt.zero_grad()
    loss.backward()
    opt.step()
    print("step", step, "loss", loss.item(), "aux", float(aux))
