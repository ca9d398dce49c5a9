"""A page of text: headings, paragraphs and tables laid out to a width, escaped, then printed.

Every string that reaches a page goes through ``escape.terminal`` here, so no section of the report
can forget it. Layout counts terminal cells, not characters.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from fragdoctor.report import escape
from fragdoctor.report.base import RenderOptions

# A name of a megabyte must not become a megabyte of report.
MAX_CELLS: Final = 4000

# Numbers, codes and marks are shorter; whatever is longer came from a stranger.
MAX_FIT: Final = 24

# A private character, which "escape.terminal" lets nobody else bring in, is no place to break.
_BOUND: Final = "\ue000"
_UNIT: Final = re.compile(r"(?<=[0-9]) (?=(?:[KMGT]iB|B|%)(?![A-Za-z0-9]))")

INDENT: Final = 2
GAP: Final = 2


@dataclass(frozen=True, slots=True)
class Glyphs:
    """What is drawn beyond letters and digits."""

    ellipsis: str
    live: str
    pinned: str
    pending: str
    pools: str
    releasable: str
    outside: str
    free: str
    bar_start: str
    bar_end: str


UNICODE_GLYPHS: Final = Glyphs("…", "█", "▓", "▚", "▞", "▒", "x", "·", "▕", "▏")
ASCII_GLYPHS: Final = Glyphs("...", "#", "%", "~", "+", "=", "x", ".", "[", "]")

Span = str | tuple[str, str]
Cell = Span | list[Span]


@dataclass(frozen=True, slots=True)
class Column:
    """How one column of a table is laid out.

    ``fit`` columns get the width they need; the others share what is left: ``wrap`` breaks into
    lines at spaces, ``list`` after commas, ``path`` is cut on the left.
    """

    kind: Literal["fit", "wrap", "list", "path"] = "fit"
    align: Literal["left", "right"] = "left"
    title: str = ""
    max_width: int | None = None


class Page:
    """Collects lines; ``render`` prints them."""

    def __init__(self, options: RenderOptions) -> None:
        self.options = options
        self.width = options.text_width
        self.glyphs = UNICODE_GLYPHS if options.unicode else ASCII_GLYPHS
        self._lines: list[Text] = []
        self._console = Console(
            file=io.StringIO(), width=self.width, markup=False, emoji=False, highlight=False
        )

    def blank(self) -> None:
        """Leave one empty line, never two, and none at the top."""
        if self._lines and self._lines[-1].plain:
            self._lines.append(Text())

    def heading(self, title: str, note: str = "") -> None:
        """Start a section."""
        self.blank()
        spans: list[Span] = [(title, "bold")]
        if note:
            spans.append(("  " + note, "dim"))
        self.paragraph(spans, indent=0, hang=INDENT)

    def paragraph(self, cell: Cell, *, indent: int = INDENT, hang: int = 0) -> None:
        """Write text wrapped to the width; further lines are indented by ``hang`` more."""
        lines = self._wrapped(styled(cell), self.width - indent - hang)
        for i, line in enumerate(lines):
            self._put(indent + (hang if i else 0), line)

    def verbatim(self, cell: Cell, *, indent: int = INDENT) -> None:
        """Write one line as it is, however long: something to copy."""
        self._put(indent, styled(cell))

    def labelled(
        self, label: Span, cell: Cell, *, indent: int, label_width: int, path: bool = False
    ) -> None:
        """Write a label and, beside it, text wrapped in a column of its own.

        With ``path`` it is one line, cut on the left instead.
        """
        start = _padded(styled(label), label_width, "left")
        body = styled(cell)
        room = self.width - indent - label_width
        lines = [self._cut_left(body, room)] if path else self._wrapped(body, room)
        for i, line in enumerate(lines or [Text()]):
            self._put(indent, (start if i == 0 else Text(" " * label_width)) + line)

    def table(
        self,
        columns: Sequence[Column],
        rows: Iterable[Sequence[Cell]],
        *,
        indent: int = INDENT,
        below: Sequence[Sequence[Cell]] = (),
        below_indent: int = 3 * INDENT,
    ) -> None:
        """Write aligned columns; a row of titles comes first if any column has one.

        ``below[i]`` are lines that follow row i, such as its stack.
        """
        body = [[styled(cell) for cell in row] for row in rows]
        titles = [Text(c.title, style="dim") for c in columns]
        grid = [titles, *body] if any(c.title for c in columns) else body
        if not body:
            return
        widths = self._widths(columns, grid, indent)
        self._shorten_paths(columns, body, widths)
        if grid is not body:
            self._table_row(columns, titles, widths, indent)
        for i, row in enumerate(body):
            self._table_row(columns, row, widths, indent)
            for line in below[i] if i < len(below) else ():
                self.paragraph(line, indent=below_indent)

    def render(self) -> str:
        """Return the page as text, ending in a newline."""
        out = io.StringIO()
        if not self.options.color:
            out.writelines(f"{line.plain.rstrip()}\n" for line in self._lines)
            return out.getvalue()
        console = Console(
            file=out,
            width=self.width,
            force_terminal=True,
            color_system="standard",
            no_color=False,
            markup=False,
            emoji=False,
            highlight=False,
            legacy_windows=False,
        )
        for line in self._lines:
            line.rstrip()
            console.print(line, soft_wrap=True)
        return out.getvalue()

    def _put(self, indent: int, line: Text) -> None:
        self._lines.append(Text(" " * indent) + line)

    def _wrapped(self, text: Text, width: int) -> list[Text]:
        lines = list(_units_bound(text).wrap(self._console, max(width, 10)))
        for line in lines:
            line.plain = line.plain.replace(_BOUND, " ")
            line.rstrip()
        return lines

    def _widths(
        self, columns: Sequence[Column], grid: Sequence[Sequence[Text]], indent: int
    ) -> list[int]:
        """Return the width of each column: what it needs, or a share of what is left."""
        natural = [max(row[i].cell_len for row in grid) for i in range(len(columns))]
        widths = [
            min(need, c.max_width or (MAX_FIT if c.kind == "fit" else need))
            for need, c in zip(natural, columns, strict=True)
        ]
        flexible = [i for i, c in enumerate(columns) if c.kind != "fit"]
        room = self.width - indent - GAP * (len(columns) - 1)
        room -= sum(w for i, w in enumerate(widths) if i not in flexible)
        # The narrowest first: what it leaves goes to the others.
        for rank, i in enumerate(sorted(flexible, key=lambda i: widths[i])):
            share = max(room // (len(flexible) - rank), 8)
            widths[i] = min(widths[i], share)
            room -= widths[i]
        return widths

    def _table_row(
        self, columns: Sequence[Column], row: Sequence[Text], widths: Sequence[int], indent: int
    ) -> None:
        cells: list[list[Text]] = []
        for column, text, width in zip(columns, row, widths, strict=True):
            if column.kind == "path":
                cells.append([self._cut_left(text, width)])
            elif text.cell_len > width:
                whole = _commas_opened(text, width) if column.kind == "list" else text
                cells.append(self._wrapped(whole, width))
            else:
                cells.append([text])
        for i in range(max(len(lines) for lines in cells)):
            line = Text()
            for j, (column, lines, width) in enumerate(zip(columns, cells, widths, strict=True)):
                part = lines[i] if i < len(lines) else Text()
                line += Text(" " * (GAP if j else 0)) + _padded(part, width, column.align)
            self._put(indent, line)

    def _shorten_paths(
        self, columns: Sequence[Column], body: Sequence[list[Text]], widths: Sequence[int]
    ) -> None:
        """Shorten the paths of each column together, so that those that differ look different."""
        for i, (column, width) in enumerate(zip(columns, widths, strict=True)):
            if column.kind != "path":
                continue
            whole = [row[i] for row in body]
            short = escape.shorten_apart([t.plain for t in whole], width, self.glyphs.ellipsis)
            for row, text, plain in zip(body, whole, short, strict=True):
                if plain != text.plain:
                    row[i] = Text(plain, style=text.style or _only_style(text))

    def _cut_left(self, text: Text, width: int) -> Text:
        if text.cell_len <= width:
            return text
        short = escape.shorten_left(text.plain, width, self.glyphs.ellipsis)
        while cell_len(short) > width:  # wide characters
            short = self.glyphs.ellipsis + short[len(self.glyphs.ellipsis) + 1 :]
        return Text(short, style=text.style or _only_style(text))


def styled(cell: Cell) -> Text:
    """Return text, escaped, from a string, a (string, style) pair, or several of them."""
    if isinstance(cell, str):
        return Text(_safe(cell))
    if isinstance(cell, tuple) and len(cell) == 2 and all(isinstance(x, str) for x in cell):
        return Text(_safe(str(cell[0])), style=str(cell[1]))
    text = Text()
    for span in cell:
        text.append_text(styled(span))
    return text


def joined(spans: Sequence[Span]) -> list[Span]:
    """Return the spans with neighbours of the same style made one."""
    whole: list[tuple[str, str]] = []
    for span in spans:
        text, style = (span, "") if isinstance(span, str) else span
        if whole and whole[-1][1] == style:
            whole[-1] = (whole[-1][0] + text, style)
        else:
            whole.append((text, style))
    return list(whole)


def _commas_opened(text: Text, width: int) -> Text:
    """Return text with a space after the last comma that fits on each line: a place to break."""
    parts = text.split(",", include_separator=True)
    opened, used = Text(), 0
    for part in parts:
        if used and used + part.cell_len > width:
            if not part.plain.startswith(" "):  # that one breaks by itself
                opened.append(" ")
            used = 0
        opened.append_text(part)
        used += part.cell_len
    return opened


def _units_bound(text: Text) -> Text:
    """Return text in which no line ends between a number and its unit."""
    bound = text.copy()
    bound.plain = _UNIT.sub(_BOUND, text.plain)
    return bound


def _only_style(text: Text) -> str:
    return str(text.spans[0].style) if text.spans else ""


def _safe(text: str) -> str:
    if len(text) > MAX_CELLS:
        text = f"{text[: MAX_CELLS // 2]} ... {text[-MAX_CELLS // 2 :]}"
    return escape.terminal(text)


def _padded(text: Text, width: int, align: Literal["left", "right"]) -> Text:
    pad = Text(" " * max(0, width - text.cell_len))
    return pad + text if align == "right" else text + pad
