"""The recordings beside the project, read and analysed once per test session."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from fragdoctor.analysis.device import analyze_device
from fragdoctor.analysis.result import DeviceAnalysis
from fragdoctor.inputs.snapshot_reader import read_snapshot
from fragdoctor.model.snapshot import Snapshot


@functools.cache
def recording(folder: Path) -> tuple[Snapshot, tuple[DeviceAnalysis, ...]]:
    """Return the columns of one recording and the analysis of its devices."""
    snapshot = read_snapshot(folder / "snapshot.pickle")
    return snapshot, tuple(analyze_device(snapshot, d) for d in snapshot.devices)


def recordings(shared: Path) -> list[Path]:
    """Return the folders of all recordings."""
    return sorted(p for p in (shared / "snapshots").iterdir() if p.is_dir())


def stats_of(folder: Path, device: int) -> dict[str, Any]:
    """Return ``torch.cuda.memory_stats()`` of one device at the time of the recording."""
    stats = json.loads((folder / "stats.json").read_text())
    return stats[device] if isinstance(stats, list) else stats
