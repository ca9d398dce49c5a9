"""The formulas against training steps of the libraries' own models, and a few in plain PyTorch.

``trained_steps.json`` holds what ``tools/train_steps.py`` measured: peaks of allocated memory of
two steps, and the configurations of the models. Its ``source`` says with what: PyTorch's own
allocator, in a CUDA build whose device only keeps books. ``rehearsed_bytes`` are the peaks of the
same steps by ``fragdoctor rehearse``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from fragdoctor.errors import FragdoctorError
from fragdoctor.estimation.config_json import shape_of_config
from fragdoctor.estimation.formula import FORMULA_ERROR, formula_footprint, formula_needs
from fragdoctor.estimation.states import states_of
from fragdoctor.model.workload import Workload

MEASURED = json.loads(Path(__file__).with_name("trained_steps.json").read_text())


def is_covered(row: dict[str, Any]) -> bool:
    try:
        shape_of_config(row["config"], row["name"])
    except FragdoctorError:
        return False
    return True


ROWS = [row for row in MEASURED if is_covered(row)]
PRECISIONS = ("fp32", "bf16", "amp-bf16")
PROMISED = 0.05
MOST = 0.10
STEPS = [(row, dtype) for row in ROWS for dtype in row["peak_allocated_bytes"]]
FAST = 4  # one case in so many is of the fast lane


def sampled(cases: list[tuple[Any, ...]]) -> list[Any]:
    """Return parameters, most of them left to the slow lane."""
    names = ["-".join(p if isinstance(p, str) else p["name"] for p in case) for case in cases]
    return [
        pytest.param(*case, marks=pytest.mark.slow if k % FAST else (), id=name)
        for k, (case, name) in enumerate(zip(cases, names, strict=True))
    ]


def workload_of(row: dict[str, Any], dtype: str) -> Workload:
    shape = shape_of_config(row["config"], row["name"])
    workload = Workload(
        shape,
        {"nf4": "int4", "int8": "int8"}.get(row["quantised"], dtype),
        batch=row["batch"],
        seq=row["seq"],
        compute="9.0",
        checkpointing="full" if row["checkpointing"] else "none",
    )
    if not row["lora"]:
        return workload
    targets = row["lora"]["target_modules"]
    return replace(
        workload,
        lora_rank=row["lora"]["r"],
        lora_targets=(
            ("all-linear",) if targets == "all-linear" else tuple(t.split(".")[0] for t in targets)
        ),
        dora=row["lora"].get("use_dora", False),
    )


def peak_of(row: dict[str, Any], dtype: str) -> int:
    return formula_footprint(workload_of(row, dtype)).peak_allocated_bytes


@pytest.mark.parametrize(("row", "dtype"), sampled(STEPS))
def test_peak_of_measured_step_is_met(row: dict[str, Any], dtype: str) -> None:
    measured = row["peak_allocated_bytes"][dtype]

    assert abs(peak_of(row, dtype) - measured) <= MOST * measured


@pytest.mark.parametrize(
    "steps",
    [pytest.param(STEPS[::FAST], id="some"), pytest.param(STEPS, marks=pytest.mark.slow, id="all")],
)
def test_promised_share_of_measured_steps_is_met_closely(
    steps: list[tuple[dict[str, Any], str]],
) -> None:
    errors = [peak_of(row, d) / row["peak_allocated_bytes"][d] - 1 for row, d in steps]

    assert sum(abs(e) <= PROMISED for e in errors) >= 0.9 * len(errors)


@pytest.mark.parametrize(("row", "dtype"), sampled(STEPS))
def test_measured_peak_lies_between_the_bounds(row: dict[str, Any], dtype: str) -> None:
    needs = formula_needs(workload_of(row, dtype))

    assert needs.high_bytes is not None
    assert needs.low_bytes <= row["peak_allocated_bytes"][dtype] <= needs.high_bytes


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: row["name"])
def test_rehearsed_step_is_what_the_allocator_saw(row: dict[str, Any]) -> None:
    for dtype, rehearsed in row["rehearsed_bytes"].items():
        assert rehearsed == pytest.approx(row["peak_allocated_bytes"][dtype], rel=0.01)


@pytest.mark.parametrize(
    "row", [row for row in ROWS if not row["quantised"]], ids=lambda row: row["name"]
)
def test_parameters_of_measured_model_are_counted(row: dict[str, Any]) -> None:
    groups = states_of(workload_of(row, "fp32"))
    trained = sum(g.n_total for g in groups if g.is_trained)

    assert sum(g.n_total for g in groups) == pytest.approx(row["n_parameters"], rel=1e-3)
    assert trained == pytest.approx(row["n_trained"], rel=1e-3)


@pytest.mark.parametrize("row", sampled([(row,) for row in ROWS]))
def test_needs_grow_with_batch_and_length(row: dict[str, Any]) -> None:
    workload = workload_of(row, "bf16" if row["quantised"] else "amp-bf16")
    batches = [replace(workload, batch=n) for n in (1, 2, 5, 100)]
    lengths = [replace(workload, seq=n) for n in (100, 257, 4000)]

    for runs in (batches, lengths):
        bounds = [formula_needs(run) for run in runs]
        lows = [b.low_bytes for b in bounds]
        highs = [b.high_bytes or 0 for b in bounds]
        assert lows == sorted(lows)
        assert highs == sorted(highs)


def test_promise_counts_the_measured_models() -> None:
    assert f"steps of {len(ROWS)} models" in FORMULA_ERROR
    assert f"within {100 * PROMISED:.0f}% for 9 of 10" in FORMULA_ERROR
    assert f"within {100 * MOST:.0f}% for all" in FORMULA_ERROR
    assert all(
        len(r["peak_allocated_bytes"]) == len(PRECISIONS) for r in ROWS if not r["quantised"]
    )
    assert {row["split"] for row in ROWS} == {"looked", "held-out"}
