"""Programs of many kinds whose peak must be attributed to their modules, to the byte."""

from __future__ import annotations

from typing import Final

_MODELS: Final = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

class Block(nn.Module):
    def __init__(self, width=128):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        wide = 4 * width
        self.mlp = nn.Sequential(nn.Linear(width, wide), nn.GELU(), nn.Linear(wide, width))

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(torch.softmax(q @ k.transpose(-1, -2), -1) @ v)
        return x + self.mlp(x)

class GPT(nn.Module):
    def __init__(self, n_layers=4, width=128, n_tokens=2000, ties=False, checkpoints=False):
        super().__init__()
        self.embed = nn.Embedding(n_tokens, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(n_layers))
        self.head = nn.Linear(width, n_tokens, bias=False)
        self.checkpoints = checkpoints
        if ties:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x)
        return self.head(x)

def tokens():
    return torch.randint(0, 2000, (4, 64), device="cuda")

def loss_of(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), batch.flatten())

def train(model, make=tokens, loss=loss_of, optimizer=torch.optim.AdamW, n_steps=4):
    made = optimizer([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for _ in range(n_steps):
        loss(model, make()).backward()
        made.step()
        made.zero_grad()
"""

LOOKED_AT: Final = {
    "gpt": "train(GPT().cuda())",
    "tied_weights": "train(GPT(ties=True).cuda())",
    "checkpointing": "train(GPT(checkpoints=True).cuda())",
    "mixed_precision": """
def loss(model, batch):
    with torch.autocast("cuda", torch.bfloat16):
        return loss_of(model, batch)
train(GPT().cuda(), loss=loss)
""",
    "accumulation": """
model = GPT().cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
for step in range(12):
    (loss_of(model, tokens()) / 4).backward()
    if step % 4 == 3:
        optimizer.step()
        optimizer.zero_grad()
""",
    "convolution": """
net = nn.Sequential(*(nn.Sequential(nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16), nn.ReLU())
                      for _ in range(4)), nn.Flatten(), nn.LazyLinear(10)).cuda()
images = lambda: torch.randn(8, 16, 32, 32, device="cuda")
net(images())
train(net, images, lambda net, x: net(x).square().mean())
""",
    "inference": """
model = GPT().cuda().eval()
with torch.no_grad():
    for _ in range(3):
        model(tokens()).argmax(-1)
""",
}
"""Programs that were looked at while the table of modules was developed."""

HELD_OUT: Final = {
    "shared_modules": """
class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.block, self.head = nn.Embedding(2000, 128), Block(), nn.Linear(128, 2000)
    def forward(self, tokens):
        return self.head(self.block(self.block(self.embed(tokens))))
train(Twice().cuda())
""",
    "adapters": """
class Adapter(nn.Module):
    def __init__(self, base, rank=8):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
    def forward(self, x):
        return self.base(x) + self.up(self.down(x))
model = GPT().requires_grad_(False)
for layer in model.layers:
    layer.qkv = Adapter(layer.qkv)
train(model.cuda())
""",
    "actor_and_critic": """
class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 8))
        self.critic = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 1))
agent = Agent().cuda()
optimizer = torch.optim.Adam(agent.parameters())
for _ in range(5):
    with torch.no_grad():
        seen = [torch.randn(32, 64, device="cuda") for _ in range(16)]
        values = [agent.critic(x) for x in seen]
    states = torch.cat(seen)
    chosen = torch.distributions.Categorical(logits=agent.actor(states)).sample()
    dist = torch.distributions.Categorical(logits=agent.actor(states))
    loss = -dist.log_prob(chosen).mean() + agent.critic(states).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    "adversaries": """
maker, judge = (nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)).cuda()
                for _ in range(2))
of_maker, of_judge = (torch.optim.Adam(m.parameters()) for m in (maker, judge))
for _ in range(4):
    noise = torch.randn(128, 256, device="cuda")
    of_judge.zero_grad()
    (judge(maker(noise).detach()).square().mean() + judge(noise).mean()).backward()
    of_judge.step()
    of_maker.zero_grad()
    (-judge(maker(noise)).mean()).backward()
    of_maker.step()
""",
    "reentrant_checkpointing": """
class Deep(GPT):
    def forward(self, tokens):
        x = self.embed(tokens).requires_grad_()
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return self.head(x)
train(Deep().cuda(), optimizer=torch.optim.RMSprop)
""",
    "step_in_backward": """
model = GPT().cuda()
made = {p: torch.optim.AdamW([p]) for p in model.parameters()}
def step(p):
    made[p].step()
    made[p].zero_grad()
for p in model.parameters():
    p.register_post_accumulate_grad_hook(step)
for _ in range(3):
    loss_of(model, tokens()).backward()
""",
    "recurrent": """
class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(2000, 128)
        self.rnn, self.head = nn.LSTM(128, 256, 2, batch_first=True), nn.Linear(256, 2000)
    def forward(self, tokens):
        return self.head(self.rnn(self.embed(tokens))[0])
train(Tagger().cuda())
""",
    "compiled": "train(torch.compile(GPT().cuda(), backend='aot_eager'))",
    "half_model_trained": """
model = GPT().cuda().to(torch.bfloat16)
for p in model.layers[:2].parameters():
    p.requires_grad_(False)
train(model, optimizer=torch.optim.Adafactor)
""",
}
"""Programs that were run only when the table was finished."""


def program(name: str) -> str:
    """Return the source of a program by its name."""
    return f"{_MODELS}\n{(LOOKED_AT | HELD_OUT)[name].strip()}\n"
