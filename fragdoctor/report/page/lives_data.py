"""Blocks on the page: the blocks of each segment in address order, and all blocks over time.

From the blocks over time the page draws any moment of a recording. A million events are a third of
a million blocks, about 1 MB compressed. If they exceed the budget, the smallest are left out; the
page then shows them together, as the difference to the totals, and says so. Each block has the
names that were recorded for it: the module of the model, and its owner.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fragdoctor.analysis.modules import MAX_DEPTH, MAX_MODULES, ModulePaths
from fragdoctor.analysis.owners import named_blocks
from fragdoctor.analysis.result import DeviceAnalysis
from fragdoctor.future.steps import Steps
from fragdoctor.model.arrays import largest_groups
from fragdoctor.model.census import Census
from fragdoctor.model.snapshot import I32, I64, BlockState
from fragdoctor.report import escape
from fragdoctor.report.document import plain
from fragdoctor.report.page.blob import MAX_EXACT, Sink, compressed_size
from fragdoctor.report.views.holders import owner_text
from fragdoctor.trace.columns import SMALL_SEGMENT_BYTES
from fragdoctor.trace.lives import Layout, Lives
from fragdoctor.trace.trace import SegmentLives, Trace, large_page_bytes

MAX_BLOCKS: Final = 120_000
"""The most blocks on one page (all devices): about 0.4 MB compressed."""


def shown_segments(layout: Layout, max_blocks: int) -> I64:
    """Return the segments to show, in address order; those with most free space are kept first.

    All segments are shown unless together they have more than ``max_blocks`` blocks.
    """
    n = len(layout.segment_address)
    counts = np.bincount(layout.live_segment, minlength=n)
    counts += np.bincount(layout.free_segment, minlength=n)
    by_interest = np.lexsort((-layout.segment_bytes, -layout.free_of_segment))
    return np.sort(by_interest[np.cumsum(counts[by_interest]) <= max_blocks])


def segment_map_data(
    analysis: DeviceAnalysis, sink: Sink, max_blocks: int
) -> dict[str, Any] | None:
    """Return the JSON part of one device's segment map, or None without segments."""
    trace, layout, blob = analysis.trace, analysis.trace.layout, sink.blob
    rows = shown_segments(layout, max_blocks)
    if len(rows) == 0:
        return None
    # Live and free blocks by segment and address; a free block has no stack.
    segment = np.concatenate((layout.live_segment, layout.free_segment)).astype(np.int64)
    offset = np.concatenate((layout.live_offset, layout.free_offset))
    is_shown = np.zeros(len(layout.segment_address), np.bool_)
    is_shown[rows] = True
    kept = np.flatnonzero(is_shown[segment])
    kept = kept[np.lexsort((offset[kept], segment[kept]))]

    def column(live: npt.NDArray[Any], free: npt.NDArray[Any] | int) -> I64:
        """Return a value of each block, given those of the live ones and of the free ones."""
        of_free = np.broadcast_to(free, layout.free_segment.shape)
        return np.concatenate((live, of_free))[kept].astype(np.int64)

    size, stack = column(layout.live_bytes, layout.free_bytes), column(layout.live_stack, -1)
    # An unknown row, -1, takes what is appended.
    requested = np.append(trace.lives.requested_bytes, 0)[layout.live_row]
    start = np.append(trace.lives.start, -1)[layout.live_row]
    live_state = np.where(layout.live_is_pending, BlockState.PENDING_FREE, BlockState.ALLOCATED)
    address = layout.segment_address[rows]
    pools = np.where(layout.is_private[rows], layout.segment_pool[rows], -1)
    groups, group = groups_of(pools, layout.is_small[rows], layout.segment_stream[rows])
    stranding = {a for strander in analysis.stranders for a in strander.addresses}
    at = layout.segment_address[segment[kept]] + offset[kept].view(np.uint64)
    counts = np.bincount(np.searchsorted(rows, segment[kept]), minlength=len(rows))
    total = layout.segment_bytes
    return {
        "n_hidden": len(total) - len(rows),
        "hidden_bytes": int(total.sum()) - int(total[rows].sum()),
        "n_events": trace.n_events,
        "groups": [_group(trace, key) for key in groups],
        "group": blob.add(group),
        "address_high": blob.add((address >> np.uint64(32)).astype(np.int64)),
        "address_low": blob.add((address & np.uint64(0xFFFFFFFF)).astype(np.int64)),
        "total": blob.add(total[rows]),
        "page": blob.add(layout.page_bytes[rows]),
        "block_start": blob.add(np.concatenate(([0], np.cumsum(counts)))),
        "size": blob.add(size),
        "requested": blob.add(column(requested, 0)),
        "state": blob.add(column(live_state, int(BlockState.INACTIVE))),
        "stack": blob.add(sink.stacks.page_stacks(stack, size)),
        "alloc_row": blob.add(column(start, -1)),
        "stranders": blob.add([a in stranding for a in at.tolist()]),
    }


