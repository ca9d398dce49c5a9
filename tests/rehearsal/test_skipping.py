"""Rounds that show nothing new are skipped, and what comes after them is seen."""

from __future__ import annotations

from typing import Any

import pytest
from rehearsal_stage import Stage

MIB = 1 << 20
NET = """
    import torch
    from torch.utils.data import DataLoader, TensorDataset
    net = torch.nn.Linear(512, 512).cuda()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    seen = []

    def step(x):
        optimizer.zero_grad()
        net(x).sum().backward()
        optimizer.step()

    def large():
        torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
"""


def rehearsed(stage: Stage, body: str, *options: str, code: int = 0) -> dict[str, Any]:
    stage.script(NET + body)
    found: dict[str, Any] = stage.json(*options, "train.py", code=code)["rehearsal"]
    return found


@pytest.mark.parametrize(
    ("body", "steps"),
    [
        (
            """
    data = DataLoader(TensorDataset(torch.randn(1001, 512)), batch_size=4)
    for epoch in range(50):
        for i, (x,) in enumerate(data):
            step(x.cuda())
            seen.append((i, len(x)))
    assert (250, 1) in seen and len(seen) < 1000
    large()
    """,
            50 * 251,
        ),
        (
            """
    for i in range(2000):
        step(torch.randn(4, 512, device="cuda"))
        if i % 500 == 499:
            seen.append(i)
            large()
    assert seen[0] == 499, seen
    """,
            2000,
        ),
        (
            """
    class Config:
        every = {"eval": 700}
    n_steps = 0
    while True:
        step(torch.randn(4, 512, device="cuda"))
        n_steps += 1
        if n_steps % Config.every["eval"] == 0:
            large()
        if n_steps >= 1500:
            break
    assert n_steps == 1500
    """,
            1500,
        ),
        (
            """
    starts = 600
    for i in range(3000):
        with torch.no_grad():
            net(torch.randn(4, 512, device="cuda"))
        if i > starts:
            if i % 10 == 0:
                step(torch.randn(64, 512, device="cuda"))
                large()
    """,
            pytest.approx(239, rel=0.1),  # by the rounds gone through since training began
        ),
        (
            """
    for i in range(1, 2501):
        step(torch.randn(4, 512, device="cuda"))
        if i % 100 == 0:
            print(i)
        if i % 900 == 0:
            large()
    """,
            2500,
        ),
        (
            """
    def batches():
        for _ in range(3000):
            yield torch.randn(4, 512)
    for x in batches():
        step(x.cuda())
    x = torch.randn(4, 512, device="cuda")
    with torch.no_grad():
        for _ in reversed(range(5000)):
            x = net(x)
    large()
    """,
            3000,
        ),
    ],
)
def test_what_comes_after_equal_rounds_is_seen(stage: Stage, body: str, steps: float) -> None:
    found = rehearsed(stage, body)

    assert found["peak_allocated_bytes"] > 64 * MIB
    assert found["steps"] == steps
    assert (found["stopped"], found["is_partial"], found["partial_reason"]) == ("", False, "")
    assert found["n_skipped"] > 1000


