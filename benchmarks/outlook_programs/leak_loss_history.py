"""Kind: leak; leaks: yes. A plain regression whose losses are kept, with their graphs, for a plot."""

import torch
import torch.nn as nn


class MLP(nn.Module):
    def __init__(self, n_in=512, hidden=1536, depth=5):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(n_in if i == 0 else hidden, hidden) for i in range(depth)])
        self.out = nn.Linear(hidden, 1)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x)) + 0.1 * torch.sin(layer(x))
        return self.out(x).squeeze(-1)


def fit(n_steps=12, batch=1024):
    model = MLP().cuda()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    history = {"train": [], "regularisation": []}
    for step in range(n_steps):
        x, y = torch.randn(batch, 512).cuda(), torch.randn(batch).cuda()
        pred = model(x)
        loss = (pred - y).pow(2).mean()
        penalty = pred.abs().mean() * 1e-3
        optimizer.zero_grad()
        (loss + penalty).backward(retain_graph=False)
        optimizer.step()
        with torch.enable_grad():
            history["train"].append((model(x) - y).pow(2).mean())
        history["regularisation"].append(penalty.item())
        print(f"step {step}: {history['train'][-1].item():.4f}")
    return history


fit()
