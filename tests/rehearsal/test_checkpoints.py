"""The set of checkpointed modules is the cheapest there is, and saves what was reckoned."""

from __future__ import annotations

import sys
from itertools import chain, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rehearsal_stage import PREPARED

from fragdoctor.inputs.snapshot_reader import read_snapshot
from fragdoctor.model.rehearsal import Rehearsal
from fragdoctor.rehearsal import runner
from fragdoctor.rehearsal.prescription import catalogue
from fragdoctor.rehearsal.prescription.checkpoints import (
    Checkpoints,
    Choice,
    Plan,
    _Option,
    _Part,
)
from fragdoctor.rehearsal.process import RehearsalConditions, rehearsed_gpu
from fragdoctor.rehearsal.programs import Program

MODEL = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))

class Pair(nn.Module):
    def __init__(self, *inner):
        super().__init__()
        self.parts = nn.ModuleList(Block(256, n) for n in inner)

    def forward(self, x):
        for part in self.parts:
            x = torch.tanh(part(x))
        return x

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.begin, self.pair, self.end = Block(256, 2048), Pair(256, 1024), Block(256, 512)

    def forward(self, x):
        return self.end(self.pair(self.begin(x)))

model = Net().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(3):
    loss = model(torch.randn(4096, 256, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
PARTS = ["begin", "pair", "pair.parts.0", "pair.parts.1", "end"]
IN_PLACE = MODEL.replace("gelu(self.up(self.norm(x)))", "relu_(self.up(self.norm(x)))")


CLASSES = (
    MODEL.replace(
        "        self.begin,", "        self.head = nn.Linear(256, 8192)\n        self.begin,"
    )
    .replace("return self.end(self", "return self.head(self.end(self")
    .replace("begin(x)))", "begin(x))))")
    .replace("loss = model(", "loss = nn.functional.cross_entropy(model(")
    .replace(".square().mean()", ", torch.zeros(4096, dtype=torch.long, device='cuda'))")
)


def rehearsed(home: Path, text: str, *treatments: str, observes: bool = True) -> Rehearsal:
    path = home / "train.py"
    path.write_text(text)
    conditions = RehearsalConditions(
        gpu=rehearsed_gpu("h100", None, is_unlimited=True),
        treatments=treatments,
        observes=observes,
        stops_by_itself=False,
    )
    program = Program(str(path), is_module=False, args=[], pythons=[sys.executable])
    return runner.rehearse(program, conditions, home / "s.pickle", None, PREPARED)


def measured(home: Path, text: str = MODEL) -> Checkpoints:
    found = rehearsed(home, text)
    return Checkpoints(read_snapshot(home / "s.pickle"), found.traits)


def spec(found: Checkpoints, plan: Plan) -> str:
    (text,) = catalogue.checkpointed(found.traits, plan).specs
    return text


def ways(parts: Any) -> list[list[Any]]:
    """Every way to choose of modules and of those within them."""
    per_part = [[*ways(part.parts), *([(part, o)] for o in part.options)] for part in parts]
    return [list(chain(*way)) for way in product(*per_part)]


def test_modules_are_those_that_call_several_others(tmp_path: Path) -> None:
    found = measured(tmp_path)

    assert [part["path"] for part in found.traits["parts"]] == PARTS
    assert found.traits["parts"][2]["written"] == ".pair.parts[0]"
    assert [len(part["calls"]) for part in found.traits["parts"]] == [3] * 5


def test_no_set_that_is_reckoned_to_do_is_cheaper(tmp_path: Path) -> None:
    found = measured(tmp_path)
    every = [
        (
            int((found._needs - sum((o.saved_bytes for _, o in way), np.int64(0))).max()),
            sum(o.n_flops for _, o in way),
        )
        for way in ways(found._roots)
    ]
    assert len(every) > 30

    lowest = min(peak for peak, _ in every)
    for limit in np.linspace(lowest, found.peak_bytes, 24).astype(int):
        plan = found.cheapest(int(limit))
        best = min(n_flops for peak, n_flops in every if peak <= limit)
        assert plan is not None
        assert plan.n_flops == best
    assert found.cheapest(lowest - 1) is None
    assert found.lowest_bytes() == pytest.approx(lowest, rel=0.002)


def test_many_moments_do_not_make_sets_dearer() -> None:
    n_cheaper = 0
    for seed in range(12):
        numbers = np.random.default_rng(seed)
        found = Checkpoints.__new__(Checkpoints)
        found._roots, found._needs = [], np.zeros(48, np.int64)
        for n in range(24):
            size = int(numbers.integers(50, 400))
            n_flops = int(size * numbers.integers(50, 300))
            forward = size * (np.arange(24) >= n)
            saved = np.concatenate([forward, forward[::-1]])
            found._needs += saved
            saved[-1 - n] -= size // 2  # as it is made again
            kept = _Option((0,), n_flops // 3, size // 2, saved // 2)
            found._roots.append(_Part(n, [_Option((), n_flops, size, saved), kept]))
        limit = int(found._needs.max() // 2)

        plan, knapsack = found.cheapest(limit), found._knapsack(found._needs - limit)

        assert plan is not None
        assert knapsack is not None
        assert (found._needs - found._saved(plan)).max() <= limit
        assert plan.n_flops <= knapsack.n_flops
        n_cheaper += plan.n_flops < knapsack.n_flops
    assert n_cheaper >= 6


@pytest.mark.parametrize("share", [0.9, 0.75, 0.6])
def test_set_saves_and_costs_what_was_reckoned(share: float, tmp_path: Path) -> None:
    found = measured(tmp_path)
    lowest = found.lowest_bytes()
    limit = int(lowest + share * (found.peak_bytes - lowest))
    plan = found.cheapest(limit)
    assert plan is not None

    real = rehearsed(tmp_path, MODEL, spec(found, plan))

    assert real.peak_allocated_bytes <= 1.02 * limit
    assert real.traits["n_flops"] - found.traits["n_flops"] == plan.n_flops


def test_of_modules_within_each_other_one_is_chosen(tmp_path: Path) -> None:
    found = measured(tmp_path)

    assert [one.number for one in found.everything().choices] == [0, 2, 3, 4]
    for limit in np.linspace(found.lowest_bytes(), found.peak_bytes, 12):
        plan = found.cheapest(int(limit))
        assert plan is not None
        numbers = {one.number for one in plan.choices}
        assert 1 not in numbers or not numbers & {2, 3}


def test_results_that_are_changed_in_place_are_not_kept(tmp_path: Path) -> None:
    found = measured(tmp_path, IN_PLACE)

    assert {option.kept for option in found._roots[0].options} == {()}
    assert {option.kept for option in measured(tmp_path)._roots[0].options} > {()}


def test_frozen_part_saves_nothing(tmp_path: Path) -> None:
    frozen = MODEL.replace("optimizer =", "model.begin.requires_grad_(False)\noptimizer =")

    assert not measured(tmp_path, frozen)._roots[0].options


@pytest.mark.parametrize("treatment", ["autocast", "adamw-8bit", "chunked-loss:4:head"])
def test_observation_takes_no_memory(treatment: str, tmp_path: Path) -> None:

    observed, not_observed = (
        rehearsed(tmp_path, CLASSES, treatment, observes=observes) for observes in (True, False)
    )

    assert observed.peak_allocated_bytes == not_observed.peak_allocated_bytes
    assert observed.peak_reserved_bytes == not_observed.peak_reserved_bytes


@pytest.mark.parametrize("kept", [(), (0,), (1,), (0, 1)])
def test_gradients_are_the_same_whatever_is_kept(kept: tuple[int, ...]) -> None:
    torch = pytest.importorskip("torch")
    from torch.utils.flop_counter import FlopCounterMode

    from fragdoctor.rehearsal.engine.treatments.blocks import _checkpointed

    torch.manual_seed(0)
    block = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.Dropout(), torch.nn.Linear(16, 8), torch.nn.LayerNorm(8)
    )
    x = torch.randn(4, 8)

    def run() -> tuple[Any, int]:
        block.zero_grad()
        torch.manual_seed(1)
        with FlopCounterMode(display=False) as counter:
            block(x).square().sum().backward()
        return [p.grad.clone() for p in block.parameters()], counter.get_total_flops()

    plain, n_plain = run()
    block.forward = _checkpointed(block, kept)
    treated, n_treated = run()

    assert all(torch.equal(a, b) for a, b in zip(plain, treated, strict=True))
    assert n_treated - n_plain == (2 - len(kept)) * 2 * 4 * 8 * 16


def test_lines_name_modules_one_after_another(tmp_path: Path) -> None:
    written = [f"model.layers[{i}]" for i in (0, 1, 2, 5)]

    assert catalogue._together(written[:3]) == "model.layers[:3]"
    assert catalogue._together([*written, "model.end"]) == (
        "[*model.layers[:3], model.layers[5], model.end]"
    )
    assert catalogue._ranges([0, 1, 2, 5]) == ["0-2", "5"]


def test_plan_becomes_one_spec_and_its_lines(tmp_path: Path) -> None:
    found = measured(tmp_path)
    treatment = catalogue.checkpointed(
        found.traits, Plan((Choice(0, (1,), 10), Choice(2, (), 20), Choice(3, (), 20)))
    )

    assert treatment.specs == ["checkpoint:0=1,2-3"]
    lines = "\n".join(treatment.lines)
    assert "context_fn=keeping(1)" in lines
    assert "for block in model.pair.parts[:4]" not in lines
    assert "for block in model.pair.parts[:2]:" in lines
    written = MODEL.replace("optimizer =", f"{lines}\noptimizer =", 1)
    outside, inside = (
        rehearsed(tmp_path, text, *treatments, observes=False)
        for text, treatments in ((MODEL, treatment.specs), (written, []))
    )
    assert outside.peak_allocated_bytes == inside.peak_allocated_bytes
    assert outside.peak_reserved_bytes == inside.peak_reserved_bytes
