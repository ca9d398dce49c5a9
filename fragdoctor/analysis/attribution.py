"""Who holds memory: source lines of the user's program, and live blocks that strand free memory.

Memory is returned in units: an ordinary segment, or a page of an expandable segment. A unit that
is partly free is held by the live (or pending) blocks in it. If all of these have the same stack,
the unit's free bytes count for that stack alone; otherwise every stack shares them. A fully live
unit holds nothing back. Private pools are left out: they return nothing while they are in use.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from fragdoctor.analysis.modules import ModulePaths
from fragdoctor.analysis.result import Holder, Strander
from fragdoctor.future.steps import Steps
from fragdoctor.model.arrays import distinct, largest_groups, sum_by
from fragdoctor.model.diagnosis import SegmentReport
from fragdoctor.model.phases import Category
from fragdoctor.model.snapshot import I32, I64, U8
from fragdoctor.trace.lives import BEFORE, NEVER, Layout
from fragdoctor.trace.trace import Trace

MAX_HOLDERS: Final = 100

MAX_STRANDERS: Final = 50
MAX_ADDRESSES: Final = 1000
MAX_SEGMENTS: Final = 12


MAIN_SHARE: Final = 0.75
"""Share of a line's memory that its main categories (up to ``MAX_MAIN``) add up to."""

MAX_MAIN: Final = 2


def find_holders(trace: Trace, states: Sequence[int], category: U8) -> tuple[Holder, ...]:
    """Return live memory by user line at the end and in other states, ordered by the largest.

    A state is the number of events before it; ``category`` has the category of each block of
    ``Lives``.
    """
    layout, lives = trace.layout, trace.lives
    now = np.flatnonzero(~layout.live_is_pending)
    rows = [lives.allocated_at(s) for s in states]
    stack = np.concatenate([layout.live_stack[now], *(lives.stack[r] for r in rows)])
    size = np.concatenate([layout.live_bytes[now], *(lives.size_bytes[r] for r in rows)])
    life = np.concatenate([layout.live_row[now], *rows])
    moment = np.repeat(np.arange(1 + len(rows)), [len(now), *map(len, rows)])
    if not len(stack):
        return ()
    line = trace.stacks.lines_of(stack)
    groups, member = np.unique(line, return_inverse=True)
    member = member.reshape(-1)
    n = len(groups)
    table = np.zeros((1 + len(rows), n), np.int64)
    np.add.at(table, (moment, member), size)
    counts = np.zeros((1 + len(rows), n), np.int64)
    np.add.at(counts, (moment, member), 1)
    main = _main_stacks(member, stack, size, n)
    modules = _main_modules(trace, member, life, size)
    categories = _main_categories(category, member, life, size)
    order = np.argsort(-table.max(axis=0), kind="stable")[:MAX_HOLDERS]
    return tuple(
        Holder(
            frame=int(groups[g]),
            stack=int(main[g]),
            n_bytes=table[:, g].tolist(),
            n_blocks=counts[:, g].tolist(),
            module=modules.get(int(g), ""),
            categories=categories.get(int(g), ()),
        )
        for g in order
    )


