"""Kind: inference; leaks: no. Questions are embedded and compared with an index of documents on the GPU."""

import random

import torch
import torch.nn as nn
import torch.nn.functional as F

random.seed(67)


class Tower(nn.Module):
    def __init__(self, vocab=30000, d=512):
        super().__init__()
        self.emb = nn.EmbeddingBag(vocab, d)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.LayerNorm(4 * d), nn.Linear(4 * d, 256))

    def forward(self, ids):
        return F.normalize(self.mlp(self.emb(ids)), dim=-1)


class Index:
    """Documents as half-precision vectors, searched by brute force."""

    def __init__(self, tower, n_docs=400_000, chunk=50_000):
        parts = []
        for start in range(0, n_docs, chunk):
            ids = torch.randint(0, 30000, (min(chunk, n_docs - start), 24)).cuda()
            parts.append(tower(ids).half())
        self.vectors = torch.cat(parts)

    def search(self, queries, k=50):
        scores = queries.half() @ self.vectors.T
        return scores.topk(k, dim=-1)


@torch.inference_mode()
def main():
    tower = Tower().cuda().eval()
    index = Index(tower)
    for i in range(12):
        n = random.choice([16, 32, 64, 128, 256, 400])
        queries = tower(torch.randint(0, 30000, (n, 16)).cuda())
        scores, ids = index.search(queries)
        rerank = (queries[:, None].half() * index.vectors[ids]).sum(-1)
        order = rerank.argsort(dim=-1, descending=True)
        print("step", i, ids.gather(1, order)[:, :10].cpu().shape)


main()
