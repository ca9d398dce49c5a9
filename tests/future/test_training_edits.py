"""Changes of a training program: predicted peaks against programs that really were changed.

``recordings/train.py`` is the program, ``peaks.json`` what each of its variants really needed:
peak allocated and peak reserved bytes, on the allocator of PyTorch 2.12.1.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from fragdoctor.analysis.training_run import TrainingRun, training_run
from fragdoctor.diagnosis.bench import ENDLESS, Bench, set_up
from fragdoctor.diagnosis.pipeline import build_contexts
from fragdoctor.future.edits import Edit, combined
from fragdoctor.future.training_edits import (
    checkpointed,
    loss_in_chunks,
    optimizer_one_by_one,
    passes_scaled,
    requests_freed_at,
    requests_removed,
    states_quantized,
    step_in_backward,
)
from fragdoctor.inputs.snapshot_reader import read_snapshot
from fragdoctor.model.case import Case

RECORDINGS = Path(__file__).parent / "recordings"
PEAKS = json.loads((RECORDINGS / "peaks.json").read_text(encoding="utf-8"))
ALLOCATED, RESERVED = 0.04, 0.13
"""Largest error of each, as a share: the edits model kernels and frees that nobody recorded."""


@cache
def recorded(name: str) -> tuple[Bench, TrainingRun]:
    context = build_contexts(Case(snapshot=read_snapshot(RECORDINGS / f"{name}.pickle.gz")))[0]
    bench, _ = set_up(context)
    assert bench is not None
    assert context.analysis is not None
    run = training_run(context.analysis.trace, context.analysis.phases, bench.requests)
    assert run is not None
    return bench, run


def layers(run: TrainingRun) -> Edit:
    calls = run.layers
    assert calls is not None
    return checkpointed(calls.first_row, calls.end_row, calls.forward_end_row)


def chunks(run: TrainingRun) -> Edit:
    first, end = run.loss_span
    return loss_in_chunks((first, run.forward[1]), end, run.loss_row, 8)


EDITS: dict[str, Callable[[TrainingRun], Edit]] = {
    "ckpt": layers,
    "chunk": chunks,
    "fused": lambda run: requests_removed(run.temporary_row),
    "loop": lambda run: optimizer_one_by_one(run.temporary_row, run.optimizer[0]),
    "bit8": lambda run: states_quantized(run.state_row, run.temporary_row),
    "sgd": lambda run: requests_removed(  # no state, no temporaries
        np.union1d(run.state_row, run.temporary_row)
    ),
    "inbackward": lambda run: step_in_backward(run.gradient_row, run.temporary_row),
    "half": lambda run: passes_scaled(run.steps, int(run.forward[0].max()), 0.5, run.forward),
    "ckpt+chunk": lambda run: combined([chunks(run), layers(run)]),
    "ckpt+chunk+fused": lambda run: combined(
        [chunks(run), layers(run), requests_removed(run.temporary_row)]
    ),
}


def peaks(bench: Bench, edit: Edit) -> tuple[int, int]:
    result = bench.fair_replay.replay(ENDLESS, edit.apply(bench.reproduction))
    assert result.fits
    return result.peak_allocated_bytes, result.peak_reserved_bytes


def assert_close(found: Sequence[int], real: Sequence[int]) -> None:
    for value, truth, tolerance in zip(found, real, (ALLOCATED, RESERVED), strict=True):
        assert abs(value - truth) <= tolerance * truth, (value, truth)


@pytest.mark.parametrize(
    ("model", "variant"),
    [(m, v) for m in ("gpt", "conv", "wide") for v in EDITS if v in PEAKS[m]],
)
def test_edit_predicts_the_peak_of_the_changed_program(model: str, variant: str) -> None:
    bench, run = recorded(model)

    assert_close(peaks(bench, EDITS[variant](run)), PEAKS[model][variant])


@pytest.mark.parametrize("model", ["gpt", "conv", "wide", "staged"])
def test_the_recorded_run_itself_is_exact(model: str) -> None:
    bench, _ = recorded(model)

    assert peaks(bench, combined([])) == tuple(PEAKS[model]["base"])


def test_layers_of_unequal_shapes_and_several_kinds_are_checkpointed() -> None:
    """They are called from several lines, and an evaluation of the same model goes before."""
    bench, run = recorded("staged")
    found, real = peaks(bench, layers(run))[0], PEAKS["staged"]["ckpt"][0]

    assert run.layers is not None
    assert len(np.unique(run.layers.functions)) > 2
    assert run.layers.kept_share > 0.9
    assert abs(found - real) <= ALLOCATED * real


def test_loss_on_what_the_layers_make_is_not_computed_in_chunks() -> None:
    """The results of equal layers, and a loss on the last of them: there are no logits."""
    bench, run = recorded("conv")
    first, end = int(run.forward[0][0]), int(run.forward[1][0])
    inside = (bench.requests.row >= first) & (bench.requests.row < end)
    row, size = bench.requests.row[inside], bench.requests.size_bytes[inside]
    sizes, count = np.unique(size, return_counts=True)
    of_loss = row[size == sizes[count > 5].max()][-1:]
    spans = (np.array([first]), np.array([end]))

    edit = loss_in_chunks(spans, spans[1], of_loss, 8)

    assert peaks(bench, edit) == tuple(PEAKS["conv"]["base"])


def test_requests_are_freed_at_an_event_unless_they_are_gone_by_then() -> None:
    bench, run = recorded("gpt")
    after_first = int(run.optimizer[1][0])
    base = tuple(PEAKS["gpt"]["base"])

    earlier = peaks(bench, requests_freed_at(run.state_row, after_first))
    gone = peaks(bench, requests_freed_at(run.temporary_row, bench.requests.row[-1]))

    assert earlier[0] < base[0]
    assert gone == base


def test_accumulation_checkpoints_every_forward_pass() -> None:
    bench, run = recorded("gpt_accumulation")

    assert len(run.forward[0]) == 2 * len(run.optimizer[0])
    assert_close(peaks(bench, layers(run)), PEAKS["gpt"]["accum+ckpt"])


@pytest.mark.parametrize(("model", "n_layers"), [("gpt", 4), ("conv", 6), ("wide", 3)])
def test_layers_are_the_blocks_of_the_model(model: str, n_layers: int) -> None:
    _, run = recorded(model)

    assert run.layers is not None
    _, n_calls = np.unique(run.layers.forward_end_row, return_counts=True)
    assert np.bincount(n_calls).argmax() == n_layers
