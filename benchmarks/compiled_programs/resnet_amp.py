import torch, torch.nn as nn


class R(nn.Module):
    def __init__(s, c):
        super().__init__()
        s.a, s.b = (
            nn.Conv2d(c, c, 3, padding=1, bias=False),
            nn.Conv2d(c, c, 3, padding=1, bias=False),
        )
        s.n, s.m = nn.BatchNorm2d(c), nn.BatchNorm2d(c)

    def forward(s, x):
        return torch.relu(x + s.m(s.b(torch.relu(s.n(s.a(x))))))


m = (
    nn.Sequential(
        nn.Conv2d(3, 64, 7, stride=2, padding=3),
        *[R(64) for _ in range(3)],
        nn.Conv2d(64, 128, 3, stride=2, padding=1),
        *[R(128) for _ in range(3)],
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, 100),
    )
    .cuda()
    .to(memory_format=torch.channels_last)
)
f = torch.compile(m)
o = torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)
for i in range(5):
    x = torch.randn(32, 3, 160, 160, device="cuda").to(memory_format=torch.channels_last)
    y = torch.randint(0, 100, (32,), device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(f(x), y)
    loss.backward()
    o.step()
    o.zero_grad(set_to_none=True)
    print("step", i)
