"""The range of published figures: around the point, and as the benchmark finds it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from estimated_workloads import recorded_peaks, workload_of

from fragdoctor.estimation.bounds import Needs
from fragdoctor.estimation.calibration import HIGH_FACTOR, LOW_FACTOR, published_range
from fragdoctor.estimation.formula import formula_footprint

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize("row", recorded_peaks()[::6])
def test_both_points_lie_inside(row: dict[str, Any]) -> None:
    found = formula_footprint(workload_of(row["settings"]))

    assert found.published_high_bytes is not None
    assert found.published_low_bytes < found.needs_low_bytes <= found.peak_allocated_bytes
    assert found.reserved_bytes <= found.published_high_bytes


def test_there_is_no_end_where_a_part_is_not_known() -> None:
    assert published_range(Needs(1000, None)) == (915, None)


@pytest.mark.slow
def test_the_factors_are_what_the_benchmark_finds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import bench_published

    bench_published.print_calibration()

    last = capsys.readouterr().out.splitlines()[-1]
    assert f"x {LOW_FACTOR:.3f} to x {HIGH_FACTOR:.3f}" in last
