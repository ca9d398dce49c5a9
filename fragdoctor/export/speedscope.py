"""Allocations by stack as a speedscope file (www.speedscope.app): who holds the memory.

For each device, the file has what is live at the peak, what is live at the end, and everything that
was allocated. Format: https://www.speedscope.app/file-format-schema.json
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from fragdoctor.model.arrays import largest_groups
from fragdoctor.model.finding import MAX_LINE
from fragdoctor.model.snapshot import Snapshot
from fragdoctor.report import escape
from fragdoctor.trace.trace import Trace

SCHEMA: Final = "https://www.speedscope.app/file-format-schema.json"
_MAX_TEXT: Final = 1000

Json = dict[str, Any]


def speedscope_text(snapshot: Snapshot, device: int | None = None) -> str:
    """Return the document; allocations without a recorded stack share one frame."""
    devices = [d for d in snapshot.devices if device is None or d == device]
    unknown = len(snapshot.frames)
    profiles = [p for d in devices for p in _profiles(snapshot, d, unknown)]
    document = {
        "$schema": SCHEMA,
        "exporter": "fragdoctor",
        "name": "GPU memory",
        "activeProfileIndex": 0,
        "shared": {"frames": [*_frames(snapshot), {"name": "(no stack recorded)"}]},
        "profiles": profiles or [_profile("empty", [], [])],
    }
    return json.dumps(document, ensure_ascii=True, allow_nan=False) + "\n"


def _frames(snapshot: Snapshot) -> list[Json]:
    frames = []
    for i in range(len(snapshot.frames)):
        frame = snapshot.frame(i)
        document: Json = {"name": _cut(frame.function) or "(unnamed)", "file": _cut(frame.filename)}
        if 0 < frame.line < MAX_LINE:
            document["line"] = frame.line
        frames.append(document)
    return frames


def _profiles(snapshot: Snapshot, device: int, unknown: int) -> Iterator[Json]:
    trace = Trace.of(snapshot, device)
    lives = trace.lives
    chosen = (
        ("live at the peak", lives.allocated_at(trace.totals.peak_allocated_state)),
        ("live at the end", lives.allocated_at(trace.n_events)),
        ("all allocations", np.arange(len(lives))),
    )
    for title, rows in chosen:
        used, n_bytes, _ = largest_groups(lives.stack[rows], lives.size_bytes[rows])
        samples = [_outermost_first(snapshot, stack, unknown) for stack in used.tolist()]
        yield _profile(f"GPU {device}: {title}", samples, n_bytes.tolist())


def _outermost_first(snapshot: Snapshot, stack: int, unknown: int) -> list[int]:
    if stack < 0:
        return [unknown]
    offsets = snapshot.stacks.offsets
    frames = snapshot.stacks.frames[int(offsets[stack]) : int(offsets[stack + 1])]
    return [int(i) for i in frames[::-1]] or [unknown]


def _profile(name: str, samples: list[list[int]], weights: list[int]) -> Json:
    return {
        "type": "sampled",
        "name": name,
        "unit": "bytes",
        "startValue": 0,
        "endValue": sum(weights),
        "samples": samples,
        "weights": weights,
    }


def _cut(text: str) -> str:
    return escape.visible(text[:_MAX_TEXT])
