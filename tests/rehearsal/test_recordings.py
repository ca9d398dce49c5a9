"""Steps of a model by ``estimate --model`` against what the real allocator recorded of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from rehearsal_stage import PREPARED

from fragdoctor import diagnose, load
from fragdoctor.model.rehearsal import Rehearsal
from fragdoctor.rehearsal import runner
from fragdoctor.rehearsal.process import RehearsalConditions, rehearsed_gpu
from fragdoctor.rehearsal.step_script import own_model, step_options, step_program

pytestmark = pytest.mark.slow

# Casts that autocast has cached are freed in the order of a hash table of pointers, which differs
# from process to process; what is reused next, and with it the rounding of blocks, follows it.
TOLERANCE = 0.005
RESERVED_TOLERANCE = 0.01
FACTORY = """
import sys

sys.path.insert(0, {samples!r})

from scenarios import GPT, get_batch, train_step


def build():
    return {{
        "model": GPT(**{options}),
        "inputs": get_batch({batch}, {length}),
        "train_step": train_step,
    }}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rehearsed_gpt(root: Path, folder: Path, batch: int, length: int, **options: Any) -> Rehearsal:
    samples = str(root / "sample_snapshots")
    text = FACTORY.format(samples=samples, options=options, batch=batch, length=length)
    (folder / "gpt_project.py").write_text(text, encoding="utf-8")
    program = step_program(
        "GPT",
        own_model("gpt_project:build"),
        step_options("", "adamw"),
        [sys.executable],
        folder,
        has_batch=False,
    )
    conditions = RehearsalConditions(gpu=rehearsed_gpu(None, None, is_unlimited=True))
    snapshot = folder / "snapshot.pickle"
    return runner.rehearse(program, conditions, snapshot, runs=PREPARED)  # type: ignore[arg-type]


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
    folder: Path,
    name: str,
    batch: int,
    length: int,
    options: dict[str, Any],
) -> None:
    stats = json.loads((shared / "snapshots" / name / "stats.json").read_text(encoding="utf-8"))
    recorded = stats[0] if isinstance(stats, list) else stats

    found = rehearsed_gpt(root, folder, batch, length, **options)

    peak, reserved = (recorded[f"{kind}_bytes.all.peak"] for kind in ("allocated", "reserved"))
    assert found.peak_allocated_bytes == pytest.approx(peak, rel=TOLERANCE)
    assert found.peak_reserved_bytes == pytest.approx(reserved, rel=RESERVED_TOLERANCE)


def test_peak_agrees_with_the_sample(root: Path, samples: Path, folder: Path) -> None:
    recorded = diagnose(load(samples / "healthy_training.pickle.gz")).devices[0]

    found = rehearsed_gpt(root, folder, 8, 512)

    recorded_peak = recorded.peak_allocated_bytes
    assert found.peak_allocated_bytes == pytest.approx(recorded_peak, rel=TOLERANCE)
    assert found.peak_reserved_bytes == recorded.peak_reserved_bytes
