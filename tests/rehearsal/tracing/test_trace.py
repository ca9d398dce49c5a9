"""Traced models against bytes computed by hand; recordings are in ``test_recordings.py``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

pytest.importorskip("torch")

import torch
import traced_models as models

from fragdoctor.errors import ConfigError
from fragdoctor.model.memory_estimate import PhaseName
from fragdoctor.rehearsal.tracing.footprint import kinds_of
from fragdoctor.rehearsal.tracing.traced import Traced, trace, trace_factory
from fragdoctor.rehearsal.tracing.training_setup import TrainingSetup

pytestmark = pytest.mark.slow

KIB, MIB = 2**10, 2**20
WEIGHT = 256 * 256 * 4
INPUT = 64 * 256 * 4
WORKSPACES = 2 * 32 * MIB  # one for the forward pass, one for the thread of the backward pass


def shares(traced: Traced, phase: PhaseName) -> dict[str, int]:
    found = next(p for p in traced.footprint.phases if p.name == phase)
    return {share.item: share.n_bytes for share in found.shares}


def test_linear_layer_takes_what_arithmetic_says() -> None:
    """AdamW's step needs one more copy of the weights: the square roots."""
    traced = trace_factory(models.linear, TrainingSetup(loss="mean"))

    step = shares(traced, PhaseName.OPTIMIZER_STEP)
    assert step["parameters"] == WEIGHT
    assert step["gradients"] == WEIGHT
    assert step["optimizer_state"] == 2 * WEIGHT
    assert step["temporaries"] == WEIGHT
    assert step["inputs"] == INPUT
    assert step["workspaces"] == WORKSPACES
    assert sum(step.values()) == traced.footprint.peak_allocated_bytes
    assert traced.footprint.n_parameters == 256 * 256


def test_sgd_keeps_no_state() -> None:
    traced = trace_factory(models.linear, TrainingSetup(loss="mean", optimizer="sgd"))

    assert "optimizer_state" not in shares(traced, PhaseName.OPTIMIZER_STEP)


def test_inference_keeps_no_activations() -> None:
    traced = trace_factory(models.deep, TrainingSetup(inference=True))

    held = shares(traced, PhaseName.INFERENCE)
    assert set(held) == {"parameters", "inputs", "workspaces", "temporaries"}
    assert [p.name for p in traced.footprint.phases] == [PhaseName.INFERENCE]


def test_tied_weights_count_once() -> None:
    traced = trace_factory(models.tied, TrainingSetup(loss="mean"))

    assert shares(traced, PhaseName.FORWARD)["parameters"] == WEIGHT + 2 * KIB


def test_batch_scales_the_inputs() -> None:
    traced = trace_factory(models.linear, TrainingSetup(loss="mean", batch=640))

    assert traced.batch == 640
    assert shares(traced, PhaseName.FORWARD)["inputs"] == 10 * INPUT


@pytest.mark.parametrize(
    ("factory", "n_recomputed"),
    [(models.deep_checkpointed, 3), (models.deep_checkpointed_reentrant, 4)],
)
def test_checkpointing_keeps_one_activation_a_layer_and_recomputes(
    factory: Callable[[], object], n_recomputed: int
) -> None:
    """Kept without: four a layer; with: its input. The newer kind stops before the last again."""
    activation = 4096 * 256 * 4

    plain = trace_factory(models.deep, TrainingSetup(loss="mean", optimizer="sgd"))
    saving = trace_factory(factory, TrainingSetup(loss="mean", optimizer="sgd", steps=1))

    kept = shares(plain, PhaseName.FORWARD)["activations"]
    assert kept == pytest.approx(8 * 4 * activation, rel=0.05)
    backward = shares(saving, PhaseName.BACKWARD)
    assert backward["activations"] == pytest.approx(8 * activation, rel=0.15)
    again = zip(kinds_of(saving.log), saving.log.sizes, strict=True)
    assert list(again).count(("recomputed", activation)) == 8 * n_recomputed


def test_autocast_copies_of_weights_are_told_apart() -> None:
    traced = trace_factory(models.deep, TrainingSetup(loss="mean", autocast="bf16"))

    weights = 8 * 2 * (256 * 256 + 256) * 2
    assert shares(traced, PhaseName.FORWARD)["weight_copies"] == weights


def test_fused_attention_keeps_no_scores() -> None:
    """In half precision cuDNN's kernel; in single precision the memory-efficient one."""
    scores = 2 * 1024 * 1024

    for plan in (TrainingSetup(loss="mean", autocast="bf16"), TrainingSetup(loss="mean")):
        log = trace_factory(models.attention, plan).log
        assert any("_attention" in operation for operation in log.operations)
        assert max(
            size for size, what in zip(log.sizes, log.operations, strict=True)
            if what != "cuBLAS workspace"
        ) < 2 * scores  # fmt: skip