Group = tuple[int, bool, int]
"""(Private pool or -1, is small, stream): no block moves between segments of different groups."""


def groups_of(
    pools: npt.NDArray[Any], is_small: npt.NDArray[np.bool_], streams: I32
) -> tuple[list[Group], list[int]]:
    """Return the groups of segments, private ones last, and the number of each segment's group."""
    keys = list(zip(pools.tolist(), is_small.tolist(), streams.tolist(), strict=True))
    groups = sorted(set(keys), key=lambda k: (k[0] >= 0, k[0], not k[1], k[2]))
    number = {key: i for i, key in enumerate(groups)}  # there may be as many groups as segments
    return groups, [number[key] for key in keys]


def _group(trace: Trace, key: Group) -> dict[str, Any]:
    """Return the page's description of a group of segments."""
    pool, is_small, stream = key
    ids = None if pool < 0 else [int(i) for i in trace.snapshot.pools[pool]]
    handle = int(trace.snapshot.streams[stream]) if stream >= 0 else None
    return {
        "kind": "small" if is_small else "large",
        "pool": None if ids is None else f"({ids[0]}, {ids[1]})",
        "stream": "unknown" if handle is None else "default" if handle == 0 else f"{handle:#x}",
    }


MAX_SEGMENT_LIVES: Final = 200_000

MEASURED_ROWS: Final = 2_048
"""Rows of a stretch that is compressed to see how much the rows will take."""


def lives_data(
    analysis: DeviceAnalysis, sink: Sink, budget_bytes: int, censuses: Sequence[Census] = ()
) -> dict[str, Any] | None:
    """Return the JSON part of one device's blocks over time, or None without a trace.

    States count events: a block is allocated in state k iff ``born <= k < born + kept``, and active
    until ``waited`` states later. ``complete`` says that no block is missing and that their sums
    equal the totals of the trace in every state.
    """
    trace = analysis.trace
    if analysis.timeline is None or analysis.n_events == 0:
        return None
    segments = trace.segment_lives
    top = max((int(a.max()) for a in (trace.lives.address, segments.address) if len(a)), default=0)
    if top > MAX_EXACT or len(segments) > MAX_SEGMENT_LIVES:
        return None
    columns = _columns(trace.lives, trace.n_events)
    rows = _kept(columns, budget_bytes)
    peak = max(trace.totals.peak_active_bytes, trace.totals.peak_reserved_bytes)
    is_complete = len(rows) == len(trace.lives) and peak <= MAX_EXACT
    category = analysis.category
    stack = sink.stacks.page_stacks(trace.lives.stack[rows], trace.lives.size_bytes[rows])
    blob = sink.blob
    return {
        "n_events": trace.n_events,
        "n_regular": int(np.searchsorted(rows, trace.lives.n_regular)),
        "n_left_out": len(trace.lives) - len(rows),
        "complete": is_complete,
        "stack": blob.add(stack),
        "category": blob.add(category[rows]) if len(category) == len(trace.lives) else None,
        "names": names_data(trace, censuses, rows, sink),
        "steps": blob.add(Steps.of(trace).rows),
        "growth": _growth(analysis),
        "segments": _segments(trace, segments, sink),
        **{name: blob.add(values[rows]) for name, values in columns.items()},
    }


def _states(rows: I32, n_events: int) -> I32:
    """Return the states that events lead to; a state after the last event means never."""
    return np.minimum(rows, np.int32(n_events)) + np.int32(1)  # BEFORE leads to state 0


