"""Kind: inference; leaks: no. Generation for requests of any length, with a cache grown by torch.cat."""

import random

import torch
import torch.nn as nn
import torch.nn.functional as F

random.seed(5)
DIM, HEADS, LAYERS, VOCAB = 1024, 16, 6, 32000


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.ff = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.SiLU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x, past):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, HEADS, DIM // HEADS).permute(2, 0, 3, 1, 4)
        if past is not None:
            k = torch.cat([past[0], k], dim=2)
            v = torch.cat([past[1], v], dim=2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=past is None)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, DIM))
        return x + self.ff(self.norm2(x)), (k, v)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    @torch.inference_mode()
    def generate(self, ids, n_new):
        past = [None] * LAYERS
        out = [ids]
        for _ in range(n_new):
            x = self.emb(ids)
            for i, layer in enumerate(self.layers):
                x, past[i] = layer(x, past[i])
            ids = self.head(x[:, -1:]).argmax(-1)
            out.append(ids)
        return torch.cat(out, dim=1)


if __name__ == "__main__":
    model = Decoder().half().cuda().eval()
    for request in range(9):
        n, prompt = random.choice([8, 16, 24, 32]), random.randint(100, 700)
        ids = torch.randint(0, VOCAB, (n, prompt)).cuda()
        text = model.generate(ids, random.randint(8, 24)).cpu()
        print(f"step {request}: answered {tuple(text.shape)}")
