"""Drawings for a terminal: a bar to scale, and an area over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Final

from msgspec import Struct
from rich.text import Text

from fragdoctor.model.diagnosis import TimelineStrip
from fragdoctor.report.document import Bar, BarPart, Column, dim
from fragdoctor.report.text_layout import INDENT, Page, styled
from fragdoctor.report.words import share_of
from fragdoctor.units import format_size, plural

N_ROWS: Final = 4
"""Height of the timeline's area in lines."""

# The least of the capacity that must be in use to scale to it: below, the curve would look flat.
_MIN_FILL: Final = 0.25


class Ink(Struct, frozen=True):
    """How one kind of memory is drawn."""

    unicode: str
    ascii: str
    style: str

    def mark(self, page: Page, n: int = 1) -> tuple[str, str]:
        """Return ``n`` cells drawn in this ink for a page."""
        return (self.unicode if page.options.unicode else self.ascii) * n, self.style


_BAR_INKS: Final[Mapping[str, Ink]] = {
    "allocated": Ink("█", "#", "cyan"),
    "pending": Ink("▚", "~", "magenta"),
    "stranded": Ink("▓", "%", "red"),
    "pools": Ink("▞", "+", "yellow"),
    "cached": Ink("▓", "%", "red"),
    "releasable": Ink("▒", "=", "green"),
    "outside": Ink("x", "x", "blue"),
    "free": Ink("·", ".", "dim"),
}
_ALLOCATED: Final = "cyan"
_RESERVED: Final = "yellow"
_OOM: Final = ("x", "bold red")
_FLUSH: Final = ("^", "magenta")


def draw_bar(page: Page, bar: Bar) -> None:
    """Draw a bar to scale and the legend that says what each part is."""
    frame = len(page.glyphs.bar_start) + len(page.glyphs.bar_end)
    cells = apportion(bar.parts, page.width - 2 * INDENT - frame)
    inks = [_BAR_INKS[part.name] for part in bar.parts]
    start, end = (page.glyphs.bar_start, "dim"), (page.glyphs.bar_end, "dim")
    inside = [ink.mark(page, n) for ink, n in zip(inks, cells, strict=True)]
    page.drawn(_joined([start, *inside, end]))
    number = Column(kind="right")
    columns = (Column(), Column(), number, number, Column(kind="wrap"))
    legend = [
        [Text(*ink.mark(page)), Text(part.name), Text(format_size(part.n_bytes)),
         Text(share_of(part.n_bytes, bar.total_bytes)), styled(dim(part.meaning))]
        for part, ink in zip(bar.parts, inks, strict=True)
    ]  # fmt: skip
    page.grid(columns, legend)


def apportion(parts: Sequence[BarPart], width: int) -> list[int]:
    """Return the number of cells of each part: to scale, at least one each, ``width`` in all."""
    total = sum(p.n_bytes for p in parts)
    if not total or width < len(parts):
        return [0] * len(parts)
    exact = [p.n_bytes * width / total for p in parts]
    cells = [max(1, int(x)) for x in exact]
    # Largest remainder first; the largest part gives up the cells that small parts gained.
    by_remainder = sorted(range(len(parts)), key=lambda i: int(exact[i]) - exact[i])
    step = 0
    while sum(cells) < width:
        cells[by_remainder[step % len(parts)]] += 1
        step += 1
    while sum(cells) > width:
        cells[max(range(len(parts)), key=lambda i: cells[i])] -= 1
    return cells


def draw_timeline(page: Page, strip: TimelineStrip) -> None:
    """Draw allocated and reserved memory over the trace as an area, with a key."""
    top = top_bytes(strip)
    label = format_size(top)
    n_columns = page.width - 2 * INDENT - len(label) - 2
    allocated = resampled(strip.allocated_bytes, n_columns)
    reserved = resampled(strip.reserved_bytes, n_columns)
    for row in reversed(range(N_ROWS)):
        name = label if row == N_ROWS - 1 else "0" if row == 0 else ""
        axis = (f"{name:>{len(label)}} {page.glyphs.axis}", "dim")
        page.drawn(_joined([axis, *_area(page, allocated, reserved, top, row)]))
    margin = (" " * (len(label) + 2), "")
    marks = _marks(strip, n_columns)
    at_end = bool(marks) and all(mark == (" ", "") for mark in marks[:-1])
    if marks and not at_end:
        page.drawn(_joined([margin, *marks]))
    _write_key(page, strip, at_end=at_end)


def top_bytes(strip: TimelineStrip) -> int:
    """Return the bytes at the top of the picture: the capacity if the peak is near it."""
    peak, capacity = max(strip.peak_bytes), strip.capacity_bytes or 0
    return capacity if peak <= capacity <= peak / _MIN_FILL else peak


def resampled(values: Sequence[int], n_columns: int) -> list[int]:
    """Return one value per column: the highest of all values that overlap the column."""
    n = len(values)
    return [
        max(values[c * n // n_columns : max(c * n // n_columns + 1, -(-(c + 1) * n // n_columns))])
        for c in range(n_columns)
    ]


def _area(
    page: Page, allocated: Sequence[int], reserved: Sequence[int], top: int, row: int
) -> list[tuple[str, str]]:
    """Return the cells of one line; line 0 is at the bottom."""
    steps = page.glyphs.steps
    cells: list[tuple[str, str]] = []
    for live, held in zip(allocated, reserved, strict=True):
        filled = round(live * N_ROWS * len(steps) / top) - row * len(steps)
        if filled > 0:
            cells.append((steps[min(filled, len(steps)) - 1], _ALLOCATED))
        elif round(held * N_ROWS / top) > row:
            cells.append((page.glyphs.reserved, _RESERVED))
        else:
            cells.append((" ", ""))
    return cells


def _marks(strip: TimelineStrip, n_columns: int) -> list[tuple[str, str]]:
    """Return the line of marks (an OOM hides a flush), or nothing if nothing happened."""
    n = len(strip.allocated_bytes)
    cells = [(" ", "")] * n_columns
    for columns, mark in ((strip.flush_columns, _FLUSH), (strip.oom_columns, _OOM)):
        for column in columns:
            cells[min(column * n_columns // n, n_columns - 1)] = mark
    return cells if strip.flush_columns or strip.oom_columns else []


def _write_key(page: Page, strip: TimelineStrip, *, at_end: bool) -> None:
    allocated, reserved = (format_size(n) for n in strip.peak_bytes)
    key = [
        ((page.glyphs.steps[-1], _ALLOCATED), f"allocated (peak {allocated})"),
        ((page.glyphs.reserved, _RESERVED), f"reserved (peak {reserved})"),
    ]
    if strip.n_ooms:
        where = " at the end" if at_end else ""
        key.append((_OOM, f"{plural(strip.n_ooms, 'OOM')}{where}"))
    if strip.n_flushes:
        key.append((_FLUSH, plural(strip.n_flushes, "flush", "flushes")))
    page.key(key)


def _joined(cells: Sequence[tuple[str, str]]) -> Text:
    """Return cells as text, joining neighbors of the same style into one span."""
    whole = Text()
    for style, run in groupby(cells, key=lambda cell: cell[1]):
        whole.append("".join(text for text, _ in run), style=style or None)
    return whole
