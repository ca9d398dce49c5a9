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
- the optimizer state, or an averaged copy, of parameters that begin to train one after the other
  (layers unfrozen step by step): each gets its own once, so that it ends with the parameters;
- a loop that does nothing but keep (a benchmark, the building of a model): a step of a running
  program also frees something.

Growing buffers are a pattern of their own, grown by being copied: a new, larger one is made, then
the old one is freed. A KV cache grown with ``torch.cat``, a replay buffer, a list joined anew in
every step. The line asks for sizes that never shrink, n at a time (one per layer, say), and all but
the last n are gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from fragdoctor.analysis.result import Growth
from fragdoctor.analysis.training_run import Requests
from fragdoctor.frozen import frozen
from fragdoctor.model.arrays import distinct
from fragdoctor.model.hooks import report_progress
from fragdoctor.model.snapshot import I32, I64, Bools
from fragdoctor.trace.lives import BEFORE, NEVER, Lives
from fragdoctor.trace.made_once import is_made_once
from fragdoctor.trace.steps import MIN_STEPS, Steps
from fragdoctor.trace.trace import Trace
from fragdoctor.units import KIB

MIN_BIRTH_STEPS: Final = 3
# Survivors of every tenth step are a plan as often as a leak (layers added while training).
MIN_SPARSE_BIRTHS: Final = 6
MIN_SURVIVOR_BYTES: Final = 64 * KIB
# Share of the survivors' bytes by which the line's live memory must have risen meanwhile.
MIN_RISE: Final = 0.5
# Share of survivors' bytes that the later half of the growing phase must have added.
MIN_LATE_SHARE: Final = 0.2
# A first pass that leaves this many times more than the later ones is a warm-up.
WARM_UP: Final = 4
# Deviation of the distances between survivors, relative to their mean; 1 is pure chance.
MAX_ODDNESS: Final = 0.35
MIN_STACKS_PER_STEP: Final = 3
MAX_GROWTHS: Final = 100
MAX_CANDIDATES: Final = 2000
MAX_TABLE_CELLS: Final = 20_000_000

MIN_BUFFER_GROWTH: Final = 4  # times; fewer are the steps of a warm-up
MAX_SHRUNK: Final = 0.02  # share of requests that are smaller than the one before
MIN_BUFFER_BYTES: Final = 1 << 20
INPUT_SHARE: Final = 0.3  # of the growth of an input that the rest of a step shows
MAX_LAPS: Final = 2  # generations that are live at once: the new one and the old one


@frozen
class GrowthResult:
    """Growing lines, most bytes first, and the floor of allocated bytes over the steps.

    ``once_slope_bytes`` is what else is added per step, once for each parameter;
    ``floor_slope_bytes`` is the rise per step of the lowest allocated bytes within each step
    (0 with fewer than ``MIN_STEPS``).
    """

    lines: tuple[Growth, ...]
    n_steps: int
    once_slope_bytes: int
    floor_slope_bytes: int


@frozen
class _Cells:
    """Sums per (group, step), sorted; step counts the complete steps from 0."""

    group: I64
    step: I64
    survivor_bytes: I64
    net_bytes: I64


def find_growth(trace: Trace, steps: Steps) -> GrowthResult:
    """Return the source lines whose survivors grow step by step."""
    main = steps.main_rows
    lines: dict[int, Growth] = {}
    once_slope_bytes = 0
    # Evaluation between training steps would hide what each of these leaves, and the reverse.
    for kind in distinct(steps.kind).tolist():
        for growth, is_once in _growing_lines(trace, steps.of_kind(kind), steps.method):
            if is_once:
                once_slope_bytes += growth.slope_bytes
                continue
            key = growth.frame if growth.frame >= 0 else -1 - len(lines)
            if key not in lines or lines[key].survivor_bytes < growth.survivor_bytes:
                lines[key] = growth
    most_first = sorted(lines.values(), key=lambda g: -g.survivor_bytes)
    slope = _floor_slope(trace, main) if len(main) >= MIN_STEPS else 0
    return GrowthResult(tuple(most_first[:MAX_GROWTHS]), len(main), once_slope_bytes, slope)


