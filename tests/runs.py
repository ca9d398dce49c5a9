"""Snapshots of small programs, for comparisons: each request has a line, a size, and a lifetime.

Every request gets its own segment, as in the allocator for multiples of 2 MiB from 10 MiB on if the
cache is empty; so the snapshots are consistent and can be replayed exactly.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from builders import BASE, MIB, alloc, block, columns, frame, free, segment, segment_alloc, snapshot
from msgspec import Struct

from fragdoctor.model.case import Case, Overrides
from fragdoctor.model.snapshot import Snapshot


class Ask(Struct, frozen=True):
    """One request: ``file:line`` in a function, its size, and whether it is kept to the end."""

    line: int
    mib: int
    function: str = "step"
    file: str = "/home/a/proj/train.py"
    calls: tuple[str, ...] = ()
    kept: bool = True
    has_stack: bool = True

    @property
    def frames(self) -> list[dict[str, Any]]:
        if not self.has_stack:
            return []
        library = "/opt/venv/lib/python3/site-packages/torch/nn/functional.py"
        inner = [frame(library, 7, name) for name in self.calls]
        return [*inner, frame(self.file, self.line, self.function), frame(self.file, 99, "main")]


def recorded(*asks: Ask, conf: dict[str, Any] | None = None, device: int = 0) -> dict[str, Any]:
    """Return the snapshot of a program that makes these requests in order."""
    events: list[dict[str, Any]] = []
    segments = []
    at = BASE
    for ask in asks:
        size, frames = ask.mib * MIB, ask.frames
        events += [segment_alloc(at, size, frames=frames), alloc(at, size, frames=frames)]
        state = "active_allocated" if ask.kept else "inactive"
        kept_frames = frames if ask.kept else None
        segments.append(
            segment(at, block(size, state, frames=kept_frames), device=device, frames=frames)
        )
        at += size
    at = BASE
    for ask in asks:
        if not ask.kept:
            events += free(at, ask.mib * MIB)
        at += ask.mib * MIB
    return snapshot(*segments, traces=[*([[]] * device), events], conf=conf)


def columns_of(*asks: Ask, **more: Any) -> Snapshot:
    return columns(recorded(*asks, **more))


def case(*asks: Ask, device: int | None = None, **more: Any) -> Case:
    return Case(snapshot=columns_of(*asks, **more), overrides=Overrides(device=device))


def written(path: Path, *asks: Ask, **more: Any) -> str:
    path.write_bytes(pickle.dumps(recorded(*asks, **more)))
    return str(path)
