"""The marks in the snapshot of a rehearsal, and the steps that are found by them."""

from __future__ import annotations

import pickle
from collections import Counter
from typing import Any

from rehearsal_stage import Stage

from fragdoctor.future.steps import StepKind, Steps
from fragdoctor.inputs.snapshot_reader import read_snapshot
from fragdoctor.trace.trace import Trace

PROGRAM = """
    import torch
    from torch import nn
    net = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).cuda()
    optimizer = torch.optim.AdamW(net.parameters())
    loss = nn.MSELoss()
    torch.cuda.memory._record_memory_history()
    kept = []
    for i in range(24):
        with torch.profiler.record_function("my part"):
            x = torch.randn(64, 256, device="cuda")
        loss(net(x), x).backward()
        if i % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
            kept.append(torch.empty(LEAK, device="cuda"))
        if i % 12 == 11:
            with torch.no_grad():
                for _ in range(2):
                    loss(net(x), x)
    torch.cuda.memory._dump_snapshot("own.pickle")
"""


def marks(snapshot: Any) -> Counter[str]:
    """Return the names that begin, with how often."""
    return Counter(m["name"] for m in snapshot["external_annotations"] if m["stage"] == "START")


def test_a_rehearsal_marks_steps_micro_batches_and_evaluation(stage: Stage) -> None:
    stage.script(PROGRAM.replace("LEAK", "1"))

    found = stage.json("train.py", "--steps", "50", "--snapshot", "r.pickle")

    path = stage.home / "r.pickle"
    made = pickle.loads(path.read_bytes())
    ours = {"fragdoctor.backward": 24, "fragdoctor.no_grad#Sequential": 4}
    pytorchs = {
        "Optimizer.step#AdamW.step": 6,
        "Optimizer.zero_grad#AdamW.zero_grad": 6,
        "my part": 24,
    }
    assert ours | pytorchs == marks(made)
    *ranges, end = made["external_annotations"]
    assert 2 * sum((ours | pytorchs).values()) == len(ranges)
    assert ("END", "fragdoctor.program") == (end["stage"], end["name"])
    steps = Steps.of(Trace.of(read_snapshot(path), 0))
    assert [6, 2] == [len(steps.of_kind(k)) for k in (StepKind.TRAIN, StepKind.EVALUATION)]
    assert 6 == found["rehearsal"]["steps"]


def test_only_the_end_of_the_whole_program_is_marked(stage: Stage) -> None:
    stage.script(PROGRAM.replace("LEAK", "1"))

    stage.json("train.py", "--steps", "3", "--snapshot", "r.pickle")

    made = pickle.loads((stage.home / "r.pickle").read_bytes())
    names = {m["name"] for m in made["external_annotations"]}
    assert "fragdoctor.backward" in names
    assert "fragdoctor.program" not in names


def test_a_program_dumps_the_marks_that_pytorch_makes(stage: Stage) -> None:
    body = """
        assert list(s["external_annotations"][0]) == ["stage", "name", "device", "time_us"]
        names = {a["name"] for a in s["external_annotations"]}
        assert names == {"my part", "Optimizer.step#AdamW.step",
                         "Optimizer.zero_grad#AdamW.zero_grad"}, names
        assert len(s["external_annotations"]) == 2 * (24 + 6 + 6)
        torch.cuda.memory._record_memory_history(enabled=None)
        assert torch.cuda.memory._snapshot()["external_annotations"] == []
        torch.cuda.memory._record_memory_history(max_entries=3)
        for _ in range(2):
            optimizer.zero_grad()
        s = torch.cuda.memory._snapshot()
        assert [a["stage"] for a in s["external_annotations"]] == ["END", "START", "END"]
    """
    program = PROGRAM.replace("LEAK", "1").replace(
        'torch.cuda.memory._dump_snapshot("own.pickle")', "s = torch.cuda.memory._snapshot()"
    )
    stage.must_pass(program + body.replace("\n        ", "\n    "), "--steps", "50")


def test_a_failure_is_in_the_step_that_the_marks_say(stage: Stage) -> None:
    stage.script(PROGRAM.replace("LEAK", "(i + 1) << 20"))

    found = stage.json("train.py", "--capacity", "200MiB", "--snapshot", "r.pickle", code=1)

    path = stage.home / "r.pickle"
    made = pickle.loads(path.read_bytes())
    last_us = made["device_traces"][0][-1]["time_us"]
    assert all(m["time_us"] <= last_us for m in made["external_annotations"])
    assert all(m["name"] != "fragdoctor.program" for m in made["external_annotations"])
    n_runs = marks(made)["Optimizer.step#AdamW.step"]
    steps = Steps.of(Trace.of(read_snapshot(path), 0))
    assert n_runs == found["rehearsal"]["out_of_memory"]["step"]
    assert not steps.is_last_complete
