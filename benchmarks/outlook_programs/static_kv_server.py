"""Kind: inference; leaks: no. A server with a preallocated cache; prompts of any length, batches of any size."""

import random

import torch
import torch.nn as nn
import torch.nn.functional as F

random.seed(13)
DIM, HEADS, LAYERS, MAX_LEN, MAX_BATCH = 768, 12, 5, 1024, 12


class Attn(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        shape = (MAX_BATCH, HEADS, MAX_LEN, DIM // HEADS)
        self.register_buffer("k", torch.zeros(shape), persistent=False)
        self.register_buffer("v", torch.zeros(shape), persistent=False)

    def forward(self, x, start):
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        self.k[:b, :, start : start + t] = k
        self.v[:b, :, start : start + t] = v
        keys, values = self.k[:b, :, : start + t], self.v[:b, :, : start + t]
        y = F.scaled_dot_product_attention(q, keys, values, is_causal=t > 1)
        return self.proj(y.transpose(1, 2).reshape(b, t, DIM))


class Server(nn.Module):
    def __init__(self, vocab=32000):
        super().__init__()
        self.emb = nn.Embedding(vocab, DIM)
        self.attn = nn.ModuleList(Attn() for _ in range(LAYERS))
        self.ff = nn.ModuleList(nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM)) for _ in range(LAYERS))
        self.norm = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2 * LAYERS))

    def logits(self, ids, start):
        x = self.emb(ids)
        for i in range(LAYERS):
            x = x + self.attn[i](self.norm[2 * i](x), start)
            x = x + self.ff[i](self.norm[2 * i + 1](x))
        return x @ self.emb.weight.t()

    @torch.no_grad()
    def serve(self, prompts, n_new):
        logits = self.logits(prompts, 0)
        probs = logits.float().softmax(-1)
        token = probs[:, -1].argmax(-1, keepdim=True)
        answer = [token]
        for i in range(n_new - 1):
            token = self.logits(token, prompts.size(1) + i)[:, -1].argmax(-1, keepdim=True)
            answer.append(token)
        return torch.cat(answer, 1)


server = Server().half().cuda().eval()
for request in range(10):
    prompts = torch.randint(0, 32000, (random.randint(2, MAX_BATCH), random.randint(40, 500))).cuda()
    out = server.serve(prompts, n_new=8)
    print("step", request, tuple(prompts.shape), tuple(out.shape))
