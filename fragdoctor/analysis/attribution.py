"""What each source line of the user's program holds."""

from __future__ import annotations

from typing import Final

import numpy as np

from fragdoctor.analysis.result import Holder
from fragdoctor.model.snapshot import I32, I64
from fragdoctor.trace.trace import Trace

MAX_HOLDERS: Final = 100


def find_holders(trace: Trace, peak: int | None) -> tuple[Holder, ...]:
    """Return live memory by user line now and at the peak, largest of both first.

    Args:
        trace: of the device.
        peak: the state (number of events) of highest allocated bytes, None without a trace.
    """
    layout, lives = trace.layout, trace.lives
    now = np.flatnonzero(~layout.live_is_pending)
    stack, size = layout.live_stack[now], layout.live_bytes[now]
    is_peak = np.zeros(len(now), np.bool_)
    if peak is not None:
        rows = lives.allocated_at(peak)
        stack = np.concatenate([stack, lives.stack[rows]])
        size = np.concatenate([size, lives.size_bytes[rows]])
        is_peak = np.concatenate([is_peak, np.ones(len(rows), np.bool_)])
    if not len(stack):
        return ()
    line = trace.stacks.lines_of(stack)
    groups, member = np.unique(line, return_inverse=True)
    member = member.reshape(-1)
    n = len(groups)
    table = np.zeros((2, n), np.int64)
    np.add.at(table, (is_peak.astype(np.int64), member), size)
    counts = np.zeros((2, n), np.int64)
    np.add.at(counts, (is_peak.astype(np.int64), member), 1)
    main = _main_stacks(member, stack, size, n)
    order = np.argsort(-np.maximum(table[0], table[1]), kind="stable")[:MAX_HOLDERS]
    return tuple(
        Holder(
            frame=int(groups[g]),
            stack=int(main[g]),
            now_bytes=int(table[0, g]),
            n_now=int(counts[0, g]),
            peak_bytes=None if peak is None else int(table[1, g]),
            n_peak=None if peak is None else int(counts[1, g]),
        )
        for g in order
    )


def _main_stacks(group: I64, stack: I32, size: I64, n_groups: int) -> I64:
    """Return for each group the stack with the most bytes."""
    width = int(stack.max(initial=0)) + 2
    keys, member = np.unique(group * width + stack + 1, return_inverse=True)
    total = np.zeros(len(keys), np.int64)
    np.add.at(total, member.reshape(-1), size)
    order = np.argsort(total, kind="stable")  # the largest is written last
    result = np.full(n_groups, -1, np.int64)
    result[keys[order] // width] = keys[order] % width - 1
    return result
