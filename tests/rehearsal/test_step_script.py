"""Steps of the user's own model against bytes computed by hand; ``test_recordings.py`` has others.

The figures that are not arithmetic are those that the recorder of ``estimate --model`` found before
the engine took its place, which was within 0.2% of 63 recorded runs.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from rehearsal_stage import PREPARED

from fragdoctor.errors import ConfigError
from fragdoctor.model.rehearsal import RehearsalResult
from fragdoctor.rehearsal import runner
from fragdoctor.rehearsal.process import RehearsalConditions, rehearsed_gpu
from fragdoctor.rehearsal.step_script import own_model, step_options, step_program
from fragdoctor.rehearsal.sweep import with_batch

MIB = 2**20
WEIGHT = 256 * 256 * 4
INPUT = 64 * 256 * 4
WORKSPACES = 2 * 32 * MIB + 2 * 8192  # of the forward pass, and of the backward pass's thread


def rehearsed(
    folder: Path, factory: str, dtype: str = "", batch: int | None = None, **options: Any
) -> RehearsalResult:
    build = own_model(f"own_models:{factory}")
    asked = step_options(dtype, **{"optimizer": "adamw", **options})
    pythons = [sys.executable]
    program = step_program(factory, build, asked, pythons, folder, has_batch=batch is not None)
    if batch is not None:
        program = with_batch(program, batch)
    conditions = RehearsalConditions(
        gpu=rehearsed_gpu(None, None, is_unlimited=True),
        variables={"PYTHONPATH": str(Path(__file__).parents[1])},
    )
    snapshot = folder / "snapshot.pickle"
    found = runner.rehearse(program, conditions, snapshot, runs=PREPARED)  # type: ignore[arg-type]
    return runner.judge(found, program.name)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand where the models are, as a user does."""
    monkeypatch.chdir(Path(__file__).parents[1])


def peak_of(result: RehearsalResult) -> int:
    return result.rehearsal.peak_allocated_bytes


def test_linear_layer_takes_what_arithmetic_says(tmp_path: Path) -> None:
    """AdamW's step needs one more copy of the weights: the square roots."""
    result = rehearsed(tmp_path, "linear")

    assert peak_of(result) == pytest.approx(5 * WEIGHT + INPUT + WORKSPACES, rel=1e-3)
    assert "Linear has 65,536 parameters." in result.rehearsal.notes
    assert "asked for the same memory" in result.rehearsal.stopped or result.rehearsal.n_skipped


@pytest.mark.slow
@pytest.mark.parametrize(
    ("factory", "options", "peak_bytes", "reserved_bytes"),
    [
        ("linear", {"optimizer": "sgd"}, 67_765_248, 69_206_016),
        ("linear", {"batch": 640}, 69_469_184, 71_303_168),
        ("tied", {}, 68_756_480, 69_206_016),
        ("deep", {"inference": True}, 54_542_336, 60_817_408),
        ("deep", {}, 226_806_272, 236_978_176),
        ("deep", {"dtype": "amp-bf16"}, 163_629_056, 174_063_616),
        ("deep", {"dtype": "amp-fp16"}, 163_630_080, 174_063_616),
        (
            "deep",
            {"optimizer": "sgd", "grad_accumulation": 4},
            222_595_584,
            224_395_264,
        ),
        ("deep_checkpointed", {"optimizer": "sgd"}, 126_110_208, 140_509_184),
        (
            "deep_checkpointed_reentrant",
            {"optimizer": "sgd"},
            138_693_120,
            161_480_704,
        ),
        ("attention", {}, 72_553_984, 94_371_840),
        ("attention", {"dtype": "amp-bf16"}, 72_004_608, 92_274_688),
        ("labelled", {}, 67_725_312, 69_206_016),
        # On a GPU cuDNN runs these, and cuBLAS has no part in them.
        ("lstm", {}, 27_023_872, 29_360_128),
        ("gru", {}, 26_685_440, 29_360_128),
        ("with_constants", {}, 68_485_120, 69_206_016),
    ],
)
def test_peaks_are_those_that_the_recorder_found(
    tmp_path: Path, factory: str, options: dict[str, Any], peak_bytes: int, reserved_bytes: int
) -> None:
    found = rehearsed(tmp_path, factory, **options).rehearsal

    assert (found.peak_allocated_bytes, found.peak_reserved_bytes) == (peak_bytes, reserved_bytes)


@pytest.mark.slow
def test_checkpointing_keeps_one_activation_a_layer(tmp_path: Path) -> None:
    activation = 4096 * 256 * 4
    plain = rehearsed(tmp_path, "deep", optimizer="sgd")
    saving = rehearsed(tmp_path, "deep_checkpointed", optimizer="sgd")

    assert peak_of(plain) - peak_of(saving) == pytest.approx(8 * 3 * activation, rel=0.1)


@pytest.mark.slow
def test_nothing_is_materialised(tmp_path: Path) -> None:
    result = rehearsed(tmp_path, "huge", "bf16", optimizer="sgd")

    assert peak_of(result) > 2 * 256 * 2**30 * 2  # weights and gradients


def test_missing_loss_is_assumed_and_said(tmp_path: Path) -> None:
    notes = rehearsed(tmp_path, "linear").rehearsal.notes

    assert "No loss was given; took the mean of the first output." in notes


def test_shape_that_depends_on_values_is_assumed_and_said(tmp_path: Path) -> None:
    """All rows are kept: the most that there can be."""
    assumed = rehearsed(tmp_path, "depends_on_values").rehearsal.assumptions

    assert any("all elements are kept" in a.assumed for a in assumed)


@pytest.mark.parametrize(
    ("factory", "sentence"),
    [
        ("no_inputs", "returns no inputs"),
        ("a_number", "returned int, which contains no model"),
        ("fails", r"at .*own_models.py:\d+.*: ValueError: no weights here"),
        ("nothing", "has no function 'nothing'"),
    ],
)
def test_what_cannot_be_rehearsed_is_said_in_one_sentence(
    tmp_path: Path, factory: str, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        rehearsed(tmp_path, factory)

    assert caught.value.hint


def test_name_without_a_factory_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"wants pkg\.module:factory"):
        own_model("own_models")


@pytest.mark.parametrize(
    ("dtype", "optimizer", "sentence"),
    [
        ("int4", "adamw", "cannot be rehearsed in int4"),
        ("bf16", "adamw-8bit", "'adamw-8bit' cannot be rehearsed"),
    ],
)
def test_what_pytorch_does_not_have_is_refused(dtype: str, optimizer: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        step_options(dtype, optimizer)
