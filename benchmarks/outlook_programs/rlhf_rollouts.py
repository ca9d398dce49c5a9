"""Kind: rl; leaks: no. A language model that generates texts, then learns from them (RLHF by PPO)."""

import copy
import random

import torch
import torch.nn as nn
import torch.nn.functional as F


class Attn(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x, past=None):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        if past is not None:
            k = torch.cat([past[0], k], 2)
            v = torch.cat([past[1], v], 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=past is None and t > 1)
        return self.out(y.transpose(1, 2).reshape(b, t, d)), (k, v)


class Block(nn.Module):
    def __init__(self, dim, heads, drop=0.0):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = Attn(dim, heads)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.drop = nn.Dropout(drop)

    def forward(self, x, past=None):
        y, kv = self.attn(self.n1(x), past)
        x = x + y
        return x + self.drop(self.down(F.gelu(self.up(self.n2(x))))), kv


class LM(nn.Module):
    def __init__(self, vocab=8000, dim=384, layers=6, heads=6, drop=0.0):
        super().__init__()
        self.emb, self.pos = nn.Embedding(vocab, dim), nn.Embedding(2048, dim)
        self.blocks = nn.ModuleList([Block(dim, heads, drop) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=False)

    def features(self, ids):
        x = self.emb(ids) + self.pos(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x, _ = block(x)
        return self.norm(x)

    def forward(self, ids):
        return self.head(self.features(ids))

    def step(self, ids, past):
        x = self.emb(ids)
        new = []
        for i, block in enumerate(self.blocks):
            x, kv = block(x, past[i] if past else None)
            new.append(kv)
        return self.head(self.norm(x[:, -1:])), new


@torch.no_grad()
def generate(model, prompt, n):
    past, ids, out = None, prompt, [prompt]
    for _ in range(n):
        logits, past = model.step(ids, past)
        ids = logits[:, -1].argmax(-1, keepdim=True)
        out.append(ids)
    return torch.cat(out, 1)


def logp(model, ids):
    return model(ids).log_softmax(-1).gather(-1, ids[..., None]).squeeze(-1)


def main():
    policy, value = LM(layers=5).cuda(), LM(vocab=1, dim=256, layers=2, heads=4)
    value.emb = nn.Embedding(8000, 256)
    value.cuda()
    reference = copy.deepcopy(policy).requires_grad_(False)
    opt = torch.optim.AdamW([*policy.parameters(), *value.parameters()], 1e-5)
    rng, step = random.Random(3), 0
    for iteration in range(5):
        prompt = torch.randint(0, 8000, (32, rng.randrange(20, 60))).cuda()
        ids = generate(policy, prompt, rng.randrange(60, 120))
        with torch.no_grad():
            old, ref = logp(policy, ids), logp(reference, ids)
            adv = (old - ref) - value(ids).squeeze(-1)
        for epoch in range(2):
            for rows in torch.randperm(32).split(8):
                rows = rows.cuda()
                ratio = (logp(policy, ids[rows]) - old[rows]).exp()
                loss = -(ratio * adv[rows]).mean() + value(ids[rows]).squeeze(-1).square().mean()
                opt.zero_grad()
                loss.backward()
                opt.step()
                print("step", step)
                step += 1


main()
