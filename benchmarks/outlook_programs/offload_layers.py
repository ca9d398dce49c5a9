"""Kind: structure; leaks: no. Layers come to the GPU one at a time, forward and backward."""

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


def main():
    model = LM(dim=512, layers=8, heads=8)
    model.emb.cuda(); model.pos.cuda(); model.norm.cuda(); model.head.cuda()
    states = {}
    for step in range(10):
        ids = torch.randint(0, 8000, (8, 256)).cuda()
        inputs = []
        with torch.no_grad():
            x = model.emb(ids) + model.pos(torch.arange(256, device="cuda"))
            for block in model.blocks:
                inputs.append(x)
                block.cuda()
                x, _ = block(x)
                block.cpu()
        x.requires_grad_()
        logits = model.head(model.norm(x))
        F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        grad = x.grad
        del logits
        for i in reversed(range(len(inputs))):
            block = model.blocks[i].cuda()
            x = inputs.pop().detach().requires_grad_()
            y, _ = block(x)
            y.backward(grad)
            grad = x.grad
            with torch.no_grad():
                for k, p in block.named_parameters():
                    m = states.get((i, k), torch.zeros(p.shape)).cuda()
                    m.lerp_(p.grad, 0.1)
                    p.sub_(m, alpha=1e-3)
                    states[i, k] = m.cpu()
                    p.grad = None
            block.cpu()
        model.zero_grad()
        print("step", step)


main()
