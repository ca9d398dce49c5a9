"""Kind: leak; leaks: yes. A running mean of the recurrent state is logged, and never detached."""

import torch
import torch.nn as nn

torch.backends.cudnn.enabled = False


class Tracker(nn.Module):
    """Follows a scene: a recurrent cell over frame features."""

    def __init__(self, d=512):
        super().__init__()
        self.frame = nn.Sequential(nn.Linear(2048, 4 * d), nn.ReLU(), nn.Linear(4 * d, d))
        self.cell = nn.GRUCell(d, d)
        self.head = nn.Linear(d, 64)

    def forward(self, frames, state):
        outputs = []
        for frame in frames.unbind(1):
            state = self.cell(self.frame(frame), state)
            outputs.append(self.head(state))
        return torch.stack(outputs, 1), state


def train(steps=11, batch=256, length=10):
    model = Tracker().cuda()
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    mean_state = 0
    for i in range(steps):
        frames = torch.randn(batch, length, 2048).cuda()
        target = torch.zeros(batch, length, 64).cuda()
        out, state = model(frames, torch.zeros(batch, 512, device="cuda"))
        loss = (out - target).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        with torch.no_grad():
            drift = (state - mean_state).norm().item()
        mean_state = 0.9 * mean_state + 0.1 * model.frame(frames[:, -1])
        print("step", i, loss.item(), drift)


train()
