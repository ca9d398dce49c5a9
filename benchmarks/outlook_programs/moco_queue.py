"""Kind: structure; leaks: no. Momentum contrast: a key encoder and a queue of negatives on the GPU."""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F


def encoder(dim=128):
    def block(a, b, s):
        return nn.Sequential(nn.Conv2d(a, b, 3, s, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True))

    return nn.Sequential(
        block(3, 48, 1), block(48, 96, 2), block(96, 96, 1), block(96, 192, 2), block(192, 384, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(384, dim),
    )


class MoCo(nn.Module):
    def __init__(self, K=65536, dim=128, m=0.999, T=0.07):
        super().__init__()
        self.K, self.m, self.T = K, m, T
        self.q = encoder(dim)
        self.k = copy.deepcopy(self.q)
        for p in self.k.parameters():
            p.requires_grad = False
        self.register_buffer("queue", F.normalize(torch.randn(dim, K), dim=0))
        self.ptr = 0

    @torch.no_grad()
    def update_key(self):
        for pq, pk in zip(self.q.parameters(), self.k.parameters()):
            pk.data = pk.data * self.m + pq.data * (1.0 - self.m)

    @torch.no_grad()
    def enqueue(self, keys):
        n = keys.size(0)
        self.queue[:, self.ptr : self.ptr + n] = keys.T
        self.ptr = (self.ptr + n) % self.K

    def forward(self, a, b):
        q = F.normalize(self.q(a), dim=1)
        with torch.no_grad():
            self.update_key()
            k = F.normalize(self.k(b), dim=1)
        pos = (q * k).sum(1, keepdim=True)
        neg = q @ self.queue.clone().detach()
        logits = torch.cat([pos, neg], dim=1) / self.T
        self.enqueue(k)
        return logits, torch.zeros(len(a), dtype=torch.long, device=a.device)


model = MoCo().cuda()
opt = torch.optim.SGD(model.q.parameters(), lr=0.03, momentum=0.9, weight_decay=1e-4)
for i in range(9):
    views = [torch.randn(256, 3, 32, 32).cuda() for _ in range(2)]
    logits, labels = model(*views)
    loss = F.cross_entropy(logits, labels)
    opt.zero_grad()
    loss.backward()
    opt.step()
    print("step", i, loss.item())
