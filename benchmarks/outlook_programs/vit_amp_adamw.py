"""Kind: vision; leaks: no. A vision transformer under autocast in bfloat16, evaluated between epochs."""

import torch
from torch import nn
from torch.nn import functional as F


class PatchEmbed(nn.Module):
    def __init__(self, dim, patch=16, size=224):
        super().__init__()
        self.proj = nn.Conv2d(3, dim, patch, patch)
        self.cls = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos = nn.Parameter(torch.zeros(1, (size // patch) ** 2 + 1, dim))

    def forward(self, x):
        x = self.proj(x).flatten(2).transpose(1, 2)
        return torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.pos


class EncoderBlock(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * dim, dim))

    def forward(self, x):
        h = self.n1(x)
        x = x + self.attn(h, h, h, need_weights=False)[0]
        return x + self.mlp(self.n2(x))


def build(dim=384, depth=8, heads=6, classes=100):
    class ViT(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = PatchEmbed(dim)
            self.blocks = nn.Sequential(*[EncoderBlock(dim, heads) for _ in range(depth)])
            self.head = nn.Linear(dim, classes)

        def forward(self, x):
            return self.head(self.blocks(self.embed(x))[:, 0])

    return ViT()


@torch.no_grad()
def evaluate(model, n_batches=2):
    model.eval()
    hits = 0
    for _ in range(n_batches):
        x, y = torch.randn(64, 3, 224, 224).cuda(), torch.randint(0, 100, (64,)).cuda()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            hits += (model(x).argmax(-1) == y).sum().item()
    model.train()
    return hits / (64 * n_batches)


model = build().cuda()
opt = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
for epoch in range(3):
    for it in range(4):
        x, y = torch.randn(48, 3, 224, 224).cuda(), torch.randint(0, 100, (48,)).cuda()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        print(f"step {epoch}.{it} loss {loss.item():.3f}")
    print("accuracy", evaluate(model))
