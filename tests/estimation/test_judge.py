from __future__ import annotations

import re
from typing import Any

import pytest
from estimated_workloads import workload_of
from msgspec.structs import replace

from fragdoctor.estimation import judge
from fragdoctor.estimation.bounds import Needs
from fragdoctor.estimation.formula import formula_footprint, formula_needs
from fragdoctor.estimation.judge import judged, largest_batch
from fragdoctor.estimation.measures import applied, measures_for
from fragdoctor.estimation.model_shapes import model_of
from fragdoctor.model.gpus import gpu_of
from fragdoctor.model.memory_estimate import PhaseName
from fragdoctor.model.workload import Attention, Loss, Workload
from fragdoctor.units import GIB

SMALL = workload_of(
    {"family": "llama", "hidden": 512, "layers": 4, "heads": 8, "ffn": 1408, "vocab": 8000,
     "dtype": "amp-bf16", "batch": 4, "seq": 512}
)  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dtype": "bf16", "zero_stage": 3, "world_size": 4, "optimizer": "adamw-8bit"},
        {"dtype": "int4", "lora_rank": 8, "lora_targets": ("all-linear",)},
        {"dtype": "deepspeed-bf16", "master_weights": True, "zero_stage": 1, "world_size": 2},
        {"dtype": "fp16", "inference": True},
        {"optimizer": "adafactor"},
    ],
)
def test_formula_of_a_row_gives_its_figure(changes: dict[str, Any]) -> None:
    workload = replace(SMALL, **changes)
    shape, footprint = workload.shape, formula_footprint(workload)
    sizes = {
        "P": footprint.n_parameters,
        "P_adapters": footprint.n_trainable,
        "P_largest": max(g.n_each for g in shape.parameters),
        "B*S": workload.batch * workload.seq,
        "B*V": workload.batch * shape.vocab,
        "B*S*V": workload.batch * workload.seq * shape.vocab,
    }
    said = {
        item.id: re.fullmatch(r"(\S+) x ([\d.e-]+) B( / N)?", item.formula)
        for item in footprint.items
    }

    found = {name: match for name, match in said.items() if match and match[1] in sizes}
    assert found.keys() >= {"parameters", "logits"}
    for item in footprint.items:
        if match := found.get(item.id):
            n_bytes = sizes[match[1]] * float(match[2])
            assert item.n_bytes * (workload.world_size if match[3] else 1) == pytest.approx(
                n_bytes, rel=0.02
            )


def peak(workload: Workload) -> int:
    return formula_footprint(workload).peak_allocated_bytes


def test_largest_batch_fits_and_a_larger_one_does_not() -> None:
    usable = 4 * GIB

    batch = largest_batch(SMALL, usable)

    assert batch
    assert (formula_needs(replace(SMALL, batch=batch)).high_bytes or 0) <= usable
    more = batch + max(2, batch // 20)
    assert (formula_needs(replace(SMALL, batch=more)).high_bytes or 0) > usable


def test_largest_batch_is_zero_where_not_even_one_fits() -> None:
    assert largest_batch(SMALL, 100 * 2**20) == 0


def test_largest_batch_is_found_where_the_first_ones_need_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def needs_of(workload: Workload) -> Needs:  # the optimizer's step is the peak up to batch 50
        return Needs(0, max(5 * GIB, workload.batch * GIB // 10))

    monkeypatch.setattr(judge, "formula_needs", needs_of)
    batch = largest_batch(SMALL, 10 * GIB)

    assert batch
    assert 97 <= batch <= 100


def test_estimate_fits_exactly_where_the_margin_is_not_negative() -> None:
    estimate = judged(SMALL, [gpu_of("h100"), gpu_of("1GiB")])

    large, small = estimate.fits
    assert (large.fits, small.fits) == (True, False)
    assert large.margin_bytes == large.gpu.usable_bytes - (estimate.footprint.needs_high_bytes or 0)
    assert small.margin_bytes < 0 <= large.margin_bytes


def test_savings_are_measures_that_each_alone_need_less_the_least_first() -> None:
    estimate = judged(SMALL, [])

    (checkpointing,) = [s for s in estimate.savings if s.measures == ("checkpointing",)]
    checkpointed = formula_needs(replace(SMALL, checkpointing="full"))
    assert checkpointing.needs_high_bytes == checkpointed.high_bytes
    assert "33%" in checkpointing.cost
    needed = [s.needs_high_bytes for s in estimate.savings]
    assert needed == sorted(needed)
    assert needed[-1] < estimate.footprint.needs_high_bytes


def test_measures_already_taken_are_not_offered() -> None:
    taken = replace(
        SMALL, checkpointing="full", optimizer="adamw-8bit", lora_rank=8, zero_stage=3,
        world_size=4, batch=1, loss=Loss.FUSED, dtype="int4", expandable_segments=True,
    )  # fmt: skip

    assert [m.id for m in measures_for(taken)] == []


def test_fused_attention_is_offered_where_scores_are_kept() -> None:
    eager = replace(SMALL, attention=Attention.EAGER)

    ids = [m.id for m in measures_for(eager)]

    assert "flash_attention" in ids
    assert "flash_attention" not in [m.id for m in measures_for(SMALL)]


@pytest.mark.parametrize(("model", "is_served"), [("gemma-2-2b", True), ("bloom-560m", False)])
def test_fused_attention_of_code_that_writes_its_own(model: str, *, is_served: bool) -> None:
    shape = model_of([model]).shape
    eager = Workload(shape=shape, seq=8192, dtype="bf16")

    offered = [m for m in measures_for(eager) if m.id == "flash_attention"]

    assert Attention.EAGER is eager.attention_in_code
    assert is_served is bool(offered)
    assert all(2 * peak(applied(eager, (m,))) < peak(eager) for m in offered)


def test_phases_come_in_the_order_of_a_step() -> None:
    names = [p.name for p in formula_footprint(SMALL).phases]

    assert names == [PhaseName.FORWARD, PhaseName.BACKWARD, PhaseName.OPTIMIZER_STEP]


def test_shares_of_each_phase_add_up_to_its_peak() -> None:
    for phase in formula_footprint(SMALL).phases:
        assert sum(s.n_bytes for s in phase.shares) == phase.n_bytes


@pytest.mark.parametrize("seq", [256, 512, 1024])
def test_peak_grows_with_batch_and_length(seq: int) -> None:
    short = replace(SMALL, seq=seq)

    assert peak(short) < peak(replace(short, batch=8)) < peak(replace(short, batch=8, seq=2 * seq))
