"""Segments over time: the lives of ordinary segments, and what was mapped of expandable ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fragdoctor.analysis.columns import SMALL_SEGMENT_BYTES, DeviceColumns
from fragdoctor.analysis.lifetimes import ALIVE, BEFORE
from fragdoctor.model.snapshot import I32, I64, Action, Bools


@dataclass(frozen=True, slots=True)
class SegmentSpans:
    """One row per ordinary segment that existed at some time, sorted by (address, start).

    ``start`` and ``done`` are rows of ``segment_alloc`` and ``segment_free``, as in ``Lifetimes``.
    """

    address: I64
    size: I64
    start: I64
    done: I64
    stream: I32
    pool: I32
    is_small: Bools
    n_contradictions: int

    def __len__(self) -> int:
        return len(self.address)


def segment_spans(columns: DeviceColumns) -> SegmentSpans:
    """Return the lives of all ordinary segments that events or the final state name."""
    is_alloc = columns.action == Action.SEGMENT_ALLOC
    rows = np.flatnonzero(is_alloc | (columns.action == Action.SEGMENT_FREE))
    rows = rows[np.argsort(columns.address[rows], kind="stable")]
    alloc, address = is_alloc[rows], columns.address[rows]
    n = len(rows)
    same = np.zeros(n, np.bool_)
    same[1:] = address[1:] == address[:-1]
    follows_alloc = np.zeros(n, np.bool_)
    follows_alloc[1:] = same[1:] & alloc[:-1]
    closes = ~alloc & follows_alloc
    heads = np.flatnonzero(~closes)
    start = np.where(alloc[heads], rows[heads], BEFORE)
    done = np.where(alloc[heads], ALIVE, rows[heads])
    closing = np.flatnonzero(closes)
    done[np.cumsum(~closes)[closing] - 1] = rows[closing]
    # A free after a free, an alloc over a live segment.
    n_bad = int(np.count_nonzero(same & (alloc == follows_alloc)))
    is_last = np.ones(len(heads), np.bool_)
    is_last[:-1] = ~same[heads[1:]]

    final = np.flatnonzero(~columns.seg_is_expandable)
    last = np.flatnonzero(is_last & (done == ALIVE))
    found, seg = _lookup(columns.seg_address[final], address[heads[last]])
    seg = final[seg] if len(final) else seg
    stale = np.flatnonzero(done == ALIVE)
    stale = np.setdiff1d(stale, last[found], assume_unique=True)
    done[stale] = start[stale]
    n_bad += len(stale)
    known = np.zeros(len(columns.seg_address), np.bool_)
    known[seg[found]] = True
    silent = final[~known[final]]
    pool, is_small = columns.pool[rows[heads]], columns.size[rows[heads]] <= SMALL_SEGMENT_BYTES
    pool[last[found]] = columns.seg_pool[seg[found]]
    is_small[last[found]] = columns.seg_is_small[seg[found]]
    join = np.concatenate
    address = join([address[heads], columns.seg_address[silent]])
    start = join([start, np.full(len(silent), BEFORE)])
    order = np.lexsort((start, address))
    return SegmentSpans(
        address=address[order],
        size=join([columns.size[rows[heads]], columns.seg_size[silent]])[order],
        start=start[order],
        done=join([done, np.full(len(silent), ALIVE)])[order],
        stream=join([columns.stream[rows[heads]], columns.seg_stream[silent]])[order],
        pool=join([pool, columns.seg_pool[silent]])[order],
        is_small=join([is_small, columns.seg_is_small[silent]])[order],
        n_contradictions=n_bad,
    )


def _lookup(table: I64, wanted: I64) -> tuple[Bools, I64]:
    """Return whether each wanted value is in the sorted table, and where."""
    if not len(table):
        return np.zeros(len(wanted), np.bool_), np.zeros(len(wanted), np.int64)
    at = np.minimum(np.searchsorted(table, wanted), len(table) - 1)
    return table[at] == wanted, at.astype(np.int64)


@dataclass(frozen=True, slots=True)
class MappedRanges:
    """Mapped ranges of expandable segments at one moment, sorted by address."""

    address: I64
    size: I64
    stream: I32
    pool: I32
    is_small: Bools


def mapped_ranges(columns: DeviceColumns, k: int, large_page_bytes: int) -> MappedRanges:
    """Return what was mapped after k events, by undoing the later maps and unmaps.

    The final ranges, less what was mapped since, plus what was unmapped since: the number of
    times that each byte is covered is 0 or 1. Ranges of different streams do not touch, since a
    reservation is larger than the device.
    """
    action = columns.action[k:]
    events = np.flatnonzero((action == Action.SEGMENT_MAP) | (action == Action.SEGMENT_UNMAP))
    sign = np.where(action[events] == Action.SEGMENT_MAP, -1, 1)
    events = events + k
    final = np.flatnonzero(columns.seg_is_expandable)
    join = np.concatenate
    low = join([columns.seg_address[final], columns.address[events]])
    size = join([columns.seg_size[final], columns.size[events]])
    weight = join([np.ones(len(final), np.int64), sign])
    points = join([low, low + size])
    order = np.argsort(points, kind="stable")
    points, change = points[order], join([weight, -weight])[order]
    edges, at = np.unique(points, return_index=True)
    if not len(edges):
        empty = np.zeros(0, np.int64)
        return MappedRanges(
            empty, empty, empty.astype(np.int32), empty.astype(np.int32), empty.astype(np.bool_)
        )
    covered = np.cumsum(np.add.reduceat(change, at)) > 0
    rises = np.flatnonzero(covered & ~np.append(False, covered[:-1]))
    falls = np.flatnonzero(~covered & np.append(False, covered[:-1]))
    start, stop = edges[rises], edges[falls]
    owner = _owners(columns, start, stop, large_page_bytes)
    return MappedRanges(start, stop - start, *owner)


def _owners(
    columns: DeviceColumns, start: I64, stop: I64, large_page_bytes: int
) -> tuple[I32, I32, Bools]:
    """Return stream, pool and pool class of each range, from the reservation it lies in."""
    ever = np.flatnonzero(
        (columns.action == Action.SEGMENT_MAP) | (columns.action == Action.SEGMENT_UNMAP)
    )
    final = np.flatnonzero(columns.seg_is_expandable)
    join = np.concatenate
    low = join([columns.seg_address[final], columns.address[ever]])
    high = low + join([columns.seg_size[final], columns.size[ever]])
    stream = join([columns.seg_stream[final], columns.stream[ever]])
    pool = join([columns.seg_pool[final], columns.pool[ever]])
    by_page = columns.size[ever] % max(1, large_page_bytes) != 0
    small = join([columns.seg_is_small[final], by_page])
    is_final = join([np.ones(len(final), np.bool_), np.zeros(len(ever), np.bool_)])
    order = np.argsort(low, kind="stable")
    reach = np.maximum.accumulate(high[order])
    fresh = np.ones(len(order), np.bool_)
    fresh[1:] = low[order][1:] > reach[:-1]
    cluster = np.empty(len(order), np.int64)
    cluster[order] = np.cumsum(fresh) - 1
    n = int(np.count_nonzero(fresh))
    head = order[fresh]
    cluster_small = np.zeros(n, np.bool_)
    cluster_small[cluster[small & ~is_final]] = True
    cluster_small[cluster[is_final]] = small[is_final]
    cluster_pool, cluster_stream = pool[head], stream[head]
    cluster_pool[cluster[is_final]] = pool[is_final]
    of = np.searchsorted(low[head], start, side="right") - 1
    del stop
    return (
        cluster_stream[of].astype(np.int32),
        cluster_pool[of].astype(np.int32),
        cluster_small[of],
    )
