"""The worst segments: each as a bar of its blocks, to scale, with the lines that pin it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from fragdoctor.model.diagnosis import (
    Cause,
    Diagnosis,
    PinReport,
    RunKind,
    SegmentReport,
    SegmentRun,
)
from fragdoctor.report.base import Verbosity
from fragdoctor.report.phrases import location_text
from fragdoctor.report.text.page import GAP, INDENT, Cell, Column, Page, Span, joined
from fragdoctor.units import format_count, format_size

_SHOWN: Final = 5
_LETTERS: Final = "ABCDEF"

# Less pinned memory than this share of the reserved is not what the reader came for.
_MIN_PINNED_SHARE: Final = 0.1

# Of the worst segment's pinned memory: a row with less only distracts.
_MIN_ROW_SHARE: Final = 0.05

# A cell where several blocks alternate with this much free space is shown as mixed.
_MIXED_FREE: Final = 0.25


@dataclass(frozen=True, slots=True)
class BlockGlyph:
    """How one kind of block is drawn."""

    unicode: str
    ascii: str
    style: str
    meaning: str


@dataclass(frozen=True, slots=True)
class PinLine:
    """A source line and its groups: places among the ``PinReport``s of the device."""

    text: str
    groups: tuple[int, ...]


GLYPHS: Final[Mapping[str, BlockGlyph]] = {
    "live": BlockGlyph("█", "#", "cyan", "live"),
    "pending": BlockGlyph("▚", "~", "magenta", "freed, waits for other streams"),
    "mixed": BlockGlyph("▒", "=", "cyan", "small blocks and holes"),
    "free": BlockGlyph("·", ".", "dim", "free"),
}
_PIN_STYLE: Final = "bold red"


def write_segments(page: Page, diagnosis: Diagnosis) -> None:
    """Write the segments with most pinned free memory, where that is part of the story."""
    shown = _shown(page, diagnosis)
    if not shown:
        return
    page.heading(
        "Segments",
        f"GPU {shown[0].device}, the {len(shown)} of {format_count(diagnosis.n_pinned_segments)} "
        "with most pinned memory",
    )
    figures = _figures(shown)
    frame = len(page.glyphs.bar_start + page.glyphs.bar_end)
    widths = [max(len(row[i]) for row in figures) for i in range(len(figures[0]))]
    n_cells = page.width - 2 * INDENT - sum(widths) - GAP * len(widths) - frame
    bars, letters = _lettered(shown, n_cells, pin_lines(diagnosis, shown))
    titles, *rows = figures
    page.table(
        [*(Column(align="right", title=t) for t in titles), Column(max_width=page.width)],
        [[*row, _bar(page, bar)] for row, bar in zip(rows, bars, strict=True)],
    )
    _write_legend(page, letters, {kind for bar in bars for kind in bar})


def _shown(page: Page, diagnosis: Diagnosis) -> Sequence[SegmentReport]:
    """Return the segments worth a row; all with --verbose."""
    segments = diagnosis.worst_segments
    if page.options.verbosity is Verbosity.VERBOSE:
        return segments
    if not segments or not _says_something(diagnosis):
        return ()
    least = segments[0].pinned_bytes * _MIN_ROW_SHARE
    return [s for s in segments[:_SHOWN] if s.pinned_bytes >= least]


def _figures(segments: Sequence[SegmentReport]) -> list[list[str]]:
    """Return the titles of the columns, then the figures of each segment.

    Where some of the free memory can be returned, page by page, the pinned part is what counts.
    """
    is_paged = any(s.pinned_bytes != s.free_bytes for s in segments)
    return [
        ["size", "pinned" if is_paged else "free", "largest hole"],
        *(
            [
                format_size(s.total_bytes),
                format_size(s.pinned_bytes if is_paged else s.free_bytes),
                format_size(s.largest_hole_bytes),
            ]
            for s in segments
        ),
    ]


def _says_something(diagnosis: Diagnosis) -> bool:
    verdict = diagnosis.verdict
    if verdict.cause is Cause.FRAGMENTATION:
        return True
    if verdict.cause is Cause.HEALTHY and Cause.FRAGMENTATION not in verdict.also:
        return False
    device = diagnosis.worst_segments[0].device
    for figures in diagnosis.devices:
        if figures.device == device and figures.reserved_bytes and figures.pinned_free_bytes:
            return figures.pinned_free_bytes >= figures.reserved_bytes * _MIN_PINNED_SHARE
    return False


def pin_lines(diagnosis: Diagnosis, segments: Sequence[SegmentReport]) -> list[PinLine]:
    """Return the lines that hold most of these segments, in the order in which they appear.

    There are no more of them than letters.
    """
    device = segments[0].device
    pins = [p for p in diagnosis.pins if p.device == device]
    held: dict[int, int] = {}
    for run in (r for s in segments for r in s.runs):
        if run.kind is RunKind.LIVE and run.pin is not None and run.pin < len(pins):
            held[run.pin] = held.get(run.pin, 0) + run.n_bytes
    groups: dict[str, list[int]] = {}
    for pin in held:
        groups.setdefault(_line(pins[pin]), []).append(pin)
    most = sorted(groups, key=lambda line: -sum(held[p] for p in groups[line]))
    return [PinLine(k, tuple(v)) for k, v in groups.items() if k in most[: len(_LETTERS)]]


def _line(pin: PinReport) -> str:
    return location_text(pin.location)


def _lettered(
    segments: Sequence[SegmentReport], n_cells: int, lines: Sequence[PinLine]
) -> tuple[list[list[str]], dict[str, PinLine]]:
    """Return the cells of each bar, and the lines by letter.

    Letters go to the lines that are seen, in turn: blocks may be too small to win a cell.
    """
    by_letter = dict(zip(_LETTERS, lines, strict=False))
    of_group = {group: letter for letter, line in by_letter.items() for group in line.groups}
    bars = [cells_of(segment.runs, n_cells, of_group) for segment in segments]
    seen = {kind for bar in bars for kind in bar}
    renamed = dict(zip((k for k in by_letter if k in seen), _LETTERS, strict=False))
    return (
        [[renamed.get(kind, kind) for kind in bar] for bar in bars],
        {new: by_letter[old] for old, new in renamed.items()},
    )


def cells_of(runs: Sequence[SegmentRun], n_cells: int, letters: Mapping[int, str]) -> list[str]:
    """Return what each cell of a bar shows: a kind of ``GLYPHS`` or the letter of a line.

    A cell shows the kind that has most of it. A live block smaller than a cell is seen even where
    most of the cell is free, and several of them between holes make it ``mixed``.
    """
    total = sum(r.n_bytes for r in runs)
    if not total or n_cells <= 0:
        return []
    shares: list[dict[str, int]] = [{} for _ in range(n_cells)]
    n_small = [0] * n_cells
    start = 0
    for run in runs:
        kind: str = run.kind
        if run.kind is RunKind.LIVE and run.pin is not None:
            kind = letters.get(run.pin, kind)
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
    return [_cell(share, small) for share, small in zip(shares, n_small, strict=True)]


def _cell(share: Mapping[str, int], n_small: int) -> str:
    free = share.get("free", 0)
    live = {kind: n for kind, n in share.items() if kind != "free"}
    if not live:
        return "free"
    largest = max(live, key=lambda kind: live[kind])
    n_bytes = free + sum(live.values())
    if n_small > 1 and free >= n_bytes * _MIXED_FREE:
        return "mixed"
    return largest if n_small or 2 * free <= n_bytes else "free"


def _bar(page: Page, kinds: Sequence[str]) -> Cell:
    spans: list[Span] = [(page.glyphs.bar_start, "dim")]
    spans += joined([_glyph(page, kind) for kind in kinds])
    return [*spans, (page.glyphs.bar_end, "dim")]


def _glyph(page: Page, kind: str) -> tuple[str, str]:
    if kind not in GLYPHS:
        return kind, _PIN_STYLE
    glyph = GLYPHS[kind]
    return (glyph.unicode if page.options.unicode else glyph.ascii), glyph.style


def _write_legend(page: Page, letters: Mapping[str, PinLine], used: set[str]) -> None:
    rows: list[list[Cell]] = [[(letter, _PIN_STYLE), line.text] for letter, line in letters.items()]
    page.table([Column(), Column("path")], rows)
    said: list[Span] = []
    for kind, glyph in GLYPHS.items():
        if kind in used:
            other = "other live blocks" if kind == "live" and rows else glyph.meaning
            said += ["  " if said else "", _glyph(page, kind), f" {other}"]
    page.paragraph(said)
