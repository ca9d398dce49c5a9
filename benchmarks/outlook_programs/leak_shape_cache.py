"""Kind: leak; leaks: yes. Attention biases are cached by shape, and each batch has another shape."""

import random

import torch
import torch.nn as nn
import torch.nn.functional as F

random.seed(17)
_BIAS = {}


def relative_bias(heads, t, device):
    """ALiBi-like bias, remembered by its length."""
    key = (heads, t)
    if key not in _BIAS:
        pos = torch.arange(t, device=device)
        dist = (pos[None, :] - pos[:, None]).abs().float()
        slopes = torch.linspace(1, 0.01, heads, device=device)
        _BIAS[key] = -slopes[:, None, None] * dist
    return _BIAS[key]


class Encoder(nn.Module):
    def __init__(self, d=256, heads=16, layers=2, vocab=8000):
        super().__init__()
        self.heads, self.d = heads, d
        self.emb = nn.Embedding(vocab, d)
        self.qkv = nn.ModuleList([nn.Linear(d, 3 * d) for _ in range(layers)])
        self.ff = nn.ModuleList([nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d)) for _ in range(layers)])
        self.cls = nn.Linear(d, 4)

    def forward(self, ids):
        x = self.emb(ids)
        b, t, d = x.shape
        bias = relative_bias(self.heads, t, x.device)
        for qkv, ff in zip(self.qkv, self.ff):
            q, k, v = qkv(x).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
            x = x + y.transpose(1, 2).reshape(b, t, d)
            x = x + ff(x)
        return self.cls(x.mean(1))


model = Encoder().cuda()
opt = torch.optim.Adam(model.parameters(), lr=1e-4)
for i in range(14):
    t = random.randint(500, 1000)
    ids, y = torch.randint(0, 8000, (2, t)).cuda(), torch.randint(0, 4, (2,)).cuda()
    loss = F.cross_entropy(model(ids), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    print("step", i, t, float(loss))