def test_gradients_accumulate_in_place() -> None:
    once = trace_factory(models.deep, TrainingSetup(loss="mean", optimizer="sgd"))
    four = trace_factory(
        models.deep, TrainingSetup(loss="mean", optimizer="sgd", grad_accumulation=4)
    )

    weights = shares(once, PhaseName.BACKWARD)["parameters"]
    extra = four.footprint.peak_allocated_bytes - once.footprint.peak_allocated_bytes
    assert 0 < extra <= weights + 2 * MIB


def test_lines_of_the_users_code_are_named() -> None:
    traced = trace_factory(models.deep, TrainingSetup(loss="mean"))

    assert traced.footprint.lines
    assert {line.function for line in traced.footprint.lines} == {"forward"}
    assert all(line.filename.endswith("traced_models.py") for line in traced.footprint.lines)


def test_factory_with_targets_loss_and_optimizer_is_used() -> None:
    traced = trace_factory(models.with_targets)

    assert traced.optimizer == "sgd"
    assert not traced.footprint.notes


def test_model_that_returns_a_loss_needs_none() -> None:
    traced = trace_factory(models.labelled)

    assert not traced.footprint.notes


def test_missing_loss_is_assumed_and_said() -> None:
    traced = trace_factory(models.linear)

    assert traced.footprint.notes == ("No loss was given; took mean of the first output (--loss).",)


def test_value_of_a_loss_may_be_printed(capsys: pytest.CaptureFixture[str]) -> None:
    trace_factory(models.logs)

    assert "loss 0.0" in capsys.readouterr().out


def test_shape_that_depends_on_values_is_assumed_and_said() -> None:
    """All rows are kept: the most that there can be."""
    traced = trace_factory(models.depends_on_values)

    assert any(
        "Assumed of nonzero at " in note and "all elements are kept" in note
        for note in traced.footprint.notes
    )


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_recurrent_layer_keeps_every_step(kind: str) -> None:
    """At least the state of each of the 8 steps of each of the 2 layers."""
    traced = trace_factory(partial(models.recurrent, kind), TrainingSetup(loss="mean"))

    state = 4 * 64 * 4
    assert shares(traced, PhaseName.FORWARD)["activations"] >= 2 * 8 * state
    assert any("without cuDNN" in note for note in traced.footprint.notes)


def test_constants_of_the_factory_take_nothing_of_the_gpu() -> None:
    traced = trace_factory(models.with_constants, TrainingSetup(loss="mean"))

    assert 4_000_000 not in traced.log.sizes
    assert any("The model read a value" in note for note in traced.footprint.notes)


def test_nothing_is_materialised() -> None:
    traced = trace_factory(models.huge, TrainingSetup(loss="mean", optimizer="sgd", dtype="bf16"))

    assert shares(traced, PhaseName.FORWARD)["parameters"] == 2 * 2**40


def test_capacity_decides_whether_it_fits() -> None:
    traced = trace_factory(models.deep, TrainingSetup(loss="mean"))
    reserved = traced.footprint.reserved_bytes

    assert traced.served(reserved).fits
    refused = traced.served(traced.footprint.peak_allocated_bytes // 2)
    assert not refused.fits
    assert refused.failed_bytes > 0


def test_process_is_left_as_it_was() -> None:
    available, layer = torch.cuda.is_available(), torch.nn.Linear(4, 4)

    trace_factory(models.linear)

    layer(torch.ones(2, 4)).sum().backward()
    assert torch.cuda.is_available() is available
    assert layer.weight.grad is not None
    if not available:
        with pytest.raises((AssertionError, RuntimeError)):
            torch.zeros(1, device="cuda")


@pytest.mark.parametrize(
    ("factory", "sentence"),
    [
        (models.no_inputs, "gives no inputs"),
        (models.a_number, "returned int, which holds no model"),
        (models.fails, r"ValueError: no weights here"),
        (models.reads_a_number, r"reads a whole number from the GPU at .*traced_models.py:\d+"),
    ],
)
def test_what_cannot_be_traced_is_said_in_one_sentence(
    factory: Callable[[], object], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        trace_factory(factory)

    assert caught.value.hint


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("traced_models", "wants pkg.module:factory"),
        ("nowhere.at.all:build", "no module 'nowhere.at.all'"),
        ("traced_models:nothing", "has no function 'nothing'"),
    ],
)
def test_factory_that_is_not_there_is_said(spec: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        trace(spec)


def test_unknown_optimizer_is_said() -> None:
    with pytest.raises(ConfigError, match="cannot be traced"):
        trace_factory(models.linear, TrainingSetup(loss="mean", optimizer="adamw-8bit"))
