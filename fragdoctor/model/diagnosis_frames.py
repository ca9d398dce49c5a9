"""DataFrames of a diagnosis, for notebooks. Text is as hostile as the file that it came from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from fragdoctor.model.diagnosis import Diagnosis
    from fragdoctor.model.finding import Location


def holders_frame(diagnosis: Diagnosis) -> pd.DataFrame:
    """Return live memory by source line, one row a line, largest first.

    Columns: ``device``, ``location``, ``now_bytes``, ``peak_bytes`` (missing without a trace),
    ``n_blocks``.
    """
    columns = ("device", "location", "now_bytes", "peak_bytes", "n_blocks")
    rows = (
        (h.device, _place(h.location), h.now_bytes, h.peak_bytes, h.n_blocks)
        for h in diagnosis.holders
    )
    return _frame(rows, columns, numbers=("now_bytes", "peak_bytes", "n_blocks"))


def pins_frame(diagnosis: Diagnosis) -> pd.DataFrame:
    """Return the groups of live blocks that keep free memory from being returned, worst first.

    Columns: ``device``, ``location``, ``pinned_bytes`` (what would be free without them),
    ``n_blocks``, ``block_bytes``, ``age_events`` (missing where they are older than the trace).
    """
    columns = ("device", "location", "pinned_bytes", "n_blocks", "block_bytes", "age_events")
    rows = (
        (p.device, _place(p.location), p.pinned_bytes, p.n_blocks, p.block_bytes, p.age_events)
        for p in diagnosis.pins
    )
    return _frame(rows, columns, numbers=columns[2:])


def checklist_frame(diagnosis: Diagnosis) -> pd.DataFrame:
    """Return the checklist, one row an item, by its id.

    Columns: ``title``, ``status``, ``value``, ``detail``, ``source``.
    """
    columns = ("id", "title", "status", "value", "detail", "source")
    rows = (
        (i.id, i.title, str(i.status), i.value, i.detail, i.source) for i in diagnosis.checklist
    )
    return _frame(rows, columns).set_index("id")


def recommendations_frame(diagnosis: Diagnosis) -> pd.DataFrame:
    """Return what to do, best first, then what would not help (``rank`` 0), by rank.

    Columns: ``code``, ``title``, ``setting``, ``change``, ``confidence``, ``method``, ``fits``,
    ``peak_reserved_bytes``, ``retries``, ``margin_bytes``; what was not tested is missing.
    """
    numbers = ("peak_reserved_bytes", "retries", "margin_bytes")
    columns = ("rank", "code", "title", "setting", "change", "confidence", "method", "fits")
    rows = (
        (r.rank, r.code, r.title, r.setting, r.change, str(r.confidence), r.predicted.method,
         r.predicted.fits, r.predicted.peak_reserved_bytes, r.predicted.retries,
         r.predicted.margin_bytes)
        for r in (*diagnosis.recommendations, *diagnosis.rejected)
    )  # fmt: skip
    frame = _frame(rows, (*columns, *numbers), numbers=numbers)
    return frame.astype({"fits": "boolean"}).set_index("rank")


def _frame(
    rows: Iterable[tuple[Any, ...]], columns: Sequence[str], numbers: Sequence[str] = ()
) -> pd.DataFrame:
    frame = pd.DataFrame(list(rows), columns=list(columns), dtype=object)
    return frame.astype(dict.fromkeys(numbers, "Int64"))


def _place(location: Location | None) -> str | None:
    return None if location is None else str(location)
