"""Kind: settings; leaks: no. Sentence pairs of any length, expandable segments already on."""

import os

os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"

import random

import torch
import torch.nn as nn
import torch.nn.functional as F

random.seed(23)


class PairEncoder(nn.Module):
    def __init__(self, vocab=20000, d=512, layers=4):
        super().__init__()
        self.emb = nn.Embedding(vocab, d, padding_idx=0)
        layer = nn.TransformerEncoderLayer(d, 8, 2048, 0.0, activation="gelu", batch_first=True)
        self.enc = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.pool = nn.Linear(d, 256)

    def forward(self, ids):
        h = self.enc(self.emb(ids))
        return F.normalize(self.pool(h.mean(dim=1)), dim=-1)


def batch(n=24):
    a, b = (min(480, int(random.lognormvariate(4.8, 0.5))) for _ in range(2))
    return torch.randint(1, 20000, (n, a)), torch.randint(1, 20000, (n, b))


model = PairEncoder().cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 5))
target = torch.arange(24, device="cuda")
for step in range(12):
    left, right = (x.cuda() for x in batch())
    scores = model(left) @ model(right).T * 20
    loss = (F.cross_entropy(scores, target) + F.cross_entropy(scores.T, target)) / 2
    loss.backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    print(f"step {step} {left.size(1)}x{right.size(1)} loss={loss.item():.3f}")
