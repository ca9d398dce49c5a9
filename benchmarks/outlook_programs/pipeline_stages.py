"""Kind: structure; leaks: no. A model cut into stages, micro-batches forward first and backward after (GPipe)."""

import torch
import torch.nn as nn
import torch.nn.functional as F

N_STAGES, N_MICRO = 4, 6


class Stage(nn.Module):
    def __init__(self, dim, depth, first=False, last=False, vocab=8000):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim) if first else None
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(dim, 8, 4 * dim, 0.0, batch_first=True, norm_first=True) for _ in range(depth))
        self.head = nn.Linear(dim, vocab) if last else None

    def forward(self, x):
        if self.emb is not None:
            x = self.emb(x)
        for layer in self.layers:
            x = layer(x)
        return x if self.head is None else self.head(x)


class Pipeline:
    def __init__(self, dim=512):
        self.stages = [Stage(dim, 2, first=i == 0, last=i == N_STAGES - 1).cuda() for i in range(N_STAGES)]
        self.opts = [torch.optim.Adam(s.parameters(), lr=1e-4) for s in self.stages]

    def forward_all(self, micro):
        """Run all micro-batches through all stages; the boundaries are kept for the way back."""
        kept = []
        for ids, target in micro:
            x, bounds = ids, []
            for stage in self.stages:
                inp = x.detach().requires_grad_(x.is_floating_point())
                x = stage(inp)
                bounds.append((inp, x))
            loss = F.cross_entropy(x.flatten(0, 1), target.flatten()) / len(micro)
            kept.append((loss, bounds))
        return kept

    def backward_all(self, kept):
        total = 0.0
        while kept:
            loss, bounds = kept.pop()
            loss.backward()
            grad = bounds[-1][0].grad
            for inp, out in reversed(bounds[:-1]):
                out.backward(grad)
                grad = inp.grad
            total += loss.item()
        return total

    def step(self, micro):
        total = self.backward_all(self.forward_all(micro))
        for opt in self.opts:
            opt.step()
            opt.zero_grad()
        return total


pipe = Pipeline()
for it in range(7):
    data = torch.randint(0, 8000, (N_MICRO, 2, 257)).cuda()
    micro = [(ids[:, :-1].contiguous(), ids[:, 1:]) for ids in data]
    print("step", it, pipe.step(micro))
