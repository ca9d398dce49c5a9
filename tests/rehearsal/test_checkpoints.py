"""The set of checkpointed modules is the cheapest there is, and needs what was replayed."""

from __future__ import annotations

import sys
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from rehearsal_stage import PREPARED

from fragdoctor.future.simulator import trace_of
from fragdoctor.inputs.snapshot_reader import read_snapshot
from fragdoctor.model.rehearsal import Rehearsal
from fragdoctor.rehearsal import runner
from fragdoctor.rehearsal.prescription import catalogue
from fragdoctor.rehearsal.prescription.checkpoints import Checkpoints, Choice, Plan
from fragdoctor.rehearsal.prescription.need import Need
from fragdoctor.rehearsal.process import RehearsalConditions, rehearsed_gpu
from fragdoctor.rehearsal.programs import Program

pytest.importorskip("torch")  # the programs are rehearsed with it

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
LAST = "x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))"
RELU: Final = MODEL.replace(LAST, f"torch.relu({LAST})")
DROPOUT: Final = MODEL.replace(
    LAST, "x + torch.dropout(" + LAST.removeprefix("x + ") + ", 0.1, True)"
)
SHORTCUT: Final = MODEL.replace(LAST, LAST.removeprefix("x + ") + " + self.skip(x)").replace(
    "        self.norm =", "        self.skip = nn.Linear(width, width)\n        self.norm ="
)
"""The last product of a block is one of what the block was given."""
WRAPPED: Final = (
    MODEL.replace(
        "model = Net()",
        "class Whole(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.body, self.head = Net(), nn.Linear(256, 256)\n\n"
        "    def forward(self, x):\n        return self.head(self.body(x))\n\nmodel = Whole()",
    )
    .replace("nn.functional.gelu(", "tanh(torch.sin(torch.sigmoid(")
    .replace("norm(x))))", "norm(x))))))")
)
"""A module that drops all if it is carried out again, and has all again at once."""
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


LAYERS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True, norm_first=True)
            for _ in range(8)
        )
        self.head = nn.Linear(256, 4000)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

