"""The timeline for the page: as fine as the size budget allows, without ever losing a peak.

The state after each event is grouped into buckets of 1, 2, 4, ... events; each bucket keeps the
highest and the lowest value of each curve, so that a maximum over any range of whole buckets is
exact. The page's script merges buckets further when it draws.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from msgspec import Struct

from fragdoctor.analysis.device import RETRY
from fragdoctor.analysis.result import DeviceAnalysis
from fragdoctor.model.arrays import distinct
from fragdoctor.model.finding import line_text
from fragdoctor.model.phases import TrainingPhase
from fragdoctor.model.snapshot import I64, Annotation, Snapshot
from fragdoctor.report.page.blob import BlobWriter, Sink, compressed_size
from fragdoctor.trace.trace import Trace

MAX_TIME_SAMPLES: Final = 16_384
MAX_PHASES: Final = 3000
MAX_MARKS: Final = 2000
MAX_LINE_TEXT: Final = 200
MAX_PHASE_DEPTH: Final = 4
MAX_PASSES: Final = 20_000
SERIES: Final = ("allocated", "active", "reserved")


class NamedRange(Struct, frozen=True):
    """A recorded range: states ``first`` to ``last``, at nesting level ``depth``."""

    name: str
    first: int
    last: int
    depth: int


def timeline_data(
    analysis: DeviceAnalysis, sink: Sink, budget_bytes: float | None
) -> dict[str, Any] | None:
    """Return the JSON part of one device's timeline, or None without a trace.

    ``budget_bytes`` limits the compressed curves; the finest bucket size that fits is used. None
    leaves the curves out: the page computes them from the blocks.
    """
    if analysis.timeline is None or analysis.n_events == 0:
        return None
    trace, blob = analysis.trace, sink.blob
    snapshot = trace.snapshot
    rows = snapshot.events.device_slice(analysis.device)
    data: dict[str, Any] = {
        "n_events": analysis.n_events,
        "bucket": 1,
        "peak_state": analysis.timeline.peak_allocated_state,
        "time": _time(snapshot, rows, blob),
        **_marks(analysis),
        **dict.fromkeys((*SERIES, *(f"{name}_drop" for name in SERIES))),
    }
    if budget_bytes is not None:
        data["bucket"], curves = _finest(trace, int(budget_bytes))
        data |= {name: blob.add(values) for name, values in curves.items()}
    phases = named_ranges(snapshot, analysis.device)
    kept = sorted(phases, key=lambda p: p.first - p.last)[:MAX_PHASES]
    data["phases"] = {
        "name": blob.add([sink.tables.string(p.name) for p in kept]),
        "first": blob.add([p.first for p in kept]),
        "last": blob.add([p.last for p in kept]),
        "depth": blob.add([p.depth for p in kept]),
    }
    data["training"] = _training(analysis, blob)
    return data


def _training(analysis: DeviceAnalysis, blob: BlobWriter) -> dict[str, Any] | None:
    """Return the passes of training phases: pass i lasts from state ``first[i]`` to the next."""
    found = analysis.phases
    if found is None or len(found.report.phases) < 2 or len(found.labels) > MAX_PASSES:
        return None
    return {
        "names": [phase.word for phase in TrainingPhase],
        "label": blob.add(found.labels.astype(np.int64)),
        "first": blob.add(found.first),
    }


def _finest(trace: Trace, budget_bytes: int) -> tuple[int, dict[str, I64]]:
    """Return the smallest bucket size whose curves fit a budget, and the curves."""
    n_states = trace.n_events + 1
    size = 1
    # Three curves never take less than two bits per state, so skip sizes that cannot fit.
    while n_states // size > 4 * budget_bytes:
        size *= 2
    while True:
        curves = _curves(trace, size)
        if compressed_size([*curves.values()]) <= budget_bytes or n_states <= 64 * size:
            return size, curves
        size *= 2


def _curves(trace: Trace, size: int) -> dict[str, I64]:
    """Return each curve's highest value in each bucket, and how far below it the lowest is."""
    curves: dict[str, I64] = {}
    for name in SERIES:
        low, high = trace.totals.envelope(f"{name}_bytes", np.arange(0, trace.n_events + 1, size))
        curves[name] = high
        if size > 1:
            curves[f"{name}_drop"] = high - low
    return curves


