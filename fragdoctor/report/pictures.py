"""Drawings for a terminal: a bar to scale, an area over time, segments with their blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from typing import Final

from msgspec import Struct
from rich.text import Text

from fragdoctor.model.diagnosis import RunKind, SegmentRun, TimelineStrip
from fragdoctor.model.phases import TrainingPhase
from fragdoctor.report.document import Bar, BarPart, Column, SegmentBars, dim
from fragdoctor.report.text_layout import GAP, INDENT, Page, styled
from fragdoctor.report.words import share_of
from fragdoctor.units import format_size, plural

N_ROWS: Final = 4
"""Height of the timeline's area in lines."""

# Below the picture, a letter shows the training phase of each column. If phases are narrower
# than this many columns on average, the letters would be noise.
_MIN_PHASE_WIDTH: Final = 1.5
# The least of the capacity that must be in use to scale to it: below, the curve would look flat.
_MIN_FILL: Final = 0.25
# A cell where several blocks alternate with this much free space is shown as mixed.
_MIXED_FREE: Final = 0.25
_LETTERS: Final = "ABCDEF"
_STRANDER_STYLE: Final = "bold red"


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
_BLOCK_INKS: Final[Mapping[str, tuple[Ink, str]]] = {
    "live": (Ink("█", "#", "cyan"), "live"),
    "pending": (Ink("▚", "~", "magenta"), "freed, waits for other streams"),
    "mixed": (Ink("▒", "=", "cyan"), "small blocks and holes"),
    "free": (Ink("·", ".", "dim"), "free"),
}
_PHASE_LETTERS: Final = {
    TrainingPhase.SETUP: ("s", "dim"),
    TrainingPhase.FORWARD: ("f", "green"),
    TrainingPhase.BACKWARD: ("b", "blue"),
    TrainingPhase.OPTIMIZER: ("o", "magenta"),
    TrainingPhase.UNKNOWN: (" ", ""),
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
    page.drawn(_framed(page, [ink.mark(page, n) for ink, n in zip(inks, cells, strict=True)]))
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


def draw_timeline(page: Page, strip: TimelineStrip, *, phases_too: bool) -> None:
    """Draw allocated and reserved memory over the trace as an area, with a key."""
    top, _ = top_line(strip)
    label = format_size(top)
    n_columns = page.width - 2 * INDENT - len(label) - 2
    allocated = resampled(strip.allocated_bytes, n_columns)
    reserved = resampled(strip.reserved_bytes, n_columns)
    for row in reversed(range(N_ROWS)):
        name = label if row == N_ROWS - 1 else "0" if row == 0 else ""
        axis = (f"{name:>{len(label)}} {page.glyphs.axis}", "dim")
        page.drawn(_joined([axis, *_area(page, allocated, reserved, top, row)]))
    margin = (" " * (len(label) + 2), "")
    phases = _phase_columns(strip, n_columns) if phases_too else []
    if phases:
        page.drawn(_joined([margin, *(_PHASE_LETTERS[p] for p in phases)]))
    marks = _marks(strip, n_columns)
    at_end = bool(marks) and all(mark == (" ", "") for mark in marks[:-1])
    if marks and not at_end:
        page.drawn(_joined([margin, *marks]))
    _write_key(page, strip, phases, at_end=at_end)


def top_line(strip: TimelineStrip) -> tuple[int, str]:
    """Return the bytes at the top of the picture, and the name of that level."""
    peak = max(strip.peak_bytes)
    capacity = strip.capacity_bytes or 0
    if peak <= capacity <= peak / _MIN_FILL:
        return capacity, "the capacity"
    return peak, "the peak"


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


def _phase_columns(strip: TimelineStrip, n_columns: int) -> list[TrainingPhase]:
    """Return the phase of each column, or nothing if there are none or too many to see."""
    n = len(strip.phases)
    if not n:
        return []
    columns = [strip.phases[min(c * n // n_columns, n - 1)] for c in range(n_columns)]
    n_runs = 1 + sum(a is not b for a, b in pairwise(columns))
    return columns if n_columns >= _MIN_PHASE_WIDTH * n_runs else []


def _marks(strip: TimelineStrip, n_columns: int) -> list[tuple[str, str]]:
    """Return the line of marks (an OOM hides a flush), or nothing if nothing happened."""
    n = len(strip.allocated_bytes)
    cells = [(" ", "")] * n_columns
    for columns, mark in ((strip.flush_columns, _FLUSH), (strip.oom_columns, _OOM)):
        for column in columns:
            cells[min(column * n_columns // n, n_columns - 1)] = mark
    return cells if strip.flush_columns or strip.oom_columns else []


def _write_key(
    page: Page, strip: TimelineStrip, phases: Sequence[TrainingPhase], *, at_end: bool
) -> None:
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
    page.key((_PHASE_LETTERS[p], p.word) for p in _PHASE_LETTERS if p in phases)


def draw_segments(page: Page, block: SegmentBars) -> None:
    """Draw segments to scale, with a letter for each source line whose blocks strand them."""
    frame = len(page.glyphs.bar_start + page.glyphs.bar_end)
    figures = [block.titles, *(bar.figures for bar in block.bars)]
    widths = [max(len(row[i]) for row in figures) for i in range(len(block.titles))]
    n_cells = page.width - 2 * INDENT - sum(widths) - GAP * len(widths) - frame
    bars, letters = _lettered([bar.runs for bar in block.bars], n_cells, block.lines)
    rows = [
        [*map(styled, bar.figures), _framed(page, [_block_mark(page, kind) for kind in kinds])]
        for bar, kinds in zip(block.bars, bars, strict=True)
    ]
    columns = (
        *(Column(title, kind="right") for title in block.titles),
        Column(max_width=page.width),
    )
    page.grid(columns, rows)
    legend = [[Text(letter, _STRANDER_STYLE), styled(line)] for letter, line in letters.items()]
    page.grid((Column(), Column(kind="path")), legend)
    used = {kind for kinds in bars for kind in kinds}
    page.key(
        (_block_mark(page, kind), "other live blocks" if kind == "live" and letters else meaning)
        for kind, (_, meaning) in _BLOCK_INKS.items()
        if kind in used
    )


def _lettered(
    bars: Sequence[Sequence[SegmentRun]], n_cells: int, lines: Sequence[tuple[str, Sequence[int]]]
) -> tuple[list[list[str]], dict[str, str]]:
    """Return the cells of each bar, and a mapping from letters to source lines.

    Only lines that are visible get a letter, in turn: blocks may be too small to win a cell.
    """
    by_letter = dict(zip(_LETTERS, lines, strict=False))
    of_strander = {
        strander: letter for letter, (_, stranders) in by_letter.items() for strander in stranders
    }
    drawn = [cells_of(runs, n_cells, of_strander) for runs in bars]
    seen = {kind for kinds in drawn for kind in kinds}
    renamed = dict(zip((k for k in by_letter if k in seen), _LETTERS, strict=False))
    return (
        [[renamed.get(kind, kind) for kind in kinds] for kinds in drawn],
        {new: by_letter[old][0] for old, new in renamed.items()},
    )


def cells_of(runs: Sequence[SegmentRun], n_cells: int, letters: Mapping[int, str]) -> list[str]:
    """Return what each cell of a bar shows: a kind of block, or the letter of a source line.

    A cell shows the kind that fills most of it. A live block smaller than a cell shows even if
    most of the cell is free, and several such blocks between holes make the cell ``mixed``.
    """
    total = sum(r.n_bytes for r in runs)
    if not total or n_cells <= 0:
        return []
    shares: list[dict[str, int]] = [{} for _ in range(n_cells)]
    n_small = [0] * n_cells
    start = 0
    for run in runs:
        kind: str = run.kind
        if run.kind is RunKind.LIVE and run.strander is not None:
            kind = letters.get(run.strander, kind)
        end = start + run.n_bytes
        first, last = start * n_cells // total, (max(end, start + 1) * n_cells - 1) // total
        first, last = min(first, n_cells - 1), min(last, n_cells - 1)
        for cell in range(first, last + 1):
            low, high = cell * total // n_cells, (cell + 1) * total // n_cells
            n_bytes = min(end, high) - max(start, low)
            shares[cell][kind] = shares[cell].get(kind, 0) + max(n_bytes, 0)
        if run.kind is not RunKind.FREE and run.n_bytes * n_cells <= total:
            n_small[min((start + end) // 2 * n_cells // total, n_cells - 1)] += 1
        start = end
    return [_block_cell(share, small) for share, small in zip(shares, n_small, strict=True)]


def _block_cell(share: Mapping[str, int], n_small: int) -> str:
    free = share.get("free", 0)
    live = {kind: n for kind, n in share.items() if kind != "free"}
    if not live:
        return "free"
    largest = max(live, key=lambda kind: live[kind])
    n_bytes = free + sum(live.values())
    if n_small > 1 and free >= n_bytes * _MIXED_FREE:
        return "mixed"
    return largest if n_small or 2 * free <= n_bytes else "free"


def _block_mark(page: Page, kind: str) -> tuple[str, str]:
    return _BLOCK_INKS[kind][0].mark(page) if kind in _BLOCK_INKS else (kind, _STRANDER_STYLE)


def _framed(page: Page, cells: Sequence[tuple[str, str]]) -> Text:
    start, end = page.glyphs.bar_start, page.glyphs.bar_end
    return _joined([(start, "dim"), *cells, (end, "dim")])


def _joined(cells: Sequence[tuple[str, str]]) -> Text:
    """Return cells as text, joining neighbors of the same style into one span."""
    whole = Text()
    for style, run in groupby(cells, key=lambda cell: cell[1]):
        whole.append("".join(text for text, _ in run), style=style or None)
    return whole
