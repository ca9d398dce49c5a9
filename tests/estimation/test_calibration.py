"""The range of published figures: around the point, by what is said, as the benchmark finds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from estimated_workloads import recorded_peaks, workload_of
from msgspec.structs import replace

from fragdoctor.estimation.bounds import Needs
from fragdoctor.estimation.calibration import SPREADS, published_range
from fragdoctor.estimation.formula import formula_footprint
from fragdoctor.model.workload import Loss

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize("row", recorded_peaks()[::6])
def test_both_points_lie_inside(row: dict[str, Any]) -> None:
    found = formula_footprint(workload_of(row["settings"]))

    assert found.published_high_bytes is not None
    assert found.published_low_bytes < found.needs_low_bytes <= found.peak_allocated_bytes
    assert found.reserved_bytes <= found.published_high_bytes


def test_what_is_said_narrows_the_range() -> None:
    training = replace(workload_of(recorded_peaks()[0]["settings"]), loss=None)

    def width(**said: Any) -> float:
        low, high = published_range(Needs(1000, 1200), replace(training, **said))
        assert high is not None
        return high / low

    assert width(inference=True) < width(loss=Loss.FUSED) < width()
    assert width(loss=Loss.FUSED, varying_lengths=True) == width()


@pytest.mark.slow
def test_the_factors_are_what_the_benchmark_finds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import bench_published

    bench_published.print_calibration()

    printed = capsys.readouterr().out
    for kind, (low, high) in SPREADS.items():
        assert f"{kind}: x {low:.3f} to x {high:.3f}" in printed
