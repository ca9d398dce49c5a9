"""Equal layers in the forward passes of a training run: which events belong to which call.

A model of L equal layers allocates at the same lines L times in a row. Within one forward pass a
stack that occurs k times at regular distances marks k calls; of several candidates (a loop inside a
layer marks more calls than the loop over layers) the one whose calls keep most for the backward
pass, above what each must keep as its input, is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from fragdoctor.model.snapshot import I32, I64, Bools

MIN_LAYERS: Final = 2
# A call is as long as the others: at least this share of the median distance between two.
MIN_LENGTH: Final = 0.5
# Share of the calls that allocate at the very same lines.
MIN_ALIKE: Final = 0.5
NO_ROW: Final = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class LayerCalls:
    """The calls of equal layers, one row each, in order.

    Attributes:
        first_row, end_row: events of the device from the first allocation of a call to behind its
            last.
        forward_end_row: where the forward pass ends that the call belongs to.
        n_layers: calls in a forward pass, the most common number.
    """

    first_row: I64
    end_row: I64
    forward_end_row: I64
    n_layers: int

    def __len__(self) -> int:
        return len(self.first_row)


@dataclass(frozen=True, slots=True)
class Requests:
    """The requests of a trace in order, one row each.

    Attributes:
        row: event of the device that made it.
        freed_row: event that freed it; ``NO_ROW`` while it is live, and where it failed.
        size_bytes: as requested.
        stack: id of its stack, -1 without one.
    """

    row: I64
    freed_row: I64
    size_bytes: I64
    stack: I32

    def __len__(self) -> int:
        return len(self.row)


def find_layers(requests: Requests, forward: Sequence[tuple[int, int]]) -> LayerCalls | None:
    """Return the calls of equal layers; None where no forward pass repeats anything.

    Args:
        requests: all allocations of a device.
        forward: rows at which each forward pass begins and ends.
    """
    first, end, forward_end = [], [], []
    counts: list[int] = []
    seen: dict[bytes, list[tuple[int, int]] | None] = {}
    for low_row, end_row in forward:
        low, high = np.searchsorted(requests.row, (low_row, end_row)).tolist()
        stack = requests.stack[low:high]
        # Steps of a steady program are equal: what was found in one holds for all.
        key = stack.tobytes()
        if key not in seen:
            is_kept = requests.freed_row[low:high] >= end_row
            seen[key] = _calls(stack, requests.size_bytes[low:high], is_kept)
        calls = seen[key]
        if calls is None:
            continue
        counts.append(len(calls))
        for begin, stop in calls:
            first.append(int(requests.row[low + begin]))
            end.append(int(requests.row[low + stop - 1]) + 1)
            forward_end.append(end_row)
    if not counts:
        return None
    return LayerCalls(
        np.array(first, np.int64),
        np.array(end, np.int64),
        np.array(forward_end, np.int64),
        int(np.bincount(counts).argmax()),
    )


def _calls(stack: I32, size: I64, is_kept: Bools) -> list[tuple[int, int]] | None:
    """Return the calls of one forward pass as ranges of its allocations."""
    best: tuple[int, list[tuple[int, int]]] | None = None
    for calls in _candidates(stack):
        saved = _saved_bytes(calls, size, is_kept)
        if saved > 0 and (best is None or saved > best[0]):
            best = saved, calls
    return None if best is None else best[1]


def _candidates(stack: I32) -> Iterator[list[tuple[int, int]]]:
    """Yield the ways to cut a pass into calls: k of them where a stack occurs k times."""
    ids, member, count = np.unique(stack, return_inverse=True, return_counts=True)
    place = np.argsort(member.reshape(-1), kind="stable")
    places = np.split(place, np.cumsum(count)[:-1])
    for k in np.unique(count[(count >= MIN_LAYERS) & (ids >= 0)]).tolist():
        # A line may allocate several times in each call.
        repeated = [np.sort(places[i]) for i in np.flatnonzero((count % k == 0) & (ids >= 0))]
        calls = _cut(repeated, k, len(stack))
        if calls is None:
            continue
        shapes = [np.sort(stack[low:high]).tobytes() for low, high in calls]
        common = max(set(shapes), key=shapes.count)
        if shapes.count(common) < MIN_ALIKE * k:
            continue
        if calls[-1][1] == len(stack) and shapes[-1] != common:
            calls.pop()  # the trace ends in the middle of it
        if len(calls) >= MIN_LAYERS:
            yield calls


def _cut(repeated: Sequence[I64], k: int, n: int) -> list[tuple[int, int]] | None:
    """Return k calls as ranges of the pass; None where the repetitions are not regular.

    Args:
        repeated: places in the pass of each stack that occurs k times or a multiple of it.
        k: number of calls.
        n: length of the pass.
    """
    opening = None
    for at in repeated:
        every = len(at) // k
        starts = at[::every]
        gaps = np.diff(starts)
        is_regular = (gaps >= MIN_LENGTH * np.median(gaps)).all()
        # All that a call makes there lies before the next call.
        is_compact = (at[every - 1 :: every][:-1] < starts[1:]).all()
        if is_regular and is_compact and (opening is None or starts[0] < opening[0]):
            opening = starts
    if opening is None:
        return None
    length = int(np.median(np.diff(opening)))
    bounds = np.append(opening, min(n, int(opening[-1]) + length))
    last = np.zeros(k, np.int64)
    for at in repeated:
        inside = np.diff(np.searchsorted(at, bounds))
        if (inside[:-1] == len(at) // k).all():
            ends = at[np.searchsorted(at, bounds[1:]) - 1]
            np.maximum(last, np.where(inside > 0, ends, 0), out=last)
    return [(int(low), int(high) + 1) for low, high in zip(opening, last, strict=True)]


def _saved_bytes(calls: list[tuple[int, int]], size: I64, is_kept: Bools) -> int:
    """Return what the pass would keep less if each call kept its input and was run again.

    At least one call is whole again while the backward pass goes through it.
    """
    inside = [size[low:high][is_kept[low:high]] for low, high in calls]
    outputs = sum(int(kept[-1]) for kept in inside if len(kept))
    whole = [int(kept.sum()) for kept in inside]
    return sum(whole) - outputs - max(whole)
