"""Kind: leak; leaks: yes. Embeddings of a corpus are joined batch by batch on the GPU, with torch.cat."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class SentenceEncoder(nn.Module):
    def __init__(self, vocab=20000, d=512):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        layer = nn.TransformerEncoderLayer(d, 8, 2 * d, batch_first=True)
        self.enc = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    def forward(self, ids):
        return self.enc(self.emb(ids))


@torch.no_grad()
def embed(model, batches):
    """Token embeddings of all texts, for late interaction."""
    memory = torch.empty(0, 512, device="cuda")
    for i, ids in enumerate(batches):
        tokens = F.normalize(model(ids.cuda()), dim=-1)
        memory = torch.cat([memory, tokens.flatten(0, 1)])
        print("step", i, tuple(memory.shape))
    return memory


def corpus(n=14, batch=96, length=160):
    for _ in range(n):
        yield torch.randint(0, 20000, (batch, length))


if __name__ == "__main__":
    encoder = SentenceEncoder().cuda().eval()
    embed(encoder, corpus())
