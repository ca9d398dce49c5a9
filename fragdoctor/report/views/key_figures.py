"""The two or three figures that a page shows large beside its answer."""

from __future__ import annotations

from fragdoctor.model.diagnosis import DeviceFigures, Diagnosis, Failure
from fragdoctor.report.document import Figure
from fragdoctor.units import format_size


def key_figures(diagnosis: Diagnosis) -> list[Figure]:
    """Return what was requested, available and missing; for a run that fits, the room left."""
    failure = diagnosis.failure
    device = diagnosis.verdict.device if failure is None else failure.device
    figures = diagnosis.figures_of(device) or next(iter(diagnosis.devices), None)
    if failure is not None and failure.requested_bytes:
        return _of_failure(failure, failure.requested_bytes, figures)
    return _of_room(figures) if figures is not None else []


def _of_failure(failure: Failure, asked_bytes: int, figures: DeviceFigures | None) -> list[Figure]:
    """Return the request, the largest piece that could have served it, and the shortfall."""
    free_bytes, segment_bytes = failure.free_bytes, failure.segment_bytes or 0
    asked = [Figure("asked", format_size(asked_bytes), "")]
    hole = None
    if figures is not None and (figures.moment is None or figures.moment.is_end):
        hole = figures.largest_free_block_bytes
    pieces = [
        (n_bytes, where)
        for n_bytes, where in ((hole, "in the cache"), (free_bytes, "on the device"))
        if n_bytes is not None
    ]
    if not pieces:
        return asked
    largest, where = max(pieces)
    found = Figure("largest piece free", format_size(largest), where)
    if largest < asked_bytes:
        missing = Figure("missing", format_size(asked_bytes - largest), "in one piece")
    elif where == "on the device" and largest < segment_bytes:
        of = f"of a segment of {format_size(segment_bytes)}"
        missing = Figure("missing", format_size(segment_bytes - largest), of)
    else:  # a limit may be lower than what was free
        return [*asked, found]
    return [*asked, found, missing]


def _of_room(figures: DeviceFigures) -> list[Figure]:
    """Return the peak, the capacity, and the difference."""
    shown = []
    if figures.peak_allocated_bytes is not None:
        shown.append(Figure("peak allocated", format_size(figures.peak_allocated_bytes), ""))
    if figures.peak_reserved_bytes is not None:
        shown.append(Figure("peak reserved", format_size(figures.peak_reserved_bytes), ""))
        if figures.capacity_bytes is not None:
            room = figures.capacity_bytes - figures.peak_reserved_bytes
            of = f"of {format_size(figures.capacity_bytes)}"
            shown.append(Figure("to spare", format_size(max(room, 0)), of))
    return shown
