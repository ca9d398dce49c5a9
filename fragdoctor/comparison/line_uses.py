"""What every source line of one run asked for and holds, as sums over its blocks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Final

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from fragdoctor.model.arrays import sum_by
from fragdoctor.model.finding import Location
from fragdoctor.model.snapshot import I64, Snapshot
from fragdoctor.trace.trace import Trace

MAX_LINES: Final = 2000
"""The most lines to treat one by one; the smaller ones are summed up."""

MAX_SIZES: Final = 64
MAX_STACKS: Final = 32
MAX_DEPTH: Final = 4096


class LineUse(Struct, frozen=True):
    """Everything that one source line asked for.

    Attributes:
        place: the line; None for blocks without a stack, and for the sum of the smallest lines.
        peak_bytes, n_peak, now_bytes, n_now: live blocks at the two moments.
        n_requests: total number of blocks.
        sizes: (requested size, number of requests), those with most bytes first.
        n_sizes: total number of distinct sizes.
        callees: functions between the line and the allocation: what the line calls.
    """

    place: Location | None
    peak_bytes: int
    n_peak: int
    now_bytes: int
    n_now: int
    n_requests: int
    sizes: tuple[tuple[int, int], ...] = ()
    n_sizes: int = 0
    callees: frozenset[str] = frozenset()

    def bytes_at(self, *, peak: bool) -> int:
        """Return the live bytes at the peak, or now."""
        return self.peak_bytes if peak else self.now_bytes

    def blocks_at(self, *, peak: bool) -> int:
        """Return the live blocks at the peak, or now."""
        return self.n_peak if peak else self.n_now


def line_uses(trace: Trace, peak: int | None) -> tuple[tuple[LineUse, ...], int]:
    """Return the memory of every source line, largest first, and how many were merged into one."""
    snapshot, lives = trace.snapshot, trace.lives
    frame = trace.stacks.lines_of(lives.stack).astype(np.int64)
    groups, member = np.unique(frame, return_inverse=True)
    member = member.reshape(-1)
    n = len(groups)
    now = np.flatnonzero(lives.survives)
    at_peak = now if peak is None else lives.allocated_at(peak)
    columns = np.stack(
        [
            sum_by(member[at_peak], lives.size_bytes[at_peak], n),
            np.bincount(member[at_peak], minlength=n),
            sum_by(member[now], lives.size_bytes[now], n),
            np.bincount(member[now], minlength=n),
            np.bincount(member, minlength=n),
        ],
        axis=1,
    )
    asked = sum_by(member, lives.requested_bytes, n)
    order = np.lexsort((-asked, -np.maximum(columns[:, 0], columns[:, 2])))
    sizes = _sizes(member, lives.requested_bytes, n)
    stacks_of: dict[int, list[int]] = defaultdict(list)
    stacks, first = np.unique(lives.stack, return_index=True)
    for stack, group in zip(stacks.tolist(), member[first].tolist(), strict=True):
        if stack >= 0:
            stacks_of[group].append(stack)
    kept = [
        replace(
            LineUse(snapshot.location(int(groups[g])), *columns[g].tolist()),
            sizes=sizes[g][0],
            n_sizes=sizes[g][1],
            callees=_callees(snapshot, stacks_of[g], int(groups[g])),
        )
        for g in order[:MAX_LINES].tolist()
    ]
    rest = order[MAX_LINES:]
    if len(rest):
        kept.append(LineUse(None, *columns[rest].sum(axis=0).tolist()))
    return tuple(kept), len(rest)


def merged(lines: Sequence[LineUse]) -> LineUse:
    """Return all lines as one without a place: all that remains if a run has no stacks."""
    sizes: Counter[int] = Counter()
    for use in lines:
        sizes.update(dict(use.sizes))
    ranked = sorted(sizes.items(), key=lambda sn: -sn[0] * sn[1])
    sums = ("peak_bytes", "n_peak", "now_bytes", "n_now", "n_requests")
    whole = LineUse(None, *(sum(getattr(use, name) for use in lines) for name in sums))
    return replace(whole, sizes=tuple(ranked[:MAX_SIZES]) or ((0, 0),), n_sizes=len(ranked))


def _sizes(member: I64, requested: I64, n: int) -> list[tuple[tuple[tuple[int, int], ...], int]]:
    """Return for each group its sizes with their counts, and how many sizes there are."""
    values, rank = np.unique(requested, return_inverse=True)
    width = max(1, len(values))
    keys, count = np.unique(member * width + rank.reshape(-1), return_counts=True)
    group, size = keys // width, values[keys % width] if len(values) else keys
    order = np.lexsort((-size * count, group))
    group, size, count = group[order], size[order], count[order]
    start = np.searchsorted(group, np.arange(n + 1))
    result = []
    for g in range(n):
        low, high = int(start[g]), int(start[g + 1])
        top = slice(low, min(high, low + MAX_SIZES))
        pairs = zip(size[top].tolist(), count[top].tolist(), strict=True)
        result.append((tuple(pairs), high - low))
    return result


def _callees(snapshot: Snapshot, stacks: Sequence[int], frame: int) -> frozenset[str]:
    """Return the names of the functions between a line and its allocations."""
    found: set[str] = set()
    table = snapshot.stacks
    for stack in stacks[:MAX_STACKS]:
        low, high = int(table.offsets[stack]), int(table.offsets[stack + 1])
        ids = table.frames[low : min(high, low + MAX_DEPTH)].tolist()  # a stack may be endless
        inner = ids[: ids.index(frame)] if frame in ids else []
        found |= {snapshot.strings[int(snapshot.frames.name[i])][:200] for i in inner[:64]}
    return frozenset(found)
