"""Tables of a snapshot as CSV: events, blocks, segments, allocations.

A row of the table of allocations is a block's whole life, with its true size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fragdoctor.model.snapshot import Snapshot
from fragdoctor.report import escape
from fragdoctor.trace.lives import BEFORE, NEVER
from fragdoctor.trace.trace import Trace

if TYPE_CHECKING:
    import pandas as pd

_CHUNK: Final = 100_000


def table(snapshot: Snapshot, name: str, device: int | None = None) -> pd.DataFrame:
    """Return a table by name as a DataFrame, with all devices if ``device`` is None."""
    if name == "allocations":
        import pandas as pd  # noqa: PLC0415 - pandas is heavy

        frames = [_allocations(snapshot, d) for d in snapshot.devices if device in (None, d)]
        return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()
    if name == "events":
        return snapshot.events_frame(device)
    frame = snapshot.blocks_frame() if name == "blocks" else snapshot.segments_frame()
    return frame if device is None else frame[frame["device"] == device].reset_index(drop=True)


def _allocations(snapshot: Snapshot, device: int) -> pd.DataFrame:
    """Return all blocks of a device that were live at some time, one row per block.

    ``start_event``, ``free_event`` and ``done_event`` are rows of the events table, missing if the
    event was before the trace or not by its end. ``size_bytes`` is the block's size, found by
    undoing the trace; ``requested_bytes`` is the requested size.
    """
    import pandas as pd  # noqa: PLC0415 - pandas is heavy

    from fragdoctor.model import frames  # noqa: PLC0415 - loads pandas

    trace = Trace.of(snapshot, device)
    lives = trace.lives

    def rows(values: Any) -> Any:
        known = (values != BEFORE) & (values != NEVER)
        return frames.nullable(np.where(known, values.astype(np.int64) + trace.first_row, -1))

    return pd.DataFrame(
        {
            "device": np.full(len(lives), device, np.int32),
            "address": lives.address,
            "size_bytes": lives.size_bytes,
            "requested_bytes": lives.requested_bytes,
            "stream": snapshot.streams[lives.stream],
            "start_event": rows(lives.start),
            "free_event": rows(lives.free),
            "done_event": rows(lives.done),
            "is_live": lives.survives,
            "location": frames.texts_of(lives.stack, snapshot.innermost_frames()),
            "stack": lives.stack,
        }
    )


def write_csv(frame: pd.DataFrame, write: Callable[[str], object]) -> None:
    """Write a DataFrame as CSV in parts; no text can start a formula in a spreadsheet."""
    for start in range(0, max(1, len(frame)), _CHUNK):
        part = frame.iloc[start : start + _CHUNK].copy()
        for name in part.columns:
            if str(part[name].dtype) in ("category", "object", "string", "str"):
                safe = part[name].map(lambda v: escape.csv_cell(str(v)), na_action="ignore")
                part[name] = safe.astype(object)
        write(part.to_csv(index=False, header=start == 0, lineterminator="\n"))
