"""Kind: language; leaks: no. A decoder with a wide vocabulary in bfloat16, Adafactor, longer texts later."""

import torch
import torch.nn as nn
import torch.nn.functional as F

LENGTHS = [128, 128, 128, 256, 256, 256, 512, 512, 512, 512]


class DecoderLayer(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.n1, self.n2 = nn.RMSNorm(d), nn.RMSNorm(d)
        self.wq, self.wkv, self.wo = nn.Linear(d, d, False), nn.Linear(d, d // 2, False), nn.Linear(d, d, False)
        self.w1, self.w2, self.w3 = nn.Linear(d, 3 * d, False), nn.Linear(3 * d, d, False), nn.Linear(d, 3 * d, False)

    def forward(self, x):
        b, t, d = x.shape
        y = self.n1(x)
        q = self.wq(y).view(b, t, self.h, -1).transpose(1, 2)
        k, v = self.wkv(y).view(b, t, 2, self.h // 4, -1).permute(2, 0, 3, 1, 4)
        k, v = k.repeat_interleave(4, 1), v.repeat_interleave(4, 1)
        x = x + self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d))
        y = self.n2(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


class Decoder(nn.Module):
    def __init__(self, vocab=50000, d=512, n=6):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.layers = nn.ModuleList([DecoderLayer(d, 8) for _ in range(n)])
        self.out = nn.Linear(d, vocab, bias=False)

    def forward(self, ids):
        x = self.emb(ids)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


def curriculum():
    for step, length in enumerate(LENGTHS):
        yield step, torch.randint(0, 50000, (6, length + 1))


model = Decoder().cuda().bfloat16()
opt = torch.optim.Adafactor(model.parameters(), lr=1e-2)
for step, ids in curriculum():
    ids = ids.cuda()
    logits = model(ids[:, :-1])
    loss = F.cross_entropy(logits.float().transpose(1, 2), ids[:, 1:])
    loss.backward()
    opt.step()
    opt.zero_grad(set_to_none=True)
    print(f"step {step}: length {ids.size(1) - 1}, loss {loss.item():.4f}")
