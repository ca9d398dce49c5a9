"""What each source line of the user's program holds."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from fragdoctor.analysis.result import Holder
from fragdoctor.model.snapshot import I32, I64, MODULE_MARK
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
    life = layout.live_row[now]
    is_peak = np.zeros(len(now), np.bool_)
    if peak is not None:
        rows = lives.allocated_at(peak)
        stack = np.concatenate([stack, lives.stack[rows]])
        size = np.concatenate([size, lives.size_bytes[rows]])
        life = np.concatenate([life, rows])
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
    modules = _main_modules(trace, member, life, size)
    order = np.argsort(-np.maximum(table[0], table[1]), kind="stable")[:MAX_HOLDERS]
    return tuple(
        Holder(
            frame=int(groups[g]),
            stack=int(main[g]),
            now_bytes=int(table[0, g]),
            n_now=int(counts[0, g]),
            peak_bytes=None if peak is None else int(table[1, g]),
            n_peak=None if peak is None else int(counts[1, g]),
            module=modules.get(int(g), ""),
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


def _main_modules(
    trace: Trace, group: I64, life: npt.NDArray[np.signedinteger], size: I64
) -> Mapping[int, str]:
    """Return for each group the path of the module with the most bytes, where it is recorded.

    The k-th of equal layers counts as one with the others: ``layers.*.mlp``.
    """
    strings = trace.snapshot.strings
    paths = {
        i: s.removeprefix(MODULE_MARK) for i, s in enumerate(strings) if s.startswith(MODULE_MARK)
    }
    if not paths:
        return {}
    events = trace.snapshot.events
    metadata = events.user_metadata[events.device_slice(trace.device)]
    start = np.where(life >= 0, trace.lives.start[life], -1)
    known = np.flatnonzero((start >= 0) & (start < len(metadata)))
    text = metadata[start[known]]
    held: dict[int, Counter[str]] = {}
    exact: dict[tuple[int, str], set[str]] = {}
    pairs, member = np.unique(np.stack([group[known], text]), axis=1, return_inverse=True)
    totals = np.bincount(member.reshape(-1), size[known], pairs.shape[1])
    for (g, note), n_bytes in zip(pairs.T.tolist(), totals.tolist(), strict=True):
        path = paths.get(note, "")
        shape = re.sub(r"(?<![^.])\d+(?![^.])", "*", path)
        held.setdefault(g, Counter())[shape] += int(n_bytes)
        exact.setdefault((g, shape), set()).add(path)
    found = {g: counter.most_common(1)[0][0] for g, counter in held.items()}
    return {g: s if len(exact[g, s]) > 1 else next(iter(exact[g, s])) for g, s in found.items()}
