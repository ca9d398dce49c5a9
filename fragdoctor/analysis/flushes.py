"""Runs of segment_free / segment_unmap, and what probably caused each.

A trace has no marker for a flush. Three things give memory back: a retry (the driver refused a new
segment, so everything free was returned and it was asked again), the garbage collection of
``garbage_collection_threshold``, and ``torch.cuda.empty_cache()``. They are told apart so:

- what follows a retry or a collection is, in the same call of malloc, a ``segment_alloc`` or
  ``segment_map``, or an ``oom``; after ``empty_cache()`` it is anything;
- a retry means that the driver had refused. If the device already gave PyTorch as much as was
  reserved before the run plus the new segment, at another time of the same trace, then it had not,
  and the run was ``empty_cache()`` or a collection;
- with a threshold in force, a run which left whole free segments standing was a collection, since a
  retry returns all of them.

An ``empty_cache()`` directly before an allocation that needs a new segment on a nearly full device
looks the same as a retry and is called one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from fragdoctor.analysis.columns import DeviceColumns
from fragdoctor.analysis.result import Flush
from fragdoctor.analysis.timeline import Undone
from fragdoctor.model.settings import AllocatorSettings
from fragdoctor.model.snapshot import I64, Action

RETRY, COLLECTION, EMPTY_CACHE = "retry", "gc", "empty_cache"
MAX_FLUSHES: Final = 10_000
# Looking for whole free segments takes time in the number of segments, once a flush.
MAX_CHECKED: Final = 200


@dataclass(frozen=True, slots=True)
class Flushes:
    """All runs, oldest first, and the retries they and the ooms imply."""

    runs: tuple[Flush, ...]
    n_retries: int


def find_flushes(columns: DeviceColumns, settings: AllocatorSettings, undone: Undone) -> Flushes:
    """Return the runs of returned memory with their likely cause, and the inferred retries.

    Retries are what ``num_alloc_retries`` counts: one for each ``oom`` and one for each run whose
    cause is ``retry`` and that was followed by new memory. (A retry during which nothing could be
    returned and which succeeded nevertheless leaves no trace.)
    """
    action = columns.action
    releases = (action == Action.SEGMENT_FREE) | (action == Action.SEGMENT_UNMAP)
    rows = np.flatnonzero(releases)
    n_ooms = int(np.count_nonzero(action == Action.OOM))
    if not len(rows):
        return Flushes((), n_ooms)
    begins = np.append(True, np.diff(rows) > 1)
    first = rows[begins]
    last = rows[np.append(begins[1:], True)]
    released = np.add.reduceat(columns.size[rows], np.flatnonzero(begins))
    follows = np.full(len(last), -1)
    has_next = last + 1 < len(action)
    follows[has_next] = action[last[has_next] + 1]
    is_new = (follows == Action.SEGMENT_ALLOC) | (follows == Action.SEGMENT_MAP)
    refused = _could_be_refused(columns, undone, first, last, is_new)
    is_oom = follows == Action.OOM
    has_gc = settings.garbage_collection_threshold > 0
    runs, n_retries = [], n_ooms
    for i in range(len(first)):
        cause = RETRY if is_oom[i] or (is_new[i] and refused[i]) else EMPTY_CACHE
        if has_gc and is_new[i] and _is_collection(undone, int(last[i]) + 1, i):
            cause = COLLECTION
        n_retries += cause == RETRY and bool(is_new[i])
        if len(runs) < MAX_FLUSHES:
            row = columns.first_row
            runs.append(Flush(row + int(first[i]), row + int(last[i]), int(released[i]), cause))
    return Flushes(tuple(runs), n_retries)


def _could_be_refused(
    columns: DeviceColumns, undone: Undone, first: I64, last: I64, is_new: I64
) -> I64:
    """Return for each run whether the driver may have refused the new memory before it."""
    reserved = undone.timeline.reserved_bytes
    n = columns.n_events
    wanted = np.zeros(len(first), np.int64)
    wanted[is_new] = columns.size[np.minimum(last[is_new] + 1, n - 1)]
    result: I64 = reserved[first] + wanted > reserved.max()
    return result


def _is_collection(undone: Undone, k: int, index: int) -> bool:
    """Return whether whole free segments were left after k events."""
    if index >= MAX_CHECKED:
        return False
    spans, lives = undone.spans, undone.lifetimes
    there = np.flatnonzero((spans.start < k) & (spans.done >= k))
    live = lives.active_at(k)
    if not len(there):
        return False
    at = np.searchsorted(spans.address[there], lives.address[live], side="right") - 1
    is_held = np.zeros(len(there), np.bool_)
    is_held[at[at >= 0]] = True
    return not bool(is_held.all())