def _columns(lives: Lives, n_events: int) -> dict[str, I32 | I64]:
    """Return the stored columns of the blocks."""
    born, freed = _states(lives.start, n_events), _states(lives.free, n_events)
    size = np.minimum(lives.size_bytes, MAX_EXACT)
    return {
        "born": born,
        "kept": freed - born,
        "waited": _states(lives.done, n_events) - freed,
        "size": size,
        "slack": size - np.clip(lives.requested_bytes, 0, size),
        "address": np.minimum(lives.address, np.uint64(MAX_EXACT)).astype(np.int64),
    }


def _kept(columns: dict[str, I32 | I64], budget_bytes: int) -> I64:
    """Return the rows of the largest blocks that fit a budget, in their original order."""
    size = columns["size"]
    rows = np.arange(len(size))
    # Rows hardly ever take more than 16 bytes, so this many fit without being measured.
    while len(rows) > budget_bytes // 16:
        # Every eighth stretch tells enough, and whole stretches keep the differences small.
        starts = range(0, len(rows), 8 * MEASURED_ROWS)
        sample = np.concatenate([rows[at : at + MEASURED_ROWS] for at in starts])
        share = len(sample) / len(rows)
        needed = compressed_size([values[sample] for values in columns.values()]) / share
        if needed <= budget_bytes:
            break
        n = int(0.95 * len(rows) * budget_bytes / needed)
        rows = np.sort(rows[np.argsort(-size[rows], kind="stable")[:n]])
    return rows


def _growth(analysis: DeviceAnalysis) -> list[int] | None:
    """Return the states of the first and last survivor of the line that grows most."""
    if not analysis.growth:
        return None
    worst = analysis.growth[0]
    return [worst.first_event + 1, worst.last_event + 1]


def _segments(trace: Trace, segments: SegmentLives, sink: Sink) -> dict[str, Any]:
    """Return segments over time; blocks can span adjacent segments only within one group."""
    blob, n = sink.blob, trace.n_events
    groups, group = groups_of(
        np.where(segments.pool != trace.default_pool, segments.pool, -1),
        segments.is_small,
        segments.stream,
    )
    page = np.where(segments.is_small, SMALL_SEGMENT_BYTES, large_page_bytes(trace.settings))
    born = _states(segments.start, n)
    return {
        "groups": [_group(trace, key) for key in groups],
        "group": blob.add(group),
        "address": blob.add(segments.address.astype(np.int64)),
        "size": blob.add(segments.size_bytes),
        "page": blob.add(np.where(segments.is_expandable, page, 0)),
        "born": blob.add(born),
        "kept": blob.add(_states(segments.done, n) - born),
    }


_MAX_TEXT: Final = 120
_FURTHER: Final = "further names"


def names_data(
    trace: Trace, censuses: Sequence[Census], rows: I64, sink: Sink
) -> dict[str, Any]:  # fmt: skip
    """Return the JSON part with the names of some rows of ``Lives``: ``module`` and ``owner``.

    Each has ``paths``, lists of the parts of a name from the outermost, and ``of``, for each row
    its 1-based place in ``paths``, or 0 if it has no name. A kind that was not recorded is missing.
    """
    sizes = trace.lives.size_bytes[rows]
    found: dict[str, Any] = {}
    modules = ModulePaths.of(trace)
    if modules.paths:
        texts = {at: path.split(".", MAX_DEPTH) for at, path in enumerate(modules.paths)}
        found["module"] = _named(modules.of_row[rows].astype(np.int64), sizes, texts, sink)
    named = named_blocks(trace, censuses)
    if named is not None:
        owners = {at: [plain(owner_text(owner))] for at, owner in enumerate(named.owners)}
        found["owner"] = _named(named.of_row[rows].astype(np.int64), sizes, owners, sink)
    return found


def _named(
    place: I64, sizes: I64, texts: dict[int, list[str]], sink: Sink
) -> dict[str, Any]:  # fmt: skip
    most = largest_groups(place[place >= 0], sizes[place >= 0]).group
    shown = [int(at) for at in most[:MAX_MODULES]]
    number = np.full(max(texts, default=-1) + 2, 0, np.int64)  # the last entry is for no name
    number[most[MAX_MODULES:]] = len(shown) + 1
    number[shown] = np.arange(1, len(shown) + 1)
    paths = [
        [escape.visible(escape.shorten_left(part, _MAX_TEXT)) or "(no name)" for part in texts[at]]
        for at in shown
    ]
    if len(most) > len(shown):
        paths.append([_FURTHER])
    return {"paths": paths, "of": sink.blob.add(number[place])}
