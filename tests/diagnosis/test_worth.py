"""What is worth changing in a run that fits, and what is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from fragdoctor.diagnosis.pipeline import diagnose
from fragdoctor.inputs.snapshot_reader import read_snapshot
from fragdoctor.model.case import Case, Overrides
from fragdoctor.model.diagnosis import Diagnosis, RunState
from fragdoctor.model.finding import WORTH_SAYING
from fragdoctor.units import GIB

SAMPLE = Path(__file__).parents[2] / "sample_snapshots" / "healthy_training.pickle.gz"


def told(capacity_bytes: int | None) -> Diagnosis:
    overrides = Overrides(capacity_bytes=capacity_bytes)
    found = diagnose(Case(snapshot=read_snapshot(SAMPLE), overrides=overrides))
    assert found.verdict.state is RunState.FITS
    return found


@pytest.mark.parametrize("capacity_bytes", [None, 2 * GIB])
def test_run_that_fits_is_told_of_large_savings_only(capacity_bytes: int | None) -> None:
    found = told(capacity_bytes)

    peak = found.devices[0].peak_allocated_bytes
    assert peak is not None
    savings = [one.saves_bytes for one in found.recommendations if one.saves_bytes]
    assert savings
    assert min(savings) >= WORTH_SAYING * peak
    assert [one.rank for one in found.recommendations] == [
        *range(1, len(found.recommendations) + 1)
    ]


def test_run_on_a_gpu_that_is_half_empty_needs_no_advice() -> None:
    assert told(4 * GIB).recommendations == ()