def _main_stacks(group: I64, stack: I32, size: I64, n_groups: int) -> I64:
    """Return for each group the stack with the most bytes."""
    width = int(stack.max(initial=0)) + 2
    keys = largest_groups(group * width + stack + 1, size).group[::-1]
    result = np.full(n_groups, -1, np.int64)
    result[keys // width] = keys % width - 1  # the largest is written last
    return result


def _main_categories(
    category: U8, group: I64, life: npt.NDArray[np.signedinteger], size: I64
) -> Mapping[int, tuple[Category, ...]]:
    """Return for each group the categories that make up most of its bytes, if they are few."""
    if not len(category):
        return {}
    known = np.flatnonzero(life >= 0)
    table = np.zeros((int(group.max()) + 1, len(Category)), np.int64)
    np.add.at(table, (group[known], category[life[known]].astype(np.int64)), size[known])
    total = np.bincount(group, size, len(table))
    order = np.argsort(-table, axis=1, kind="stable")
    sums = np.cumsum(np.take_along_axis(table, order, axis=1), axis=1)
    n_main = 1 + np.count_nonzero(sums < MAIN_SHARE * total[:, None], axis=1)
    few = np.flatnonzero((n_main <= MAX_MAIN) & (total > 0)).tolist()
    return {g: tuple(Category(c) for c in order[g, : n_main[g]].tolist()) for g in few}


def _main_modules(
    trace: Trace, group: I64, life: npt.NDArray[np.signedinteger], size: I64
) -> Mapping[int, str]:
    """Return for each group the path of the module with the most bytes, if it was recorded.

    Repeated layers count as one: ``layers.*.mlp``.
    """
    recorded = ModulePaths.of(trace)
    if not recorded.paths:
        return {}
    known = np.flatnonzero(life >= 0)
    known = known[trace.lives.start[life[known]] >= 0]
    place = recorded.of_row[life[known]].astype(np.int64)
    held: dict[int, Counter[str]] = {}
    exact: dict[tuple[int, str], set[str]] = {}
    pairs, member = np.unique(np.stack([group[known], place]), axis=1, return_inverse=True)
    totals = np.bincount(member.reshape(-1), size[known], pairs.shape[1])
    for (g, at), n_bytes in zip(pairs.T.tolist(), totals.tolist(), strict=True):
        path = recorded.paths[at] if at >= 0 else ""
        shape = re.sub(r"(?<![^.])\d+(?![^.])", "*", path)
        held.setdefault(g, Counter())[shape] += int(n_bytes)
        exact.setdefault((g, shape), set()).add(path)
    found = {g: counter.most_common(1)[0][0] for g, counter in held.items()}
    return {g: s if len(exact[g, s]) > 1 else next(iter(exact[g, s])) for g, s in found.items()}


class Holds(Struct, frozen=True):
    """Pairs (block, unit): the block keeps the unit from being returned.

    ``free`` has one entry per unit, its free bytes; only partly free units are in the pairs.
    """

    block: I64
    unit: I64
    segment: I64
    free: I64


def find_stranders(trace: Trace, layout: Layout) -> tuple[Strander, ...]:
    """Return the groups of live blocks that strand free memory, most stranded (then shared) first.

    ``layout`` is the layout of the trace's device at one moment.
    """
    holds = find_holds(layout)
    if not len(holds.block):
        return ()
    stack = layout.live_stack[holds.block].astype(np.int64)
    groups, group = np.unique(stack, return_inverse=True)
    # One row per (unit, group).
    key = holds.unit * len(groups) + group
    _, once = np.unique(key, return_index=True)
    unit, of_group = holds.unit[once], group[once]
    n_groups_of_unit = np.bincount(unit, minlength=len(holds.free))
    alone = n_groups_of_unit[unit] == 1
    stranded = sum_by(of_group[alone], holds.free[unit[alone]], len(groups))
    shared = sum_by(of_group[~alone], holds.free[unit[~alone]], len(groups))
    return tuple(
        _strander(trace, layout, holds, np.flatnonzero(group == g), int(stranded[g]))
        for g in np.lexsort((-shared, -stranded))[:MAX_STRANDERS].tolist()
    )


def _strander(
    trace: Trace, layout: Layout, holds: Holds, rows: I64, stranded_bytes: int
) -> Strander:
    """Return the group of blocks in these rows of ``holds``."""
    blocks = distinct(holds.block[rows])
    life = layout.live_row[blocks]
    start = trace.lives.start[life[life >= 0]]
    oldest = int(start.min()) if len(start) == len(blocks) else BEFORE
    by_size = blocks[np.argsort(-layout.live_bytes[blocks], kind="stable")]
    return Strander(
        stack=int(layout.live_stack[blocks[0]]),
        n_blocks=len(blocks),
        block_bytes=int(layout.live_bytes[blocks].sum()),
        stranded_bytes=stranded_bytes,
        n_segments=len(distinct(holds.segment[rows])),
        oldest_event=None if oldest == BEFORE else oldest,
        addresses=tuple(int(a) for a in layout.live_address[by_size[:MAX_ADDRESSES]]),
    )


def find_holds(layout: Layout) -> Holds:
    """Return the pairs of blocks and partly free units in default pools."""
    usable = np.flatnonzero(~layout.is_private[layout.live_segment])
    paged = layout.page_bytes[layout.live_segment[usable]] > 0
    in_pages, in_segments = usable[paged], usable[~paged]
    n_segments = len(layout.segment_address)

    segment = layout.live_segment[in_pages]
    page = layout.page_bytes[segment]
    low = layout.live_offset[in_pages]
    high = np.maximum(low + layout.live_bytes[in_pages], low + 1)
    first, last = low // page, (high - 1) // page
    # Pages between the first and the last are fully live, so they hold nothing back.
    two = last > first
    block = np.concatenate([in_pages, in_pages[two]])
    number = np.concatenate([first, last[two]])
    part = np.concatenate([np.minimum(high, (first + 1) * page) - low, (high - last * page)[two]])
    each = np.stack([layout.live_segment[block], number])
    (of_page, number), unit = np.unique(each, axis=1, return_inverse=True)
    unit, page = unit.reshape(-1), layout.page_bytes[of_page]
    room = np.minimum(page, layout.segment_bytes[of_page] - number * page)
    free_of_page = room - sum_by(unit, part, len(page))

    block = np.concatenate([in_segments, block])
    unit = np.concatenate([layout.live_segment[in_segments], n_segments + unit])
    free = np.maximum(0, np.concatenate([layout.free_of_segment, free_of_page]))
    held = np.flatnonzero(free[unit] > 0)
    return Holds(block[held], unit[held], layout.live_segment[block[held]], free)


def find_stranded_segments(layout: Layout, device: int) -> tuple[tuple[SegmentReport, ...], int]:
    """Return up to 12 segments with the most stranded free bytes, and how many have any."""
    holds = find_holds(layout)
    unit, once = np.unique(holds.unit, return_index=True)
    stranded = sum_by(holds.segment[once], holds.free[unit], len(layout.segment_address))
    order = np.lexsort((layout.segment_address, -stranded))[:MAX_SEGMENTS]
    reports = []
    for segment in order[stranded[order] > 0].tolist():
        free = layout.free_bytes[layout.free_segment == segment]
        reports.append(
            SegmentReport(
                device=device,
                total_bytes=int(layout.segment_bytes[segment]),
                free_bytes=int(free.sum()),
                stranded_bytes=int(stranded[segment]),
                largest_hole_bytes=int(free.max(initial=0)),
            )
        )
    return tuple(reports), int(np.count_nonzero(stranded))


def most_kept(trace: Trace, category: U8) -> tuple[int, I64] | None:
    """Return the frame that makes most of what is kept from before the last step, and its events.

    None if nothing is kept that is no part of a model, or its line is not known. If the program
    failed before it ran a model, all that is live counts, its weights too.
    """
    lives, steps = trace.lives, Steps.of(trace).rows
    is_kept = (lives.free == NEVER) & (lives.start >= 0)
    if len(category):
        is_kept &= category == Category.KEPT
    elif len(trace.module_rows) or not trace.ends_in_failure:
        return None
    is_kept &= lives.start < (steps[-1] if len(steps) else trace.n_events)
    mine = np.flatnonzero(is_kept)
    line = trace.stacks.lines_of(lives.stack[mine])
    largest = largest_groups(line, lives.size_bytes[mine]).group[:1]
    if not len(largest) or largest[0] < 0:
        return None
    return int(largest[0]), np.sort(lives.start[mine[line == largest[0]]]).astype(np.int64)
