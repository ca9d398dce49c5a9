"""Kind: structure; leaks: no. Message passing over batches of graphs with any number of nodes and edges."""

import random

import torch
import torch.nn as nn

random.seed(77)


class GNNLayer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.msg = nn.Sequential(nn.Linear(2 * d + 16, d), nn.ReLU(), nn.Linear(d, d))
        self.upd = nn.GRUCell(d, d)

    def forward(self, h, edges, attr):
        src, dst = edges
        m = self.msg(torch.cat([h[src], h[dst], attr], dim=-1))
        agg = torch.zeros_like(h).index_add_(0, dst, m)
        return self.upd(agg, h)


class MPNN(nn.Module):
    def __init__(self, d=192, layers=4):
        super().__init__()
        self.inp = nn.Linear(32, d)
        self.layers = nn.ModuleList(GNNLayer(d) for _ in range(layers))
        self.out = nn.Sequential(nn.Linear(d, d), nn.ReLU(), nn.Linear(d, 1))

    def forward(self, x, edges, attr, graph, n_graphs):
        h = self.inp(x)
        for layer in self.layers:
            h = layer(h, edges, attr)
        pooled = torch.zeros(n_graphs, h.size(1), device=h.device).index_add_(0, graph, h)
        return self.out(pooled).squeeze(-1)


def batch_graphs(n_graphs=128):
    nodes = [random.randint(10, 120) for _ in range(n_graphs)]
    n, e = sum(nodes), sum(int(k * random.uniform(2, 6)) for k in nodes)
    edges = torch.randint(0, n, (2, e))
    graph = torch.repeat_interleave(torch.arange(n_graphs), torch.tensor(nodes))
    return torch.randn(n, 32), edges, torch.randn(e, 16), graph, torch.randn(n_graphs)


model = MPNN().cuda()
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
for i in range(12):
    x, edges, attr, graph, y = (t.cuda() for t in batch_graphs())
    loss = nn.functional.mse_loss(model(x, edges, attr, graph, 128), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(f"step {i}: {x.size(0)} nodes {edges.size(1)} edges {loss.item():.3f}")
