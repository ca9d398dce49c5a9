"""Training by the scenarios, rehearsed, against what the real allocator recorded of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rehearsal_stage import Stage

from fragdoctor import diagnose, load

pytestmark = pytest.mark.slow

# Casts that autocast has cached are freed in the order of a hash table of pointers, which differs
# from process to process; what is reused next, and with it the rounding of blocks, follows it.
TOLERANCE = 0.005
RESERVED_TOLERANCE = 0.01


def rehearsed_gpt(root: Path, stage: Stage, batch: int, length: int, **options: Any) -> Any:
    """Return a rehearsal's figures of four steps, as the scenarios train."""
    found = stage.must_pass(
        f"""
        import sys

        sys.path.insert(0, {str(root / "sample_snapshots")!r})
        from scenarios import train

        train(4, {batch}, lambda step: {length}, **{options})
        """,
        "--unlimited",
    )
    return found["rehearsal"]


@pytest.mark.shared
@pytest.mark.parametrize(
    ("name", "batch", "length", "options"),
    [
        ("healthy_gpt", 8, 512, {}),
        ("checkpoint_off", 8, 1024, {"layers": 12}),
        ("checkpoint_on", 8, 1024, {"layers": 12, "ckpt": True}),
        ("optimizer_spike", 1, 64, {"dim": 1024, "layers": 8, "heads": 16}),
    ],
)
def test_peaks_agree_with_the_recording(
    root: Path,
    shared: Path,
    stage: Stage,
    name: str,
    batch: int,
    length: int,
    options: dict[str, Any],
) -> None:
    stats = json.loads((shared / "snapshots" / name / "stats.json").read_text(encoding="utf-8"))
    recorded = stats[0] if isinstance(stats, list) else stats

    found = rehearsed_gpt(root, stage, batch, length, **options)

    peak, reserved = (recorded[f"{kind}_bytes.all.peak"] for kind in ("allocated", "reserved"))
    assert found["peak_allocated_bytes"] == pytest.approx(peak, rel=TOLERANCE)
    assert found["peak_reserved_bytes"] == pytest.approx(reserved, rel=RESERVED_TOLERANCE)


def test_peak_agrees_with_the_sample(root: Path, samples: Path, stage: Stage) -> None:
    recorded = diagnose(load(samples / "healthy_training.pickle.gz")).devices[0]

    found = rehearsed_gpt(root, stage, 8, 512)

    recorded_peak = recorded.peak_allocated_bytes
    assert found["peak_allocated_bytes"] == pytest.approx(recorded_peak, rel=TOLERANCE)
    assert found["peak_reserved_bytes"] == recorded.peak_reserved_bytes
