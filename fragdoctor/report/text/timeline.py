"""The timeline: allocated and reserved memory over the trace, as an area a few lines high."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from fragdoctor.model.diagnosis import Diagnosis, TimelineStrip
from fragdoctor.model.phases import Phase
from fragdoctor.report.phase_words import PHASE_NAMES
from fragdoctor.report.text.page import INDENT, Cell, Column, Page, Span, joined
from fragdoctor.units import format_size, plural

MIN_EVENTS: Final = 20
"""Of fewer events the figures say it all."""

N_ROWS: Final = 6

# Scaled to a capacity that is mostly empty, the curve would be a line on the floor.
_MIN_FILL: Final = 0.25


@dataclass(frozen=True, slots=True)
class AreaGlyphs:
    """How an area is drawn: ``steps`` are parts of a cell from low to full."""

    steps: str
    reserved: str
    axis: str
    oom: str
    flush: str


UNICODE_AREA: Final = AreaGlyphs("▁▂▃▄▅▆▇█", "░", "│", "x", "^")
ASCII_AREA: Final = AreaGlyphs("#", ":", "|", "x", "^")

# Below the picture, a letter says which phase of training each column is in. Of phases narrower
# than this many columns on average the letters would be noise.
_PHASE_LETTERS: Final = {
    Phase.SETUP: ("s", "dim"),
    Phase.FORWARD: ("f", "green"),
    Phase.BACKWARD: ("b", "blue"),
    Phase.OPTIMIZER: ("o", "magenta"),
    Phase.FORWARD_BACKWARD: ("m", "blue"),
    Phase.UNKNOWN: (" ", ""),
}
_MIN_PHASE_WIDTH: Final = 1.5

_ALLOCATED: Final = "cyan"
_RESERVED: Final = "yellow"
_OOM: Final = "bold red"
_FLUSH: Final = "magenta"


def write_timeline(page: Page, diagnosis: Diagnosis) -> None:
    """Write the memory of the verdict's device over its trace, if that is long enough to show."""
    strip = diagnosis.timeline
    if strip is None or strip.n_events <= MIN_EVENTS or max(strip.peak_bytes) <= 0:
        return
    glyphs = UNICODE_AREA if page.options.unicode else ASCII_AREA
    top, meaning = top_line(strip)
    page.heading(
        "Timeline",
        f"GPU {strip.device}, {plural(strip.n_events, 'event')}; the top is {meaning}",
    )
    label = format_size(top)
    n_columns = page.width - 2 * INDENT - len(label) - 2
    allocated = resampled(strip.allocated_bytes, n_columns)
    reserved = resampled(strip.reserved_bytes, n_columns)
    for row in reversed(range(N_ROWS)):
        name = label if row == N_ROWS - 1 else "0" if row == 0 else ""
        spans: list[Span] = [(f"{name:>{len(label)}} {glyphs.axis}", "dim")]
        page.verbatim([*spans, *_row(glyphs, allocated, reserved, top, row)])
    phases = _phase_columns(strip, n_columns)
    if phases:
        letters = [_PHASE_LETTERS[p] for p in phases]
        page.verbatim([" " * (len(label) + 2), *joined(list(letters))])
    marks = _marks(glyphs, strip, n_columns)
    if marks:
        page.verbatim([" " * (len(label) + 2), *marks])
    _write_figures(page, glyphs, strip)
    if phases:
        page.paragraph(_phase_key(phases))


def top_line(strip: TimelineStrip) -> tuple[int, str]:
    """Return the bytes at the top of the picture and what they are."""
    peak = max(strip.peak_bytes)
    capacity = strip.capacity_bytes or 0
    if peak <= capacity <= peak / _MIN_FILL:
        return capacity, "the capacity"
    return peak, "the peak"


def resampled(values: Sequence[int], n_columns: int) -> list[int]:
    """Return one value for each column: the highest of all that fall in it, even in part."""
    n = len(values)
    return [
        max(values[c * n // n_columns : max(c * n // n_columns + 1, -(-(c + 1) * n // n_columns))])
        for c in range(n_columns)
    ]


def _row(
    glyphs: AreaGlyphs, allocated: Sequence[int], reserved: Sequence[int], top: int, row: int
) -> list[Span]:
    """Return the cells of one line, from the bottom line 0 up."""
    steps = len(glyphs.steps)
    spans: list[Span] = []
    for live, held in zip(allocated, reserved, strict=True):
        filled = round(live * N_ROWS * steps / top) - row * steps
        if filled > 0:
            spans.append((glyphs.steps[min(filled, steps) - 1], _ALLOCATED))
        elif round(held * N_ROWS / top) > row:
            spans.append((glyphs.reserved, _RESERVED))
        else:
            spans.append(" ")
    return joined(spans)


def _phase_columns(strip: TimelineStrip, n_columns: int) -> list[Phase]:
    """Return the phase of each column; empty where there are none, or too many to see."""
    n = len(strip.phases)
    if not n:
        return []
    columns = [strip.phases[min(c * n // n_columns, n - 1)] for c in range(n_columns)]
    n_runs = 1 + sum(a is not b for a, b in pairwise(columns))
    return columns if n_columns >= _MIN_PHASE_WIDTH * n_runs else []


def _phase_key(phases: Sequence[Phase]) -> list[Span]:
    said: list[Span] = []
    for phase, (letter, style) in _PHASE_LETTERS.items():
        if phase in phases and phase is not Phase.UNKNOWN:
            said += [(letter, style), f" {PHASE_NAMES[phase]}  "]
    return said


def _marks(glyphs: AreaGlyphs, strip: TimelineStrip, n_columns: int) -> list[Span]:
    """Return the line of marks, an OOM before a flush; empty where nothing happened."""
    n = len(strip.allocated_bytes)
    cells: list[Span] = [" "] * n_columns
    for columns, mark in (
        (strip.flush_columns, (glyphs.flush, _FLUSH)),
        (strip.oom_columns, (glyphs.oom, _OOM)),
    ):
        for column in columns:
            cells[min(column * n_columns // n, n_columns - 1)] = mark
    return joined(cells) if strip.flush_columns or strip.oom_columns else []


def _write_figures(page: Page, glyphs: AreaGlyphs, strip: TimelineStrip) -> None:
    names = ((glyphs.steps[-1], _ALLOCATED, "allocated"), (glyphs.reserved, _RESERVED, "reserved"))
    rows: list[list[Cell]] = [
        [
            (glyph, style),
            name,
            format_size(strip.first_bytes[i]),
            format_size(strip.peak_bytes[i]),
            format_size(strip.last_bytes[i]),
        ]
        for i, (glyph, style, name) in enumerate(names)
    ]
    titles = (Column(align="right", title=t) for t in ("first", "peak", "last"))
    page.table([Column(), Column(), *titles], rows)
    said: list[Span] = []
    if strip.n_ooms:
        said += [(glyphs.oom, _OOM), f"  {plural(strip.n_ooms, 'OOM')}  "]
    if strip.n_flushes:
        said += [(glyphs.flush, _FLUSH), f"  {plural(strip.n_flushes, 'flush', 'flushes')}"]
    if said:
        page.paragraph(said)
