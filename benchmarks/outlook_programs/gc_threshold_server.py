"""Kind: settings; leaks: no. An embedding service for texts of any length, garbage collection already on."""

import os

os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "garbage_collection_threshold:0.6"

import random

import torch
import torch.nn as nn

random.seed(97)


class Embedder(nn.Module):
    def __init__(self, vocab=30000, d=768, layers=4):
        super().__init__()
        self.emb, self.pos = nn.Embedding(vocab, d), nn.Embedding(2048, d)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(d, 12, 3072, 0.0, "gelu", batch_first=True, norm_first=True) for _ in range(layers))

    def forward(self, ids):
        x = self.emb(ids) + self.pos.weight[: ids.size(1)]
        for layer in self.layers:
            x = layer(x)
        return nn.functional.normalize(x.mean(1), dim=-1)


class Queue:
    """Requests as they come: mostly short ones, now and then a long batch."""

    def __iter__(self):
        for _ in range(16):
            if random.random() < 0.3:
                yield random.randint(8, 24), random.randint(600, 1500)
            else:
                yield random.randint(1, 64), random.randint(10, 200)


def main():
    model = Embedder().cuda().eval()
    with torch.inference_mode():
        for i, (n, t) in enumerate(Queue()):
            vectors = model(torch.randint(0, 30000, (n, t)).cuda())
            print("step", i, (n, t), tuple(vectors.cpu().shape))


main()
