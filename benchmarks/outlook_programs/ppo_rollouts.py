"""Kind: rl; leaks: no. PPO on pictures: a rollout buffer on the GPU, several epochs over it."""

import torch
import torch.nn as nn

N_ENVS, HORIZON, EPOCHS, MINIBATCHES = 64, 24, 2, 4


class ActorCritic(nn.Module):
    def __init__(self, n_actions=6):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(4, 32, 8, stride=4), nn.ReLU(), nn.Conv2d(32, 64, 4, stride=2), nn.ReLU(),
            nn.Conv2d(64, 64, 3, stride=1), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 49, 512), nn.ReLU(),
        )
        self.pi, self.v = nn.Linear(512, n_actions), nn.Linear(512, 1)

    def forward(self, obs):
        h = self.body(obs / 255.0)
        return self.pi(h), self.v(h).squeeze(-1)


class Rollout:
    def __init__(self, device="cuda"):
        self.obs = torch.zeros(HORIZON, N_ENVS, 4, 84, 84, device=device)
        self.actions = torch.zeros(HORIZON, N_ENVS, dtype=torch.long, device=device)
        self.logp, self.values, self.rewards = (torch.zeros(HORIZON, N_ENVS, device=device) for _ in range(3))


@torch.no_grad()
def collect(net, buf):
    obs = torch.zeros(N_ENVS, 4, 84, 84, device="cuda")
    for t in range(HORIZON):
        logits, value = net(obs)
        dist = torch.distributions.Categorical(logits=logits, validate_args=False)
        action = dist.sample()
        buf.obs[t], buf.actions[t], buf.logp[t], buf.values[t] = obs, action, dist.log_prob(action), value
        obs = torch.zeros(N_ENVS, 4, 84, 84, dtype=torch.uint8).cuda().float()
    adv = torch.zeros_like(buf.rewards)
    last = 0
    for t in reversed(range(HORIZON - 1)):
        delta = buf.rewards[t] + 0.99 * buf.values[t + 1] - buf.values[t]
        adv[t] = last = delta + 0.95 * 0.99 * last
    return adv


net, buf = ActorCritic().cuda(), Rollout()
opt = torch.optim.Adam(net.parameters(), lr=2.5e-4, eps=1e-5)
for update in range(6):
    adv = collect(net, buf).flatten()
    returns = adv + buf.values.flatten()
    obs, actions, old = buf.obs.flatten(0, 1), buf.actions.flatten(), buf.logp.flatten()
    for _ in range(EPOCHS):
        for idx in torch.randperm(N_ENVS * HORIZON).cuda().chunk(MINIBATCHES):
            logits, value = net(obs[idx])
            dist = torch.distributions.Categorical(logits=logits, validate_args=False)
            ratio = (dist.log_prob(actions[idx]) - old[idx]).exp()
            pg = -torch.min(ratio * adv[idx], ratio.clamp(0.8, 1.2) * adv[idx]).mean()
            loss = pg + 0.5 * (value - returns[idx]).pow(2).mean() - 0.01 * dist.entropy().mean()
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            opt.step()
    print("step", update, loss.item())
