"""Survivors that grow step by step: what a leak looks like in a trace.

With the steps of the program known (``steps.py``), a source line grows if blocks that it allocated
in many different steps are still allocated at the end, and its live memory kept rising until the
end. Not called growth:

- what one step leaves behind: parameters, optimizer state, workspaces, the activations of the step
  in which the program stopped;
- a window or a cache that is full: its live memory was as high when the oldest survivor was made;
- what is replaced by something larger, as a KV cache grown by ``torch.cat``: its survivors are all
  of the last step;
- what stops growing well before the end;
- a loop that does nothing but keep (a benchmark, the building of a model): a step of a running
  program also frees something.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from fragdoctor.analysis.attribution import frames_of
from fragdoctor.analysis.lifetimes import ALIVE, BEFORE, Lifetimes
from fragdoctor.analysis.result import Growth, Timeline
from fragdoctor.analysis.steps import MIN_STEPS, Steps
from fragdoctor.model.snapshot import I32, I64, Bools
from fragdoctor.units import KIB

MIN_BIRTH_STEPS: Final = 3
MIN_SURVIVOR_BYTES: Final = 64 * KIB
# Share of the survivors' bytes by which the line's live memory must have risen meanwhile.
MIN_RISE: Final = 0.5
# Share of survivors' bytes that the later half of the growing phase must have added.
MIN_LATE_SHARE: Final = 0.2
MIN_STACKS_PER_STEP: Final = 3
MAX_GROWTHS: Final = 100
MAX_CANDIDATES: Final = 2000


@dataclass(frozen=True, slots=True)
class GrowthResult:
    """Growing lines, most bytes first, and the floor of allocated bytes over the steps.

    ``floor_slope_bytes`` is the rise per step of the lowest allocated bytes within each step
    (0 with fewer than ``MIN_STEPS``).
    """

    lines: tuple[Growth, ...]
    n_steps: int
    floor_slope_bytes: int


@dataclass(frozen=True, slots=True)
class _Cells:
    """Sums per (group, step), sorted; step counts the complete steps from 0."""

    group: I64
    step: I64
    survivor_bytes: I64
    net_bytes: I64


def find_growth(
    lifetimes: Lifetimes, timeline: Timeline, steps: Steps, lines: I32, first_row: int
) -> GrowthResult:
    """Return the source lines whose survivors grow step by step.

    Args:
        lifetimes: all blocks of the device.
        timeline: state after each event.
        steps: rows at which steps begin.
        lines: user frame of each stack (``attribution.user_frames``).
        first_row: row of the device's first event in the snapshot.
    """
    n_complete = len(steps) - 1
    if len(steps) < MIN_STEPS:
        return GrowthResult((), len(steps), 0)
    slope = _floor_slope(timeline, steps)
    group_of, frames = _groups(lifetimes, lines, steps.method)
    cells = _cells(lifetimes, steps.rows, group_of)
    busy = _is_busy(lifetimes, steps.rows)
    results = []
    for low, high in _candidates(cells):
        found = _judge(cells, low, high, n_complete, busy)
        if found is not None:
            group, since, n_births = found
            growth = _describe(
                lifetimes, steps.rows, group_of == group, int(frames[group]), since, n_births
            )
            results.append(
                replace(
                    growth,
                    first_event=growth.first_event + first_row,
                    last_event=growth.last_event + first_row,
                )
            )
    results.sort(key=lambda g: -g.survivor_bytes)
    return GrowthResult(tuple(results[:MAX_GROWTHS]), len(steps), slope)


def _groups(lifetimes: Lifetimes, lines: I32, method: str) -> tuple[I64, I64]:
    """Return the group of each block and the frame of each group: by line, or by size without."""
    if method == "stacks":
        frames, group = np.unique(frames_of(lifetimes.stack, lines), return_inverse=True)
        return group.reshape(-1), frames.astype(np.int64)
    sizes, group = np.unique(lifetimes.requested, return_inverse=True)
    return group.reshape(-1), np.full(len(sizes), -1)


def _step_of(rows: I64, steps: I64) -> I64:
    """Return the step that each row lies in, -1 before the first."""
    return np.searchsorted(steps, rows, side="right") - 1


def _cells(lifetimes: Lifetimes, steps: I64, group: I64) -> _Cells:
    """Return survivors' bytes and net change of live bytes by group and complete step."""
    n_complete = len(steps) - 1
    born = lifetimes.start != BEFORE
    freed = (lifetimes.free != ALIVE) & (lifetimes.free != BEFORE)
    survives = born & (lifetimes.free == ALIVE)
    join = np.concatenate
    cell_group = join([group[born], group[freed]])
    step = join([_step_of(lifetimes.start[born], steps), _step_of(lifetimes.free[freed], steps)])
    net = join([lifetimes.size[born], -lifetimes.size[freed]])
    kept = join(
        [np.where(survives[born], lifetimes.size[born], 0), np.zeros(len(net) - born.sum(), int)]
    )
    inside = (step >= 0) & (step < n_complete)
    key = cell_group[inside] * n_complete + step[inside]
    keys, member = np.unique(key, return_inverse=True)
    net_sum, kept_sum = np.zeros(len(keys), np.int64), np.zeros(len(keys), np.int64)
    np.add.at(net_sum, member.reshape(-1), net[inside])
    np.add.at(kept_sum, member.reshape(-1), kept[inside])
    return _Cells(keys // n_complete, keys % n_complete, kept_sum, net_sum)


def _candidates(cells: _Cells) -> list[tuple[int, int]]:
    """Return the cell ranges of the groups with survivors of enough steps and bytes."""
    if not len(cells.group):
        return []
    heads = np.flatnonzero(np.append(True, cells.group[1:] != cells.group[:-1]))
    total = np.add.reduceat(cells.survivor_bytes, heads)
    births = np.add.reduceat((cells.survivor_bytes > 0).astype(np.int64), heads)
    ends = np.append(heads[1:], len(cells.group))
    chosen = np.flatnonzero((births >= MIN_BIRTH_STEPS) & (total >= MIN_SURVIVOR_BYTES))
    chosen = chosen[np.argsort(-total[chosen], kind="stable")][:MAX_CANDIDATES]
    return [(int(heads[i]), int(ends[i])) for i in chosen]


def _judge(
    cells: _Cells, low: int, high: int, n_complete: int, busy: Bools
) -> tuple[int, int, int] | None:
    """Return (group, first step of growth, steps with survivors) if the group grows."""
    step, kept = cells.step[low:high], cells.survivor_bytes[low:high]
    births = step[kept > 0]
    since = int(births[0])
    gaps = np.diff(births)
    usual = float(np.median(gaps))
    # It must go on until the end, at a regular pace, in steps that also free something.
    if n_complete - 1 - births[-1] > 2 * max(1.0, usual):
        return None
    if len(gaps) >= 2 and gaps.max() > 4 * max(1.0, usual):
        return None
    if np.count_nonzero(busy[births]) * 2 < len(births):
        return None
    total = int(kept.sum())
    net = cells.net_bytes[low:high]
    if int(net[step >= since].sum()) < MIN_RISE * total:
        return None
    middle = since + (n_complete - since) / 2
    if int(kept[step >= middle].sum()) < MIN_LATE_SHARE * total:
        return None
    return int(cells.group[low]), since, len(births)


def _is_busy(lifetimes: Lifetimes, steps: I64) -> Bools:
    """Return for each complete step whether a program ran in it: several stacks, some freed."""
    n_complete = len(steps) - 1
    born = np.flatnonzero(lifetimes.start != BEFORE)
    step = _step_of(lifetimes.start[born], steps)
    inside = (step >= 0) & (step < n_complete)
    born, step = born[inside], step[inside]
    passing = lifetimes.free[born] != ALIVE
    # Where no stacks were recorded sizes tell the allocations of a step apart.
    kind = lifetimes.stack[born].astype(np.int64)
    if not (kind >= 0).any():
        kind = np.unique(lifetimes.requested[born], return_inverse=True)[1].reshape(-1)
    width = int(kind.max(initial=0)) + 2
    kinds = np.unique(step * width + kind + 1) // width
    n_kinds = np.bincount(kinds, minlength=n_complete)
    n_passing = np.bincount(step[passing], minlength=n_complete)
    result: Bools = (n_kinds >= MIN_STACKS_PER_STEP) & (n_passing > 0)
    return result


def _describe(
    lifetimes: Lifetimes,
    steps: I64,
    of_group: Bools,
    frame: int,
    since: int,
    n_births: int,
) -> Growth:
    n_complete = len(steps) - 1
    step = _step_of(lifetimes.start, steps)
    rows = np.flatnonzero(
        of_group
        & (lifetimes.start != BEFORE)
        & (lifetimes.free == ALIVE)
        & (step >= since)
        & (step < n_complete)
    )
    per_step = np.zeros(n_complete - since, np.int64)
    np.add.at(per_step, step[rows] - since, lifetimes.size[rows])
    stacks, member = np.unique(lifetimes.stack[rows], return_inverse=True)
    by_stack = np.zeros(len(stacks), np.int64)
    np.add.at(by_stack, member.reshape(-1), lifetimes.size[rows])
    growing = per_step[per_step > 0]
    return Growth(
        frame=frame,
        stack=int(stacks[by_stack.argmax()]),
        slope_bytes=int(np.median(growing)),
        n_steps=n_births,
        n_survivors=len(rows),
        survivor_bytes=int(lifetimes.size[rows].sum()),
        steadiness=n_births / (n_complete - since),
        first_event=int(lifetimes.start[rows].min()),
        last_event=int(lifetimes.start[rows].max()),
    )


def _floor_slope(timeline: Timeline, steps: Steps) -> int:
    """Return the rise per step of the lowest allocated bytes, from the thirds of the steps.

    The first step is left out: it makes what all later ones share.
    """
    allocated = timeline.allocated_bytes[1:]
    floors = np.minimum.reduceat(allocated, steps.rows)[1:-1]
    third = max(1, len(floors) // 3)
    distance = len(floors) - third
    if distance <= 0:
        return 0
    return int((np.median(floors[-third:]) - np.median(floors[:third])) / distance)
