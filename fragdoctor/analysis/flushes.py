"""Runs of segment_free / segment_unmap, and what probably caused each.

A trace has no marker for a flush. Four things give memory back: a retry (the driver refused a new
segment, so everything free was returned and it was asked again), the garbage collection of
``garbage_collection_threshold``, the oversize blocks that ``max_split_size_mb`` returns before a
full flush, and ``torch.cuda.empty_cache()``. They are told apart so:

- what follows a retry or a collection is, in the same call of malloc, a ``segment_alloc`` or
  ``segment_map``, or an ``oom``; after ``empty_cache()`` it is anything;
- a retry means that the driver had refused. If the device already gave PyTorch as much as was
  reserved before the run plus the new segment, at another time of the same trace, then it had not,
  and the run was ``empty_cache()`` or a collection;
- a run which left whole free segments standing was a collection, or, without a threshold but with a
  ``max_split_size``, its search for one block; a retry returns all of them.

An ``empty_cache()`` directly before an allocation that needs a new segment on a nearly full device
looks the same as a retry and is called one.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from fragdoctor.analysis.result import Flush
from fragdoctor.frozen import frozen
from fragdoctor.model.snapshot import I64, Action, Bools
from fragdoctor.trace.trace import Trace

RETRY, COLLECTION, EMPTY_CACHE, MAX_SPLIT = "retry", "gc", "empty_cache", "max_split"
MAX_FLUSHES: Final = 10_000
# Looking for whole free segments takes time in the number of segments, once a flush.
MAX_CHECKED: Final = 200


@frozen
class Flushes:
    """All runs, oldest first, and the retries they and the ooms imply."""

    runs: tuple[Flush, ...]
    n_retries: int


def find_flushes(trace: Trace) -> Flushes:
    """Return the runs of returned memory with their likely cause, and the inferred retries.

    Retries are what ``num_alloc_retries`` counts: one for each ``oom`` and one for each run whose
    cause is ``retry`` and that was followed by new memory. (A retry during which nothing could be
    returned and which succeeded nevertheless leaves no trace.)
    """
    runs = _runs(trace)
    n_ooms = int(np.count_nonzero(trace.events.action == Action.OOM))
    if not len(runs.first):
        return Flushes((), n_ooms)
    refused = _could_be_refused(trace, runs)
    is_partial = runs.is_new & _is_partial(trace, runs)
    is_retry = runs.is_oom | (runs.is_new & refused & ~is_partial)
    n_retries = n_ooms + int(np.count_nonzero(is_retry & runs.is_new))
    partial = COLLECTION if trace.settings.garbage_collection_threshold > 0 else MAX_SPLIT
    cause = np.where(is_retry, RETRY, np.where(is_partial, partial, EMPTY_CACHE))
    kept = range(max(0, len(cause) - MAX_FLUSHES), len(cause))
    return Flushes(
        tuple(
            Flush(
                trace.first_row + int(runs.first[i]),
                trace.first_row + int(runs.last[i]),
                int(runs.released[i]),
                str(cause[i]),
            )
            for i in kept
        ),
        n_retries,
    )


@frozen
class _Runs:
    """Runs of releases: first and last row, bytes, and what follows (``next_bytes`` of it)."""

    first: I64
    last: I64
    released: I64
    is_new: Bools
    is_oom: Bools
    next_bytes: I64


def _runs(trace: Trace) -> _Runs:
    action, size = trace.events.action, trace.events.size_bytes
    rows = np.flatnonzero((action == Action.SEGMENT_FREE) | (action == Action.SEGMENT_UNMAP))
    begins = np.ones(len(rows), np.bool_)
    begins[1:] = np.diff(rows) > 1
    first = rows[begins]
    last = rows[np.append(begins[1:], True)] if len(rows) else rows
    released = np.add.reduceat(size[rows], np.flatnonzero(begins)) if len(rows) else rows
    follows = np.minimum(last + 1, max(0, trace.n_events - 1))
    has_next = follows > last
    is_new = (action[follows] == Action.SEGMENT_ALLOC) | (action[follows] == Action.SEGMENT_MAP)
    return _Runs(
        first=first,
        last=last,
        released=released,
        is_new=has_next & is_new,
        is_oom=has_next & (action[follows] == Action.OOM),
        next_bytes=size[follows],
    )


def _could_be_refused(trace: Trace, runs: _Runs) -> Bools:
    """Return for each run whether the driver may have refused the new memory before it."""
    reserved = trace.totals.at(runs.first)[:, 2]
    result: Bools = reserved + runs.next_bytes > trace.totals.peak_reserved_bytes
    return result


def _is_partial(trace: Trace, runs: _Runs) -> Bools:
    """Return for each run whether it returned less than a full flush would have.

    There are two ways to that: a collection, and, with ``max_split_size``, the search for blocks
    to return before the full flush, which begins with one that is large enough.
    """
    settings = trace.settings
    result = np.zeros(len(runs.first), np.bool_)
    if settings.max_split_bytes is not None:
        enough = np.maximum(runs.next_bytes, settings.max_split_bytes)
        result |= (runs.first == runs.last) & (runs.released >= enough)
    elif settings.garbage_collection_threshold <= 0:
        return result
    for i in np.flatnonzero(runs.is_new)[-MAX_CHECKED:].tolist():
        result[i] |= _leaves_free_segments(trace, int(runs.last[i]) + 1)
    return result


def _leaves_free_segments(trace: Trace, k: int) -> bool:
    """Return whether whole free segments were left after k events."""
    layout = trace.layout_at(k)
    is_free = layout.page_bytes == 0
    is_free[layout.live_segment] = False
    return bool(is_free.any())
