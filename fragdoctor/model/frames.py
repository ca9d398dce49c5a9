"""DataFrames of a snapshot, for notebooks. Text is as hostile as the file that it came from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from fragdoctor.model.finding import Location
from fragdoctor.model.snapshot import Action, BlockState, SegmentType

if TYPE_CHECKING:
    from collections.abc import Sequence
    from enum import IntEnum

    import numpy.typing as npt

    from fragdoctor.model.snapshot import Snapshot


def events_frame(snapshot: Snapshot, device: int | None = None) -> pd.DataFrame:
    """Return the trace, one row an event, oldest first within a device.

    Columns: ``device``, ``action``, ``address``, ``size_bytes``, ``stream``, ``time_us`` (missing
    where the file has none), ``pool``, ``compile_context``, ``user_metadata``,
    ``oom_free_bytes`` (``oom`` rows only), ``location`` (innermost frame), ``stack`` (stack id).
    """
    events = snapshot.events
    rows = slice(0, len(events)) if device is None else events.device_slice(device)
    n_per_device = np.diff(events.offsets)
    devices = np.repeat(np.arange(len(n_per_device), dtype=np.int32), n_per_device)
    time_us = pd.array(events.time_us[rows], dtype="Int64")
    time_us[events.time_us[rows] < 0] = pd.NA
    return pd.DataFrame(
        {
            "device": devices[rows],
            "action": _names(events.action[rows], Action),
            "address": events.address[rows],
            "size_bytes": events.size_bytes[rows],
            "stream": snapshot.streams[events.stream[rows]],
            "time_us": time_us,
            "pool": _pools(snapshot, events.pool[rows]),
            "compile_context": _texts(snapshot, events.compile_context[rows]),
            "user_metadata": _texts(snapshot, events.user_metadata[rows]),
            "oom_free_bytes": _oom_free(snapshot, rows),
            "location": _locations(snapshot, events.stack[rows]),
            "stack": events.stack[rows],
        }
    )


def segments_frame(snapshot: Snapshot) -> pd.DataFrame:
    """Return the segments, one row each, in the order of the file."""
    s = snapshot.segments
    return pd.DataFrame(
        {
            "device": s.device,
            "address": s.address,
            "total_bytes": s.total_bytes,
            "allocated_bytes": s.allocated_bytes,
            "active_bytes": s.active_bytes,
            "requested_bytes": s.requested_bytes,
            "stream": snapshot.streams[s.stream],
            "kind": _names(s.kind, SegmentType),
            "pool": _pools(snapshot, s.pool),
            "is_expandable": s.is_expandable,
            "n_blocks": np.diff(s.block_offsets),
            "location": _locations(snapshot, s.stack),
            "stack": s.stack,
        }
    )


def blocks_frame(snapshot: Snapshot) -> pd.DataFrame:
    """Return the blocks, one row each; ``segment`` is the row of ``segments_frame``."""
    b = snapshot.blocks
    return pd.DataFrame(
        {
            "device": snapshot.segments.device[b.segment],
            "segment": b.segment,
            "address": b.address,
            "size_bytes": b.size_bytes,
            "requested_bytes": b.requested_bytes,
            "state": _names(b.state, BlockState),
            "location": _locations(snapshot, b.stack),
            "stack": b.stack,
        }
    )


def _names(codes: npt.NDArray[np.uint8], enum: type[IntEnum]) -> pd.Categorical[Any]:
    names = pd.Index([member.name.lower() for member in enum], dtype=object)
    return pd.Categorical.from_codes(codes.astype(np.int8), categories=names)


def _categorical(ids: npt.NDArray[np.int32], texts: Sequence[str]) -> pd.Categorical[Any]:
    """Return texts by id as a categorical; equal texts become one category, -1 is missing."""
    codes, categories = pd.factorize(np.array(texts, dtype=object))
    lookup = np.append(codes, -1).astype(np.int32)
    return pd.Categorical.from_codes(lookup[ids], categories=pd.Index(categories, dtype=object))


def _texts(snapshot: Snapshot, ids: npt.NDArray[np.int32]) -> pd.Categorical[Any]:
    used, compact = np.unique(ids, return_inverse=True)
    texts = [snapshot.strings[int(i)] for i in used if i >= 0]
    n_missing = len(used) - len(texts)
    return _categorical((compact.ravel() - n_missing).astype(np.int32), texts)


def _locations(snapshot: Snapshot, ids: npt.NDArray[np.int32]) -> pd.Categorical[Any]:
    texts = []
    offsets = snapshot.stacks.offsets
    for i in range(len(snapshot.stacks)):
        if offsets[i] == offsets[i + 1]:
            texts.append("")
            continue
        texts.append(str(Location(*snapshot.frame(int(snapshot.stacks.frames[offsets[i]])))))
    return _categorical(ids, texts)


def _pools(snapshot: Snapshot, ids: npt.NDArray[np.int32]) -> pd.Categorical[Any]:
    return _categorical(ids, [f"({a}, {b})" for a, b in snapshot.pools.tolist()])


def _oom_free(snapshot: Snapshot, rows: slice) -> Any:
    column = pd.array(np.zeros(rows.stop - rows.start, np.uint64), dtype="UInt64")
    column[:] = pd.NA
    for row, n_bytes in snapshot.oom_free_bytes.items():
        if rows.start <= row < rows.stop:
            column[row - rows.start] = n_bytes
    return column
