"""Who holds the memory, by call stack: at the peak and at the end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fragdoctor.analysis.result import DeviceAnalysis
from fragdoctor.report.page.text_tables import Sink
from fragdoctor.trace.lives import Lives

I64 = npt.NDArray[np.int64]

MAX_STACKS: Final = 4000
"""Stacks in one picture; what the others hold is summed up and named as such."""


@dataclass(frozen=True, slots=True)
class HeldByStack:
    """Live bytes and blocks per stack id (-1: no stack recorded), largest first."""

    stack: I64
    n_bytes: I64
    n_blocks: I64

    @property
    def total_bytes(self) -> int:
        """All live bytes."""
        return int(self.n_bytes.sum())


def held_at(lives: Lives, state: int) -> HeldByStack:
    """Return what was allocated after ``state`` events, by stack."""
    rows = lives.allocated_at(state)
    used, inverse = np.unique(lives.stack[rows], return_inverse=True)
    held = np.zeros(len(used), np.int64)
    np.add.at(held, inverse, lives.size_bytes[rows])
    count = np.bincount(inverse, minlength=len(used)).astype(np.int64)
    order = np.argsort(-held, kind="stable")
    return HeldByStack(used[order].astype(np.int64), held[order], count[order])


def icicle_data(analysis: DeviceAnalysis, sink: Sink) -> dict[str, Any] | None:
    """Return the JSON part of one device's icicles; None where nothing was ever live."""
    states = {"end": analysis.n_events}
    if analysis.timeline is not None and analysis.n_events:
        states = {"peak": analysis.timeline.peak_allocated_state, **states}
    moments: dict[str, Any] = {}
    for name, state in states.items():
        held = held_at(analysis.trace.lives, state)
        if held.total_bytes:
            moments[name] = {"state": state, **_encode(held, sink)}
    return moments or None


def _encode(held: HeldByStack, sink: Sink) -> dict[str, Any]:
    rest = slice(MAX_STACKS, None)
    return {
        "total": held.total_bytes,
        "n_blocks": int(held.n_blocks.sum()),
        "rest_bytes": int(held.n_bytes[rest].sum()),
        "rest_stacks": len(held.stack[rest]),
        "stack": sink.blob.add([sink.stacks.page_stack(int(s)) for s in held.stack[:MAX_STACKS]]),
        "bytes": sink.blob.add(held.n_bytes[:MAX_STACKS]),
        "blocks": sink.blob.add(held.n_blocks[:MAX_STACKS]),
    }
