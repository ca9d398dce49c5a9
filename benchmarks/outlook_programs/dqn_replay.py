"""Kind: rl; leaks: no. DQN whose replay memory lives on the GPU and fills up to its limit."""

import random
from collections import deque

import torch
import torch.nn as nn
import torch.nn.functional as F

random.seed(1)


class QNet(nn.Module):
    def __init__(self, actions=4):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Conv2d(64, 64, 3, 1), nn.ReLU(),
            nn.Flatten(), nn.Linear(3136, 1024), nn.ReLU(), nn.Linear(1024, actions),
        )

    def forward(self, x):
        return self.net(x)


class Replay:
    def __init__(self, capacity):
        self.data = deque(maxlen=capacity)

    def push(self, *transition):
        self.data.append(transition)

    def sample(self, n):
        state, action, reward, after = zip(*random.sample(self.data, n))
        return torch.stack(state), torch.stack(action), torch.stack(reward), torch.stack(after)


q, target = QNet().cuda(), QNet().cuda()
target.load_state_dict(q.state_dict())
optimizer = torch.optim.Adam(q.parameters(), lr=1e-4)
memory = Replay(2000)
state = torch.zeros(4, 84, 84, device="cuda")
for episode in range(12):
    for t in range(250):
        action = torch.randint(0, 4, (), device="cuda")
        after = torch.rand(4, 84, 84, device="cuda")
        memory.push(state, action, torch.rand((), device="cuda"), after)
        state = after
        if t % 25 == 24 and len(memory.data) >= 256:
            s, a, r, s2 = memory.sample(256)
            value = q(s).gather(1, a[:, None]).squeeze(1)
            with torch.no_grad():
                goal = r + 0.99 * target(s2).max(1).values
            loss = F.smooth_l1_loss(value, goal)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    if episode % 4 == 3:
        target.load_state_dict(q.state_dict())
    print("step", episode, len(memory.data))