@pytest.mark.parametrize(
    "body",
    [
        """
    class Trainer:
        calls = 0
        def train(self):
            "A docstring stays the first statement."
            step(torch.randn(4, 512, device="cuda"))
            self.calls += 1
            if self.calls == 700:
                large()
    trainer = Trainer()
    for _ in range(30):
        for _ in range(40):
            trainer.train()
    assert trainer.calls == 1200
    """,
        """
    n_seen = 0
    def train(x):
        global n_seen
        step(x.cuda())
        n_seen += len(x)
        if n_seen > 2500:
            large()
    for _ in range(1000):
        train(torch.randn(4, 512))
    assert n_seen == 4000
    """,
        """
    def watch(i):
        if i == 611:
            large()
    for i in range(1000):
        step(torch.randn(4, 512, device="cuda"))
        watch(i + 1)
    """,
        """
    from collections import deque
    memory = deque(maxlen=1000)
    for _ in range(2000):
        with torch.no_grad():
            memory.append(net(torch.randn(4, 512, device="cuda")).cpu())
        if len(memory) >= 800:
            step(memory[-1].cuda())
            large()
    """,
        """
    class Buffer:
        def __init__(self):
            self.found = {}
        def __len__(self):
            return len(self.found)
    buffer = Buffer()
    for i in range(900):
        step(torch.randn(4, 512, device="cuda"))
        buffer.found[len(buffer)] = i
        if len(buffer) == 300:  # no number of the program that could be set
            large()
    """,
        """
    n_left = 500
    while n_left > 0:
        step(torch.randn(4, 512, device="cuda"))
        n_left -= 1
        if n_left == 100:
            large()
    assert n_left == 0
    """,
        """
    class Parts:
        at = 0
        def __iter__(self):
            return self
        def __next__(self):
            self.at += 1
            if self.at > 400:
                raise StopIteration
            return self.at
    parts = Parts()
    for at in parts:
        step(torch.randn(4, 512, device="cuda"))
        if at == 350:
            large()
    assert parts.at == 401
    """,
    ],
)
def test_what_waits_for_a_number_that_grows_elsewhere_is_seen(stage: Stage, body: str) -> None:
    found = rehearsed(stage, body)

    assert found["peak_allocated_bytes"] > 64 * MIB
    assert (found["stopped"], found["partial_reason"]) == ("", "")
    assert found["n_skipped"] >= 200 or "class Buffer" in body


@pytest.mark.parametrize("n", [21, 22, 23])
def test_what_comes_soon_after_equal_rounds_is_not_skipped(stage: Stage, n: int) -> None:
    found = rehearsed(
        stage,
        f"""
    i = 1
    while i <= {n}:
        step(torch.randn(4, 512, device="cuda"))
        i += 1
    for i in range(200):
        step(torch.randn(4, 512, device="cuda"))
        if i == {n}:
            large()
    """,
    )

    assert found["peak_allocated_bytes"] > 64 * MIB
    assert not found["is_partial"]


def test_layers_and_rounds_without_a_gpu_are_not_skipped(stage: Stage) -> None:
    rehearsed(
        stage,
        """
    class Deep(torch.nn.Module):
        def forward(self, x):
            for i in range(200):
                x = net(x)
                seen.append(i)
            return x
    with torch.no_grad():
        Deep()(torch.ones(4, 512, device="cuda"))
    assert len(seen) == 200
    for i in range(500):
        seen.append(i)
    assert len(seen) == 700
    x = torch.ones(4, 512, device="cuda")
    with torch.no_grad():
        for i, layer in enumerate([net] * 200):
            x = layer(x)
            seen.append(i)
    assert len(seen) == 900
    """,
    )


def test_what_was_not_seen_is_said_and_closes_the_gate(stage: Stage) -> None:
    body = """
    import random
    while random.random() < 2:
        step(torch.randn(4, 512, device="cuda"))
    """

    found = rehearsed(stage, body, "--fits-on", "24GiB", code=2)

    assert found["is_partial"]
    assert found["fits"]
    assert "it was unclear where the loop at train.py:17 ends" in found["partial_reason"]
    said = stage.run("train.py", "--fits-on", "24GiB")
    assert said.stdout.startswith("Fits in 24.00 GiB as far as it was rehearsed: not all of it was")
    for_ci = stage.run("train.py", "--fits-on", "24GiB", "--format", "junit")
    assert '<error message="Fits in 24.00 GiB as far as it was rehearsed' in for_ci.stdout
    rehearsed(stage, body, "--fits-on", "24GiB", "--steps", "3")


def test_what_fails_after_skipping_is_rehearsed_once_more_without(stage: Stage) -> None:
    """As a replay memory that has too little in it."""
    found = rehearsed(
        stage,
        """
    for i in range(300):
        step(torch.randn(4, 512, device="cuda"))
        seen.append(i)
    assert len(seen) == 300
    large()
    """,
    )

    assert not found["is_partial"]
    assert (found["steps"], found["n_skipped"]) == (300, 0)