def _growing_lines(trace: Trace, starts: I64, method: str) -> list[tuple[Growth, bool]]:
    """Return the lines that grow over the steps of one kind, which begin at ``starts``.

    Each with whether what grows is made once for each parameter.
    """
    if len(starts) < MIN_STEPS:
        return []
    report_progress("Analysing: growth")
    births = _births(trace, starts, method)
    if births is None:
        return []
    lives = trace.lives
    busy = _is_busy(lives, births, method)
    cells = _cells(lives, births)
    judged = [_judge(cells, low, high, births.n_complete, busy) for low, high in _candidates(cells)]
    grown = [(found, _kept_rows(lives, births, found)) for found in judged if found]
    return [
        (_describe(lives, births, rows, found, trace.first_row), is_made_once(trace, rows))
        for found, rows in grown
    ]


@frozen
class _Births:
    """Which step and which group each block belongs to.

    Attributes:
        n_complete: number of complete steps; the last one may have stopped in the middle.
        starts: rows at which steps begin.
        group: group of each block: its user line, or its size where no stacks were recorded.
        frames: frame of each group.
        chosen: whether a group keeps enough to be looked at.
        survivors: rows of the blocks that were made in the trace and live at its end.
    """

    n_complete: int
    starts: I64
    group: I64
    frames: I64
    chosen: Bools
    survivors: I64

    def steps_of(self, rows: I32) -> I64:
        """Return the step that the program was in at each event, -1 before the first."""
        return np.searchsorted(self.starts, rows, side="right") - 1


def _births(trace: Trace, starts: I64, method: str) -> _Births | None:
    """Return the groups and steps of the blocks; None where no group keeps enough."""
    lives = trace.lives
    if method == "stacks":
        group = trace.stacks.lines_of(lives.stack).astype(np.int64) + 1
        frames = np.arange(int(group.max(initial=0)) + 1) - 1
    else:
        sizes, group = np.unique(lives.requested_bytes, return_inverse=True)
        group = group.reshape(-1).astype(np.int64)
        frames = np.full(len(sizes), -1, np.int64)
    survivors = np.flatnonzero((lives.start != BEFORE) & (lives.free == NEVER))
    kept = np.zeros(len(frames), np.int64)
    np.add.at(kept, group[survivors], lives.size_bytes[survivors])
    count = np.bincount(group[survivors], minlength=len(frames))
    chosen = (kept >= MIN_SURVIVOR_BYTES) & (count >= MIN_BIRTH_STEPS)
    if not chosen.any():
        return None
    return _Births(len(starts) - 1, starts, group, frames, chosen, survivors)


