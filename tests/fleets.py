"""Ranks of a job, as small snapshots on disk, and as summaries without files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from builders import BASE, MIB, alloc, block, frame, oom, pickled, segment, segment_alloc, snapshot
from builders import settings as recorded
from msgspec.structs import replace

from fragdoctor.model.diagnosis import Cause, DeviceFigures
from fragdoctor.model.fleet import RankSource, RankSummary, SourceLine

WALL_US = 1_795_270_000_000_000
USUAL = {10: 64, 20: 32, 30: 16}  # line of train.py -> MiB that it holds


def rank_snapshot(
    held: Mapping[int, int] = USUAL,
    *,
    conf: Mapping[str, Any] | None = None,
    refused_mib: int = 0,
    failed_after_us: int = 100,
    filename: str = "train.py",
) -> dict[str, Any]:
    """Return a snapshot in which lines of ``filename`` hold one block each, of this many MiB."""
    segments, events = [], []
    for i, (line, mib) in enumerate(held.items()):
        address, stack = BASE + i * 4096 * MIB, [frame(filename, line, f"f{line}")]
        segments.append(segment(address, block(mib * MIB, "active_allocated", frames=stack)))
        time = WALL_US + i
        events.append(segment_alloc(address, mib * MIB, frames=stack, time_us=time))
        events.append(alloc(address, mib * MIB, frames=stack, time_us=time))
    if refused_mib:
        stack = [frame(filename, 99, "f99")]
        time = WALL_US + failed_after_us
        events.append(oom(refused_mib * MIB, MIB, frames=stack, time_us=time))
    return snapshot(*segments, events=events, conf=recorded(**(conf or {})))


def write_rank(path: Path, **changes: Any) -> Path:
    """Write the snapshot of one rank; ``changes`` are arguments of ``rank_snapshot``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickled(rank_snapshot(**changes)))
    return path


def write_job(folder: Path, n: int, odd: Mapping[int, Mapping[str, Any]] | None = None) -> Path:
    """Write ``rank0.pickle`` etc. of one job; ``odd`` holds the changes for some ranks."""
    for i in range(n):
        write_rank(folder / f"rank{i}.pickle", **(odd or {}).get(i, {}))
    return folder


def summary(number: int, held: Mapping[int, int] = USUAL, **changes: Any) -> RankSummary:
    """Return the summary of a healthy rank; ``changes`` replace its fields."""
    lines = [SourceLine("train.py", n, f"f{n}", mib * MIB, 1) for n, mib in held.items()]
    lines.sort(key=lambda h: (-h.n_bytes, h.key))
    peak = sum(held.values()) * MIB
    made = RankSummary(
        path=f"rank{number}.pickle",
        rank=number,
        rank_source=RankSource.NAME,
        cause=Cause.HEALTHY,
        confidence="likely",
        summary="Nothing is wrong.",
        figures=DeviceFigures(
            device=0, peak_allocated_bytes=peak, stranded_free_bytes=0, alloc_retries=0, ooms=0
        ),
        holders=tuple(lines),
        settings_known=True,
    )
    return replace(made, **changes)


def unread(rank: int, error: str = "The snapshot ends in the middle.") -> RankSummary:
    """Return the summary of a rank that could not be read."""
    return RankSummary(
        path=f"rank{rank}.pickle",
        rank=rank,
        is_read=False,
        error=error,
        error_code="truncated_snapshot",
        exit_code=2,
    )
