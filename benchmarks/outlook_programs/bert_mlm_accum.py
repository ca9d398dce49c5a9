"""Kind: language; leaks: no. Masked language modelling of padded sentences, two batches to an update."""

import random

import torch
import torch.nn as nn
import torch.nn.functional as F

random.seed(59)
VOCAB, D = 24000, 512


class Bert(nn.Module):
    def __init__(self, layers=6):
        super().__init__()
        self.tok, self.seg, self.pos = nn.Embedding(VOCAB, D), nn.Embedding(2, D), nn.Embedding(512, D)
        self.norm = nn.LayerNorm(D)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(D, 8, 4 * D, 0.1, "gelu", batch_first=True) for _ in range(layers)
        )
        self.transform = nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.LayerNorm(D))
        self.bias = nn.Parameter(torch.zeros(VOCAB))

    def forward(self, ids, pad):
        pos = torch.arange(ids.size(1), device=ids.device)
        x = self.norm(self.tok(ids) + self.pos(pos) + self.seg(torch.zeros_like(ids)))
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=pad)
        return self.transform(x) @ self.tok.weight.t() + self.bias


def make_batch(n=12):
    lengths = [min(384, max(16, int(random.gauss(160, 70)))) for _ in range(n)]
    t = max(lengths)
    pad = torch.arange(t)[None, :] >= torch.tensor(lengths)[:, None]
    return torch.randint(5, VOCAB, (n, t)), pad


model = Bert().cuda()
no_decay = [p for n, p in model.named_parameters() if "bias" in n or "norm" in n]
decay = [p for n, p in model.named_parameters() if not ("bias" in n or "norm" in n)]
opt = torch.optim.AdamW([{"params": decay}, {"params": no_decay, "weight_decay": 0.0}], lr=1e-4, foreach=False)
for update in range(8):
    for micro in range(2):
        ids, pad = make_batch()
        ids, pad = ids.cuda(), pad.cuda()
        scores = model(ids, pad)
        loss = F.cross_entropy(scores.view(-1, VOCAB), ids.view(-1)) / 2
        loss.backward()
    opt.step()
    opt.zero_grad()
    print("step", update, loss.item())
