"""Traced peaks against what the real allocator recorded for the same programs."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("torch")

from fragdoctor import diagnose, load
from fragdoctor.rehearsal.tracing.traced import Traced, trace_factory
from fragdoctor.rehearsal.tracing.training_setup import TrainingSetup

pytestmark = pytest.mark.slow

EXACT = 1024  # recordings count the loss and a reduction's flags of the step before


@pytest.fixture(scope="module")
def scenarios(root: Path) -> ModuleType:
    """Return the programs of the recordings, which stand beside the samples."""
    spec = importlib.util.spec_from_file_location(
        "scenarios", root / "sample_snapshots" / "scenarios.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["scenarios"] = module
    spec.loader.exec_module(module)
    return module


def traced_gpt(scenarios: ModuleType, batch: int, length: int, **options: Any) -> Traced:
    def factory() -> dict[str, Any]:
        return {
            "model": scenarios.GPT(**options),
            "inputs": scenarios.get_batch(batch, length),
            "train_step": scenarios.train_step,
        }

    return trace_factory(factory, TrainingSetup())


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
def test_traced_peaks_agree_with_the_recording(
    shared: Path,
    scenarios: ModuleType,
    name: str,
    batch: int,
    length: int,
    options: dict[str, Any],
) -> None:
    """The issue asks for 10 %; the trace is as good as exact, and is held to that."""
    stats = json.loads((shared / "snapshots" / name / "stats.json").read_text(encoding="utf-8"))
    recorded = stats[0] if isinstance(stats, list) else stats

    footprint = traced_gpt(scenarios, batch, length, **options).footprint

    peak, reserved = (recorded[f"{kind}_bytes.all.peak"] for kind in ("allocated", "reserved"))
    assert abs(footprint.peak_allocated_bytes - peak) <= EXACT
    assert footprint.reserved_bytes == pytest.approx(reserved, rel=0.002)


def test_traced_peak_agrees_with_the_sample(samples: Path, scenarios: ModuleType) -> None:
    recorded = diagnose(load(samples / "healthy_training.pickle.gz")).devices[0]

    footprint = traced_gpt(scenarios, 8, 512).footprint

    assert abs(footprint.peak_allocated_bytes - recorded.peak_allocated_bytes) <= EXACT
    assert footprint.reserved_bytes == recorded.peak_reserved_bytes
