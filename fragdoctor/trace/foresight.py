"""How far what was recorded tells of the steps to come: growth, and what repeating them misses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from fragdoctor.trace.continuation import Continuation
from fragdoctor.trace.trace import Trace

BELIEVED: Final = 2
"""Steps that growth is believed to go on, as a multiple of those over which it was recorded."""

STEADILY_BELIEVED: Final = 10
"""The same where every part of the recording has kept something, or steps ask for the same."""

STEADY_PARTS: Final = 6
MIN_STEADY: Final = 3
"""Parts of the recorded steps that must all have kept something for that; steps are parts where
there are fewer, but so many at least."""

TOLERANCE: Final = 0.04
"""Share of the peak by which a repeated step may differ from the recorded one."""

KEPT_SHARE: Final = 0.004
"""Share of the peak by which what a step keeps may differ from what it kept as recorded."""


def believed_steps(trace: Trace, known: Continuation) -> int:
    """Return the number of steps that growth is believed to go on."""
    rises = np.diff(trace.totals.at(known.rows[1:])[:, 0].astype(np.int64))
    parts = np.array_split(rises, np.clip(len(rises), MIN_STEADY, STEADY_PARTS))
    is_steady = all(part.sum() > 0 for part in parts)
    is_even = not (known.varies or known.grows or known.rises)
    return (STEADILY_BELIEVED if is_steady or is_even else BELIEVED) * known.n_complete


def growth_of(known: Continuation, allocated: Any) -> int:
    """Return by how many bytes allocated memory rises per step, in both halves of what was played.

    What wavers from cycle to cycle rises in one half and falls in the other.
    """
    after = np.asarray(allocated).astype(np.int64)
    n_cycles = (len(after) - 1) // known.period
    if n_cycles < 1:
        return 0
    half = max(n_cycles // 2, 1)
    each = max(known.period_steps * half, 1)
    at = len(after) - 1 - known.period * half * np.arange(min(n_cycles // half, 2) + 1)
    rises = -np.diff(after[at])
    return int(rises.min()) // each if (rises > 0).all() else 0


def mismatch_of(trace: Trace, known: Continuation, look: Mapping[str, Any]) -> float:
    """Return by what share of the peak repeated steps miss what was recorded of them.

    Args:
        trace: of the device.
        known: what comes after it.
        look: what the native core said of the steps, played again without growth.
    """
    after = np.asarray(look["allocated"]).astype(np.int64)
    peak = np.asarray(look["peak_allocated"]).astype(np.int64)
    began = trace.totals.at(known.rows)[:, 0].astype(np.int64)
    highest = trace.totals.envelope("allocated_bytes", np.append(0, known.rows + 1)).high[1:]
    scale = max(int(highest.max(initial=0)), 1)
    rise, n = highest.astype(np.int64) - began, known.n_complete
    order = np.array(known.order[: len(after) - 1], np.int64)
    is_known = np.flatnonzero(order < n)
    off = np.abs((peak[1:] - after[:-1])[: len(order)] - rise[order])[is_known]
    missed = float(off.max(initial=0)) / scale
    missed = missed if missed > TOLERANCE else 0.0
    period = known.period
    if len(after) <= period or n <= period + 1 or known.grows:
        return missed
    expected = int(began[n] - began[n - period]) / period
    found = int(after[period] - after[0]) / period
    drift = abs(found - expected)
    if drift <= max(TOLERANCE * abs(expected) * 5, KEPT_SHARE * scale):
        return missed
    return 1.0