model = Net().cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(4):
    loss = model(torch.randn(32, 128, 256, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


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


def needed(home: Path) -> Need:
    return Need(trace_of(read_snapshot(home / "s.pickle")), goes_on=True)


def measured(home: Path, text: str = MODEL, *, learns: bool = True) -> Checkpoints:
    found = rehearsed(home, text)
    checkpoints = Checkpoints(needed(home), found.traits)
    if learns and checkpoints.can_save:
        outermost = rehearsed(home, text, spec(checkpoints, checkpoints.outermost))
        checkpoints.learn_ends(needed(home).trace, outermost.traits)
    return checkpoints


def spec(found: Checkpoints, plan: Plan) -> str:
    (text,) = catalogue.checkpointed(found.traits, plan).specs
    return text


def every(parts: Any) -> list[Plan]:
    """Every set of modules and of those within them."""

    def ways(parts: Any) -> list[list[Choice]]:
        per_part = [[*ways(part.parts), *([o] for o in part.options)] for part in parts]
        return [list(chain(*way)) for way in product(*per_part)]

    return [Plan.of(way) for way in ways(parts)]


def test_modules_are_those_that_call_several_others(tmp_path: Path) -> None:
    found = measured(tmp_path)

    assert [part["path"] for part in found.traits["parts"]] == PARTS
    assert found.traits["parts"][2]["written"] == "model.pair.parts[0]"
    assert [len(part["calls"]) for part in found.traits["parts"]] == [3] * 5


@pytest.mark.parametrize("text", [MODEL, WRAPPED], ids=["plain", "wrapped"])
def test_no_set_that_fits_by_replay_is_much_cheaper(text: str, tmp_path: Path) -> None:
    found = measured(tmp_path, text)
    plans = every(found._roots)
    assert len(plans) > 30
    needs = {plan: found._need.peak_bytes(found._requests(plan)) for plan in plans}

    for limit in np.linspace(min(needs.values()), 1.1 * max(needs.values()), 12).astype(int):
        found._n_left = 10**6
        fitting = [p for p in plans if found._fits(p, int(limit), is_steady=True)]
        best = min((plan.n_flops for plan in fitting), default=None)
        plan = found.cheapest(int(limit))

        assert (plan is None) == (best is None)
        if plan is not None and best is not None:
            assert plan.n_flops <= 1.02 * best
            assert plan in fitting
            assert text is WRAPPED or found.needs_bytes(plan) <= limit


@pytest.mark.slow
def test_first_few_of_equal_modules_are_checkpointed_whole(tmp_path: Path) -> None:
    found = measured(tmp_path, LAYERS)
    layers = [part.options for part in found._roots]
    assert len(layers) == 8
    # Other blocks lie, and are written, where results of products lay.
    assert len({tuple(one.kept for one in options) for options in layers}) == 1

    n_found = 0
    for share in np.linspace(0.6, 0.95, 4):
        limit = int(share * found._need.bytes())
        cheapest, plan = found.cheapest(limit), found.whole(limit)
        assert (cheapest is None) <= (plan is None)
        if cheapest is not None and plan is not None:
            n_found += 1
            assert found._fits(plan, limit, is_steady=True)
            assert cheapest.n_flops <= plan.n_flops
            assert plan == Plan.of(options[0] for options in layers[: len(plan.choices)])
            assert plan.is_whole
    assert n_found


EVALUATED = f"{MODEL}\nscore = model(torch.zeros(8192, 256, device='cuda')).mean().item()\n"


def test_graph_without_a_backward_pass_is_let_go(tmp_path: Path) -> None:
    """When it is let go is not learnt, so a set may seem to need somewhat more."""
    found = measured(tmp_path, EVALUATED)

    real = rehearsed(tmp_path, EVALUATED, spec(found, found.outermost)).peak_allocated_bytes

    peak_bytes = found._need.peak_bytes(found._requests(found.outermost))
    assert real <= peak_bytes <= 1.2 * real < 0.8 * found._need.peak_bytes()


@pytest.mark.parametrize(
    "text", [MODEL, RELU, DROPOUT, SHORTCUT], ids=["gelu", "relu", "dropout", "shortcut"]
)
def test_sets_need_and_cost_what_was_replayed(text: str, tmp_path: Path) -> None:
    found = measured(tmp_path, text)
    plans = [plan for plan in every(found._roots) if plan.choices]

    for n in np.random.default_rng(0).choice(len(plans), 5, replace=False):
        real = rehearsed(tmp_path, text, spec(found, plans[n]))

        peak_bytes = found._need.peak_bytes(found._requests(plans[n]))
        assert peak_bytes == pytest.approx(real.peak_allocated_bytes, rel=0.02)
        # One segment is a tenth of what so small a program needs; one of the sets is off by it.
        assert found.needs_bytes(plans[n]) == pytest.approx(needed(tmp_path).bytes(), rel=0.1)
        assert real.traits["n_flops"] - found.traits["n_flops"] == plans[n].n_flops


def test_what_forward_passes_let_go_of_is_learnt(tmp_path: Path) -> None:
    blind, seeing = measured(tmp_path, learns=False), measured(tmp_path)
    (plan,) = (p for p in every(seeing._roots) if spec(seeing, p) == "checkpoint:0,2,3,4")

    real = rehearsed(tmp_path, MODEL, "checkpoint:0,2,3,4")

    said, known = (c._need.peak_bytes(c._requests(plan)) for c in (blind, seeing))
    assert known == real.peak_allocated_bytes < said


def test_outermost_modules_hold_all_others(tmp_path: Path) -> None:
    found = measured(tmp_path)

    assert [one.number for one in found.outermost.choices] == [0, 1, 4]


def test_nothing_is_learned_of_parts_that_a_cut_rehearsal_did_not_reach(tmp_path: Path) -> None:
    found = measured(tmp_path)

    found.learn_ends(found._need.trace, {"parts": []})

    assert found.lowest()


def test_lowest_set_has_fewest_tensors(tmp_path: Path) -> None:
    found = measured(tmp_path)
    peaks = [found._need.peak_bytes(found._requests(plan)) for plan in every(found._roots)]

    assert found._need.peak_bytes(found._requests(found.lowest())) <= 1.02 * min(peaks)


def test_results_that_are_changed_in_place_are_not_kept(tmp_path: Path) -> None:
    found = measured(tmp_path, IN_PLACE)

    assert {one.kept for one in found._roots[0].options} == {()}
    assert {one.kept for one in measured(tmp_path)._roots[0].options} > {()}


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


@pytest.mark.parametrize(
    ("end", "kept", "n_again"),
    # A piece ends with a product, which is not made again.
    [(4, (), 2), (4, (0,), 1), (4, (1,), 1), (4, (0, 1), 0), (3, (), 1), (3, (0,), 0)],
)
def test_gradients_are_the_same_whatever_is_kept(
    end: int, kept: tuple[int, ...], n_again: int
) -> None:
    torch = pytest.importorskip("torch")
    from torch.utils.flop_counter import FlopCounterMode

    from fragdoctor.rehearsal.engine.treatments.written import in_pieces, keeping

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
    more = {"context_fn": keeping(*kept)} if kept else {}
    block.forward = partial(in_pieces, block, [(0, end, more)])
    treated, n_treated = run()

    assert all(torch.equal(a, b) for a, b in zip(plain, treated, strict=True))
    assert n_treated - n_plain == n_again * 2 * 4 * 8 * 16


def test_lines_name_modules_one_after_another(tmp_path: Path) -> None:
    written = [f"model.layers[{i}]" for i in (0, 1, 2, 5)]

    assert catalogue._together(written[:3]) == "model.layers[:3]"
    assert catalogue._together([*written, "model.end"]) == (
        "[*model.layers[:3], model.layers[5], model.end]"
    )


def test_results_in_a_row_are_written_as_a_range() -> None:
    assert catalogue._kept([*range(28)]) == "keeping(*range(28))"
    assert catalogue._kept((0, 1, 2)) == "keeping(0, 1, 2)"


def test_plan_becomes_one_spec_and_its_lines(tmp_path: Path) -> None:
    found = measured(tmp_path)
    treatment = catalogue.checkpointed(
        found.traits, Plan.of([Choice(0, (1,), 10), Choice(2, (), 20), Choice(3, (), 20)])
    )

    assert treatment.specs == ["checkpoint:0=1,2,3"]
    lines = "\n".join(treatment.lines)
    assert "context_fn=keeping(1)" in lines
    assert "for block in model.pair.parts[:4]" not in lines
    assert "for block in model.pair.parts[:2]:" in lines
    assert "for block in [" not in lines  # one module alone needs no loop
    written = MODEL.replace("optimizer =", f"{lines}\noptimizer =", 1)
    outside, inside = (
        rehearsed(tmp_path, text, *treatments, observes=False)
        for text, treatments in ((MODEL, treatment.specs), (written, []))
    )
    assert outside.peak_allocated_bytes == inside.peak_allocated_bytes
    assert outside.peak_reserved_bytes == inside.peak_reserved_bytes
