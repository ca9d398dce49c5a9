"""Kind: settings; leaks: no. Documents of any length, encoder and decoder, max_split_size_mb already set."""

import os

os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "max_split_size_mb:128"

import random

import torch
import torch.nn as nn
import torch.nn.functional as F

random.seed(83)
VOCAB, D = 18000, 384


class Summarizer(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, D, padding_idx=0)
        self.body = nn.Transformer(D, 6, 4, 4, 4 * D, 0.1, "gelu", batch_first=True)
        self.out = nn.Linear(D, VOCAB)

    def forward(self, src, tgt):
        mask = self.body.generate_square_subsequent_mask(tgt.size(1), device=tgt.device)
        h = self.body(self.emb(src), self.emb(tgt), tgt_mask=mask, src_key_padding_mask=src == 0)
        return self.out(h)


def sampler(n_batches, max_tokens=6000):
    for _ in range(n_batches):
        long, short = random.randint(150, 900), random.randint(20, 120)
        n = max(2, max_tokens // long)
        yield torch.randint(1, VOCAB, (n, long)), torch.randint(1, VOCAB, (n, short))


model = Summarizer().cuda()
opt = torch.optim.Adam(model.parameters(), lr=1e-4)
for i, (src, tgt) in enumerate(sampler(11)):
    src, tgt = src.cuda(), tgt.cuda()
    logits = model(src, tgt[:, :-1])
    loss = F.cross_entropy(logits.transpose(1, 2), tgt[:, 1:], label_smoothing=0.1)
    opt.zero_grad()
    loss.backward()
    opt.step()
    print("step", i, tuple(src.shape), loss.item())
