"""The worst segments: each as a bar of its blocks, to scale, with the lines that pin it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from fragdoctor.model.diagnosis import Cause, Diagnosis, PinReport, SegmentReport, SegmentRun
from fragdoctor.report.base import Verbosity
from fragdoctor.report.phrases import location_text
from fragdoctor.report.text.page import GAP, INDENT, Cell, Column, Page, Span
from fragdoctor.report.text.timeline import joined
from fragdoctor.units import format_count, format_size

_SHOWN: Final = 5
_LETTERS: Final = "ABCDEF"

# Less pinned memory than this share of the reserved is not what the reader came for.
_MIN_PINNED_SHARE: Final = 0.05

# A cell where several blocks alternate with this much free space is shown as mixed.
_MIXED_FREE: Final = 0.25


@dataclass(frozen=True, slots=True)
class BlockGlyph:
    """How one kind of block is drawn."""

    unicode: str
    ascii: str
    style: str
    meaning: str


GLYPHS: Final[Mapping[str, BlockGlyph]] = {
    "live": BlockGlyph("█", "#", "cyan", "live"),
    "pending": BlockGlyph("▚", "~", "magenta", "freed, waits for other streams"),
    "mixed": BlockGlyph("▒", "=", "cyan", "small blocks and holes"),
    "free": BlockGlyph("·", ".", "dim", "free"),
}
_PIN_STYLE: Final = "bold red"


def write_segments(page: Page, diagnosis: Diagnosis) -> None:
    """Write the segments with most pinned free memory, where that is part of the story."""
    if not diagnosis.worst_segments or not _says_something(diagnosis):
        return
    verbose = page.options.verbosity is Verbosity.VERBOSE
    shown = diagnosis.worst_segments[: None if verbose else _SHOWN]
    of = format_count(diagnosis.n_pinned_segments)
    page.heading(
        "Segments",
        f"{len(shown)} of {of} on GPU {shown[0].device} with pinned free memory, worst first",
    )
    lines = pin_lines(diagnosis, shown)
    letters = {
        pin: letter for letter, (_, pins) in zip(_LETTERS, lines, strict=False) for pin in pins
    }
    bars, used = [], set()
    figures = [
        (format_size(s.total_bytes), format_size(s.free_bytes), format_size(s.largest_hole_bytes))
        for s in shown
    ]
    titles = ("size", "free", "largest")
    taken = sum(max(len(t), *(len(f[i]) for f in figures)) + GAP for i, t in enumerate(titles))
    n_cells = page.width - 2 * INDENT - taken - len(page.glyphs.bar_start + page.glyphs.bar_end)
    for segment in shown:
        kinds = cells_of(segment.runs, n_cells, letters)
        used.update(kinds)
        bars.append(_bar(page, kinds))
    columns = [*(Column(align="right", title=t) for t in titles), Column(max_width=page.width)]
    page.table(columns, [[*f, bar] for f, bar in zip(figures, bars, strict=True)])
    _write_legend(page, lines, used)


def _says_something(diagnosis: Diagnosis) -> bool:
    causes = (diagnosis.verdict.cause, *diagnosis.verdict.also)
    if Cause.FRAGMENTATION in causes:
        return True
    device = diagnosis.worst_segments[0].device
    for figures in diagnosis.devices:
        if figures.device == device and figures.reserved_bytes and figures.pinned_free_bytes:
            return figures.pinned_free_bytes >= figures.reserved_bytes * _MIN_PINNED_SHARE
    return False


def pin_lines(
    diagnosis: Diagnosis, segments: Sequence[SegmentReport]
) -> list[tuple[str, list[int]]]:
    """Return the lines that hold these segments, most bytes first, each with its groups.

    Groups are places among the ``PinReport``s of the device; those of one line get one letter.
    """
    device = segments[0].device
    pins = [p for p in diagnosis.pins if p.device == device]
    held: dict[int, int] = {}
    for run in (r for s in segments for r in s.runs):
        if run.pin is not None and run.pin < len(pins):
            held[run.pin] = held.get(run.pin, 0) + run.n_bytes
    by_line: dict[str, list[int]] = {}
    for pin in held:
        by_line.setdefault(_line(pins[pin]), []).append(pin)
    return sorted(by_line.items(), key=lambda item: (-sum(held[p] for p in item[1]), item[0]))


def _line(pin: PinReport) -> str:
    return location_text(pin.location or (pin.stack[0] if pin.stack else None))


def cells_of(runs: Sequence[SegmentRun], n_cells: int, letters: Mapping[int, str]) -> list[str]:
    """Return what each cell of a bar shows: a kind of ``GLYPHS`` or the letter of a line.

    A cell shows the kind that has most of it. A live block within a cell is seen even where most
    of the cell is free, and several of them between holes make it ``mixed``.
    """
    total = sum(r.n_bytes for r in runs)
    if not total or n_cells <= 0:
        return []
    shares: list[dict[str, int]] = [{} for _ in range(n_cells)]
    n_whole = [0] * n_cells
    start = 0
    for run in runs:
        kind = letters.get(run.pin, run.kind) if run.pin is not None else run.kind
        end = start + run.n_bytes
        first, last = start * n_cells // total, (max(end, start + 1) * n_cells - 1) // total
        first, last = min(first, n_cells - 1), min(last, n_cells - 1)
        for cell in range(first, last + 1):
            low, high = cell * total // n_cells, (cell + 1) * total // n_cells
            n_bytes = min(end, high) - max(start, low)
            shares[cell][kind] = shares[cell].get(kind, 0) + max(n_bytes, 0)
        if first == last and kind != "free":
            n_whole[first] += 1
        start = end
    return [_cell(share, whole) for share, whole in zip(shares, n_whole, strict=True)]


def _cell(share: Mapping[str, int], n_whole: int) -> str:
    free = share.get("free", 0)
    live = {kind: n for kind, n in share.items() if kind != "free"}
    if not live:
        return "free"
    largest = max(live, key=lambda kind: live[kind])
    n_bytes = free + sum(live.values())
    if n_whole > 1 and free >= n_bytes * _MIXED_FREE:
        return "mixed"
    return largest if n_whole or 2 * free <= n_bytes else "free"


def _bar(page: Page, kinds: Sequence[str]) -> Cell:
    spans: list[Span] = [(page.glyphs.bar_start, "dim")]
    spans += joined([_glyph(page, kind) for kind in kinds])
    return [*spans, (page.glyphs.bar_end, "dim")]


def _glyph(page: Page, kind: str) -> tuple[str, str]:
    if kind not in GLYPHS:
        return kind, _PIN_STYLE
    glyph = GLYPHS[kind]
    return (glyph.unicode if page.options.unicode else glyph.ascii), glyph.style


def _write_legend(page: Page, lines: Sequence[tuple[str, Sequence[int]]], used: set[str]) -> None:
    rows: list[list[Cell]] = [
        [(letter, _PIN_STYLE), line]
        for letter, (line, _) in zip(_LETTERS, lines, strict=False)
        if letter in used
    ]
    page.table([Column(), Column("path")], rows)
    said: list[Span] = []
    for kind, glyph in GLYPHS.items():
        if kind in used:
            other = "other live blocks" if kind == "live" and rows else glyph.meaning
            said += ["  " if said else "", _glyph(page, kind), f" {other}"]
    page.paragraph(said)