def test_counters_that_the_program_has_not_set_are_left_alone(stage: Stage) -> None:
    found = rehearsed(
        stage,
        """
    def train(many=False):
        n = 0
        if many:
            epoch = 0
        for i in range(300):
            n += 1
            if n > 1000:
                epoch += 1
            step(torch.randn(4, 512, device="cuda"))
        assert n == 300

    train()
    large()
    """,
    )

    assert found["steps"] == 300
    assert found["n_skipped"]


def test_a_loop_that_only_a_value_ends_is_left(stage: Stage) -> None:
    found = stage.must_pass(
        """
        import torch
        x = torch.randn(500, 16, device="cuda")
        centers, n = x[:8].clone(), 0
        while True:
            nearest = torch.cdist(x, centers).argmin(1)
            moved = centers.index_reduce(0, nearest % 8, x, "mean")
            n += 1
            if (moved - centers).norm() < 1e-4:
                break
            centers = moved
        assert 20 <= n <= 30, n
        after = torch.zeros(1 << 20, device="cuda")
        """
    )

    assert not found["rehearsal"]["is_partial"]
    assert found["rehearsal"]["peak_allocated_bytes"] > 4 << 20


@pytest.mark.parametrize("condition", ["not (error < 1e-4)", "not settled"])
def test_a_condition_that_only_a_value_meets_is_left(stage: Stage, condition: str) -> None:
    found = stage.must_pass(
        f"""
        import torch
        x, error = torch.rand(512, 512, device="cuda"), torch.rand((), device="cuda")
        settled, n = False, 0
        while {condition}:
            after = x @ x
            error, x, n = (after - x).norm(), after, n + 1
            settled = (error < 1e-4).item()
        assert 20 <= n <= 30, n
        large = torch.zeros(1 << 20, device="cuda")
        """
    )

    listed = {a["operation"]: a["assumed"] for a in found["rehearsal"]["assumptions"]}
    assert listed["loop"] == "it goes on until its rounds are equal"


def test_a_list_of_work_is_done_though_its_rounds_read_flags(stage: Stage) -> None:
    stage.must_pass(
        """
        import torch
        work, n = [*range(260)], 0
        while work:
            x = torch.rand(512 if work.pop() else 2048, device="cuda")
            n += 1
            if (x > 2).any():
                print("large")
        assert n == 260, n
        """
    )


def test_a_limit_of_time_ends_the_rehearsal(stage: Stage) -> None:
    found = rehearsed(
        stage,
        """
    import time
    while True:
        time.sleep(0.1)
        torch.empty(len(seen) + 1, device="cuda")
        seen.append(0)
    """,
        "--time-limit",
        "1",
    )

    assert found["partial_reason"] == "the time limit of 1 s was over"


def test_rounds_before_the_first_step_are_none_that_do_not_repeat(stage: Stage) -> None:
    """A learner collects on the CPU first; its steps are rehearsed all the same."""
    found = rehearsed(
        stage,
        """
    for i in range(600):
        if i >= 300:
            step(torch.randn(4, 512, device="cuda"))
            seen.append(i)
    assert len(seen) > 3 and seen[-1] == 599, seen
    large()
    """,
    )

    assert not found["is_partial"]
    assert found["steps"] == 300


def test_loop_of_layers_keeps_what_a_frame_shows_no_longer_than_the_program(stage: Stage) -> None:
    """Whether rounds of loops are looked at changes no peak: real 2.12.1 has 54,542,336 bytes."""
    stage.script("""
        import torch
        from torch import nn

        class Deep(nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = nn.ModuleList(
                    nn.Sequential(
                        nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU()
                    )
                    for _ in range(8)
                )

            def forward(self, x):
                for layer in self.layers:
                    x = layer(x)
                return x

        net, x = Deep().cuda(), torch.zeros(4096, 256).cuda()
        with torch.no_grad():
            net(x)
    """)

    found = stage.json("--unlimited", "train.py")["rehearsal"]

    assert found["peak_allocated_bytes"] == 54_542_336
