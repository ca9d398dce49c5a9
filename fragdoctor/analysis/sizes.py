"""How varied the request sizes are, and whether they drift from step to step."""

from __future__ import annotations

from typing import Final

import numpy as np

from fragdoctor.analysis.result import SizeDiversity
from fragdoctor.model.hooks import report_progress
from fragdoctor.model.snapshot import I64, Action
from fragdoctor.trace.trace import SMALL_REQUEST_BYTES, Trace

# Share of later large requests with a size that their stack had never asked for before. Programs
# with constant shapes show 0, those with variable ones nearly 1.
DRIFT_SHARE: Final = 0.2
MIN_LATER_REQUESTS: Final = 4
MIN_EARLIER_REQUESTS: Final = 2
# Large blocks freed per large request; a program that only builds up frees none.
MIN_FREED_SHARE: Final = 0.1


def size_diversity(trace: Trace) -> SizeDiversity | None:
    """Return the diversity of request sizes, None without any alloc event.

    ``drifting``: of the large requests in the second half of the trace, from stacks that had made
    at least two in the first half, a fifth or more have a size that is new for their stack. Where
    hardly anything is freed no old block waits for a fitting request: that drifts nowhere.
    """
    report_progress("Analysing: the sizes of requests")
    rows = np.flatnonzero(trace.events.action == Action.ALLOC)
    if not len(rows):
        return None
    size = trace.events.size_bytes[rows]
    large = np.flatnonzero(size > SMALL_REQUEST_BYTES)
    return SizeDiversity(
        n_allocs=len(rows),
        n_distinct=len(np.unique(size)),
        n_large_allocs=len(large),
        n_distinct_large=len(np.unique(size[large])),
        drifting=_frees_enough(trace, len(large)) and _is_drifting(trace, rows[large]),
    )


def _frees_enough(trace: Trace, n_large_allocs: int) -> bool:
    action = trace.events.action
    is_free = (action == Action.FREE_REQUESTED) | (action == Action.FREE_COMPLETED)
    freed = is_free & (trace.events.size_bytes > SMALL_REQUEST_BYTES)
    return bool(np.count_nonzero(freed) >= MIN_FREED_SHARE * n_large_allocs)


def _is_drifting(trace: Trace, rows: I64) -> bool:
    if len(rows) < MIN_LATER_REQUESTS:
        return False
    stack = trace.events.stack[rows].astype(np.int64) + 1
    size = trace.events.size_bytes[rows]
    half = len(rows) // 2
    known = np.bincount(stack[:half], minlength=int(stack.max()) + 1) >= MIN_EARLIER_REQUESTS
    later = np.flatnonzero(known[stack[half:]]) + half
    if len(later) < MIN_LATER_REQUESTS:
        return False
    _, kind = np.unique(size, return_inverse=True)
    key = stack * (int(kind.max()) + 1) + kind.reshape(-1)
    is_new = ~np.isin(key[later], key[:half])
    return bool(np.count_nonzero(is_new) >= max(MIN_LATER_REQUESTS, DRIFT_SHARE * len(later)))
