"""Kind: rl; leaks: no. Soft actor and critic: two Q networks with targets, then the policy."""

import copy

import torch
import torch.nn as nn

BATCH, N_STATE, N_ACTION = 4096, 64, 16


def mlp(n_in, n_out, width=2048):
    return nn.Sequential(
        nn.Linear(n_in, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, n_out)
    )


policy = mlp(N_STATE, N_ACTION).cuda()
q1, q2 = mlp(N_STATE + N_ACTION, 1).cuda(), mlp(N_STATE + N_ACTION, 1).cuda()
target1, target2 = copy.deepcopy(q1), copy.deepcopy(q2)
opt_policy = torch.optim.Adam(policy.parameters(), lr=3e-4)
opt_q = torch.optim.Adam([*q1.parameters(), *q2.parameters()], lr=3e-4)


def update_critics(state, action, after):
    with torch.no_grad():
        ahead = torch.cat([after, policy(after)], 1)
        wanted = 0.99 * torch.min(target1(ahead), target2(ahead))
    now = torch.cat([state, action], 1)
    loss = ((q1(now) - wanted) ** 2).mean() + ((q2(now) - wanted) ** 2).mean()
    opt_q.zero_grad()
    loss.backward()
    opt_q.step()


def update_policy(state):
    now = torch.cat([state, policy(state)], 1)
    loss = -torch.min(q1(now), q2(now)).mean()
    opt_policy.zero_grad()
    loss.backward()
    opt_policy.step()
    return loss.item()


for step in range(20):
    state, after = torch.randn(2, BATCH, N_STATE, device="cuda")
    update_critics(state, torch.randn(BATCH, N_ACTION, device="cuda"), after)
    loss = update_policy(state)
    with torch.no_grad():
        for target, net in ((target1, q1), (target2, q2)):
            for mine, other in zip(target.parameters(), net.parameters()):
                mine.lerp_(other, 0.005)
    print(f"step {step} {loss:.3f}")