def _cells(lives: Lives, births: _Births) -> _Cells:
    """Return survivors' bytes and net change of live bytes by chosen group and complete step."""
    rows = np.flatnonzero(births.chosen[births.group])
    start, free, size = lives.start[rows], lives.free[rows], lives.size_bytes[rows]
    group = births.group[rows]
    born = start != BEFORE
    freed = (free != NEVER) & (free != BEFORE)
    join = np.concatenate
    owner = join([group[born], group[freed]])
    step = births.steps_of(join([start[born], free[freed]]))
    net = join([size[born], -size[freed]])
    kept = np.zeros(len(net), np.int64)
    kept[: np.count_nonzero(born)] = np.where(free[born] == NEVER, size[born], 0)
    inside = (step >= 0) & (step < births.n_complete)
    key = owner[inside] * births.n_complete + step[inside]
    order = np.argsort(key, kind="stable")
    key, net, kept = key[order], net[inside][order], kept[inside][order]
    first = np.flatnonzero(np.append(True, key[1:] != key[:-1])) if len(key) else order
    keys = key[first]
    net_sum = np.add.reduceat(net, first) if len(key) else net
    kept_sum = np.add.reduceat(kept, first) if len(key) else kept
    return _Cells(keys // births.n_complete, keys % births.n_complete, kept_sum, net_sum)


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
    births, amounts = step[kept > 0], kept[kept > 0]
    if amounts[0] > WARM_UP * np.median(amounts[1:]):
        # Workspaces and the like come with the first pass.
        births, amounts = births[1:], amounts[1:]
    total = int(amounts.sum())
    if len(births) < MIN_BIRTH_STEPS or total < MIN_SURVIVOR_BYTES:
        return None
    since = int(births[0])
    middle = since + (n_complete - since) / 2
    grows = (
        _goes_on(births, n_complete)
        and (len(births) >= MIN_SPARSE_BIRTHS or not _is_sparse(births, n_complete))
        and not _is_random_tail(births, step, n_complete)
        and np.count_nonzero(busy[since:]) * 2 >= n_complete - since
        and int(cells.net_bytes[low:high][step >= since].sum()) >= MIN_RISE * total
        and int(amounts[births >= middle].sum()) >= MIN_LATE_SHARE * total
    )
    return (int(cells.group[low]), since, len(births)) if grows else None


def _goes_on(births: I64, n_complete: int) -> bool:
    """Return whether survivors are made until the end, without a long pause."""
    gaps = np.diff(births)
    usual = max(1.0, float(np.median(gaps)))
    return bool(n_complete - 1 - births[-1] <= 2 * usual and gaps.max() <= 4 * usual)


def _is_random_tail(births: I64, step: I64, n_complete: int) -> bool:
    """Return whether these are the last of many blocks with random lives.

    Their survivors stand at odd distances, in few steps, and the line's earlier blocks all died.
    """
    gaps = np.diff(births)
    is_odd = gaps.std() > MAX_ODDNESS * gaps.mean()
    had_died = np.count_nonzero(step < births[0]) >= len(births)
    return bool(is_odd and had_died and _is_sparse(births, n_complete))


def _is_sparse(births: I64, n_complete: int) -> bool:
    """Return whether survivors are made in less than every second step."""
    return bool(len(births) * 2 < n_complete - births[0])


def _is_busy(lives: Lives, births: _Births, method: str) -> Bools:
    """Return for each complete step whether a program ran in it: several stacks, some freed."""
    n_complete = births.n_complete
    born = np.flatnonzero(lives.start != BEFORE)
    step = births.steps_of(lives.start[born])
    inside = (step >= 0) & (step < n_complete)
    born, step = born[inside], step[inside]
    passing = lives.free[born] != NEVER
    # Where no stacks were recorded sizes tell the allocations of a step apart.
    is_known = method == "stacks"
    kind = lives.stack[born].astype(np.int64) + 1 if is_known else births.group[born]
    width = int(kind.max(initial=0)) + 1
    if width * n_complete <= MAX_TABLE_CELLS:
        table = np.zeros((n_complete, width), np.bool_)
        table[step, kind] = True
        n_kinds = table.sum(axis=1)
    else:
        n_kinds = np.bincount(distinct(step * width + kind) // width, minlength=n_complete)
    n_passing = np.bincount(step[passing], minlength=n_complete)
    result: Bools = (n_kinds >= MIN_STACKS_PER_STEP) & (n_passing > 0)
    return result


def _kept_rows(lives: Lives, births: _Births, found: tuple[int, int, int]) -> I64:
    """Return the survivors of a growing group, from the step on in which it begins to grow."""
    group, since, _ = found
    rows = births.survivors[births.group[births.survivors] == group]
    step = births.steps_of(lives.start[rows])
    result: I64 = rows[(step >= since) & (step < births.n_complete)]
    return result


def _describe(
    lives: Lives, births: _Births, rows: I64, found: tuple[int, int, int], first_row: int
) -> Growth:
    group, since, n_births = found
    step = births.steps_of(lives.start[rows])
    per_step = np.zeros(births.n_complete - since, np.int64)
    np.add.at(per_step, step - since, lives.size_bytes[rows])
    stacks, member = np.unique(lives.stack[rows], return_inverse=True)
    by_stack = np.zeros(len(stacks), np.int64)
    np.add.at(by_stack, member.reshape(-1), lives.size_bytes[rows])
    return Growth(
        frame=int(births.frames[group]),
        stack=int(stacks[by_stack.argmax()]),
        slope_bytes=int(np.median(per_step[per_step > 0])),
        n_steps=n_births,
        n_survivors=len(rows),
        survivor_bytes=int(lives.size_bytes[rows].sum()),
        steadiness=n_births / (births.n_complete - since),
        first_event=first_row + int(lives.start[rows].min()),
        last_event=first_row + int(lives.start[rows].max()),
        is_even=bool(np.ptp(np.diff(distinct(step))) == 0),
    )


def _floor_slope(trace: Trace, starts: I64) -> int:
    """Return the rise per step of the lowest allocated bytes, from the thirds of the steps.

    The first step is left out: it makes what all later ones share.
    """
    floors = trace.totals.envelope("allocated_bytes", starts + 1).low[1:-1]
    third = max(1, len(floors) // 3)
    distance = len(floors) - third
    if distance <= 0:
        return 0
    return int((np.median(floors[-third:]) - np.median(floors[:third])) / distance)


@frozen
class GrowingBuffers:
    """The buffers of one line that grow by copies.

    Attributes:
        stack: that makes them.
        row: events that make them, ascending.
        n_buffers: that live side by side; request i replaces request i - ``n_buffers``.
        first_bytes, last_bytes: of one buffer at the beginning and at the end of the recording.
        step_bytes: by which one buffer grows at a time.
    """

    stack: int
    row: I64
    n_buffers: int
    first_bytes: int
    last_bytes: int
    step_bytes: int

    @property
    def total_bytes(self) -> int:
        """Of all buffers at the end of the recording."""
        return self.n_buffers * self.last_bytes

    @property
    def n_grown(self) -> int:
        """How often each buffer was replaced by a larger one."""
        return len(self.row) // self.n_buffers - 1


def find_growing_buffers(requests: Requests) -> tuple[GrowingBuffers, ...]:
    """Return the lines whose buffers grow by copies, the largest in all first."""
    order = np.argsort(requests.stack, kind="stable")
    order = order[requests.stack[order] >= 0]
    if not len(order):
        return ()
    stack = requests.stack[order]
    heads = np.flatnonzero(np.append(True, stack[1:] != stack[:-1]))
    found = []
    for low, high in zip(heads.tolist(), [*heads[1:].tolist(), len(order)], strict=True):
        rows = order[low:high]  # of one stack, in the order of the trace
        size = requests.size_bytes[rows]
        if len(rows) <= MIN_BUFFER_GROWTH or size[-1] < MIN_BUFFER_BYTES or size[-1] <= size[0]:
            continue
        buffers = _judged(requests, rows, size)
        if buffers is not None:
            found.append(buffers)
    return tuple(sorted(found, key=lambda b: -b.total_bytes))


def is_input(
    requests: Requests, buffers: GrowingBuffers, kept: Sequence[GrowingBuffers] = ()
) -> bool:
    """Return whether all that is asked for grows as the buffers do: a batch of ever longer inputs.

    Images that become larger, rollouts that become longer: the rest of each step grows by the same
    factor, and the buffer is made anew. What is kept and added to leaves the rest as it is.

    ``kept`` are all buffers that outlive a step, which are no part of the rest.
    """
    starts = buffers.row[:: buffers.n_buffers]
    if len(starts) < MIN_BUFFER_GROWTH:
        return False
    step = np.searchsorted(starts, requests.row, side="right") - 1
    rest = (step >= 0) & ~np.isin(requests.stack, [b.stack for b in (buffers, *kept)])
    asked = np.bincount(step[rest], requests.size_bytes[rest], minlength=len(starts))
    own = requests.size_bytes[np.searchsorted(requests.row, starts)]
    # The first makes what all steps share, the last may be cut.
    low, high = 1, len(starts) - 2
    grown = float(own[high]) / float(own[low]) - 1
    return bool(asked[high] >= (1 + INPUT_SHARE * grown) * asked[low])


def _judged(requests: Requests, rows: I64, size: I64) -> GrowingBuffers | None:
    grows = np.diff(size)
    if np.count_nonzero(grows < 0) > MAX_SHRUNK * len(size):
        return None
    _, count = np.unique(size, return_counts=True)
    n = int(np.median(count))
    if len(count) < MIN_BUFFER_GROWTH or len(rows) < MIN_BUFFER_GROWTH * n:
        return None
    # Each is gone soon after its successor is there.
    freed, made = requests.freed_row[rows], requests.row[rows]
    late = min(len(rows), MAX_LAPS * n)
    is_replaced = freed[: len(rows) - late] <= made[late:]
    if not is_replaced.all():
        return None
    return GrowingBuffers(
        stack=int(requests.stack[rows[0]]),
        row=made,
        n_buffers=n,
        first_bytes=int(size[0]),
        last_bytes=int(size[-1]),
        step_bytes=int(np.median(grows[grows > 0])),
    )