def _times(snapshot: Snapshot, rows: slice) -> I64 | None:
    """Return the time of each event, never decreasing, or None if the file has no times."""
    times = snapshot.events.time_us[rows]
    if len(times) == 0 or int(times.min()) < 0:
        return None
    return np.maximum.accumulate(times)


def _time(snapshot: Snapshot, rows: slice, blob: BlobWriter) -> dict[str, Any] | None:
    times = _times(snapshot, rows)
    if times is None:
        return None
    count = min(len(times) + 1, MAX_TIME_SAMPLES)
    at = distinct(np.linspace(0, len(times), count).round().astype(np.int64))
    elapsed = times[np.maximum(at - 1, 0)] - times[0]  # state k is the one after event k - 1
    return {"state": blob.add(at), "us": blob.add(elapsed)}


def _marks(analysis: DeviceAnalysis) -> dict[str, Any]:
    """Return OOMs and flushes as states: the number of events up to and including them."""
    flushes = sorted(analysis.flushes, key=lambda f: -f.released_bytes)[:MAX_MARKS]
    ooms = analysis.ooms[-MAX_MARKS:]
    n_retries = sum(f.cause == RETRY for f in analysis.flushes)
    return {
        "n_ooms": len(analysis.ooms),
        "n_flushes": {"retries": n_retries, "others": len(analysis.flushes) - n_retries},
        "ooms": [
            [o.row + 1, o.rounded_bytes, o.device_free_bytes, _line(analysis, o.stack)]
            for o in ooms
        ],
        "flushes": sorted([f.last_row + 1, f.released_bytes, f.cause] for f in flushes),
    }


def _line(analysis: DeviceAnalysis, stack: int) -> str:
    """Return the user's line of a stack, or "" if none was recorded; it is hostile text."""
    trace = analysis.trace
    (frame,) = trace.stacks.lines_of(np.array([stack], np.int32)).tolist()
    return line_text(trace.snapshot.location(frame), "")[:MAX_LINE_TEXT]


def named_ranges(snapshot: Snapshot, device: int) -> list[NamedRange]:
    """Return the recorded ranges of a device, matching each END with its innermost START.

    A range without an END lasts to the end of the trace; an END without a START is left out.
    """
    marks = [a for a in snapshot.annotations if a.device in (device, -1)]
    times = _times(snapshot, snapshot.events.device_slice(device)) if marks else None
    if times is None:
        return []
    states = np.searchsorted(times, [a.time_us for a in marks], side="left")
    open_ranges: list[tuple[Annotation, int]] = []
    found: list[NamedRange] = []
    for mark, state in sorted(zip(marks, states.tolist(), strict=True), key=lambda m: m[0].time_us):
        if mark.stage == "START":
            open_ranges.append((mark, state))
        elif mark.stage == "END":
            _close(open_ranges, found, mark.name, state)
    found += [
        NamedRange(mark.name, state, len(times), depth)
        for depth, (mark, state) in enumerate(open_ranges)
    ]
    return [p for p in found if p.depth < MAX_PHASE_DEPTH and p.last > p.first]


def _close(
    open_ranges: list[tuple[Annotation, int]], found: list[NamedRange], name: str, state: int
) -> None:
    # Look only at the innermost 32: a hostile list must not cost quadratic time.
    for back in range(1, min(len(open_ranges), 32) + 1):
        mark, first = open_ranges[-back]
        if mark.name == name:
            del open_ranges[-back]
            found.append(NamedRange(name, first, state, len(open_ranges) - back + 1))
            return
