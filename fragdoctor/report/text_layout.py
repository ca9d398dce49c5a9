"""A page of plain text: headings, paragraphs and tables, laid out to a width and escaped.

Every string that reaches a page goes through ``escape.terminal`` here, so no section of the report
can forget to escape. The layout counts terminal cells, not characters.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from types import MappingProxyType
from typing import Any, Final

from msgspec import Struct
from rich.cells import cell_len
from rich.text import Text

from fragdoctor.report import document as doc
from fragdoctor.report import escape
from fragdoctor.report.base import MAX_WIDTH, MIN_WIDTH, RenderOptions

# The widest ``fit`` column: numbers, codes and marks are shorter; longer text is untrusted.
MAX_FIT: Final = 24

# A space that lines do not break at: a private character, which "escape.terminal" removes from
# all other text.
_BOUND: Final = "\ue000"
_UNIT: Final = re.compile(r"(?<=[0-9]) (?=(?:[KMGT]iB|B|%)(?![A-Za-z0-9]))")

_GAUGE_CELLS: Final = 10

# The console that rich wants for wrapping, and asks only about text that is justified.
_ANY_CONSOLE: Final[Any] = None

INDENT: Final = 2
GAP: Final = 2


STYLES: Final = MappingProxyType(
    {
        None: "",
        doc.Style.STRONG: "bold",
        doc.Style.DIM: "dim",
        doc.Style.GOOD: "green",
        doc.Style.WARN: "yellow",
        doc.Style.BAD: "bold red",
        doc.Style.CODE: "cyan",
    }
)


class Glyphs(Struct, frozen=True):
    """Symbols beyond letters and digits; ``steps`` are cells filled from low to full."""

    ellipsis: str
    bar_start: str
    bar_end: str
    full: str
    empty: str
    steps: str
    reserved: str
    axis: str


UNICODE_GLYPHS: Final = Glyphs("…", "▕", "▏", "█", "·", "▁▂▃▄▅▆▇█", "░", "│")
ASCII_GLYPHS: Final = Glyphs("...", "[", "]", "#", ".", "#", ":", "|")


class Page:
    """Collects lines; ``render`` prints them."""

    def __init__(self, options: RenderOptions) -> None:
        self.options = options
        self.width = max(MIN_WIDTH, min(options.width, MAX_WIDTH))
        self.glyphs = UNICODE_GLYPHS if options.unicode else ASCII_GLYPHS
        self._lines: list[Text] = []

    def blank(self) -> None:
        """Leave one empty line, but never two in a row, and none at the top."""
        if self._lines and self._lines[-1].plain:
            self._lines.append(Text())

    def heading(self, title: str, note: str = "") -> None:
        """Start a section."""
        self.blank()
        content = [doc.strong(title), *([doc.dim(f"  {note}")] if note else [])]
        self.paragraph(content, indent=0, hang=INDENT)

    def paragraph(self, content: doc.Content, *, indent: int = INDENT, hang: int = 0) -> None:
        """Write text wrapped to the width; further lines are indented by ``hang`` more."""
        lines = self._wrapped(styled(content), self.width - indent - hang)
        for i, line in enumerate(lines):
            self._put(indent + (hang if i else 0), line)

    def verbatim(self, content: doc.Content, indent: int, *, is_cut: bool = False) -> None:
        """Write one line as it is, however long, to be copied; ``is_cut`` cuts it with dots."""
        line, room = styled(content), self.width - indent
        if is_cut and line.cell_len > room:
            line.truncate(room - len(self.glyphs.ellipsis))
            line.append(self.glyphs.ellipsis, STYLES[doc.Style.STRONG])
        self._put(indent, line)

    def drawn(self, line: Text) -> None:
        """Write a line of a picture; it holds only letters and sizes, no text from an input."""
        self._put(INDENT, line)

    def key(self, entries: Iterable[tuple[tuple[str, str], str]]) -> None:
        """Write the key of a picture: each (mark, style) with the words that explain it."""
        whole = Text()
        for mark, words in entries:
            # A mark and its words stay on one line.
            bound = f" {words}".replace(" ", _BOUND)
            whole.append("  " if whole else "").append(*mark).append(bound)
        for line in self._wrapped(whole, self.width - INDENT) if whole else ():
            self._put(INDENT, line)

    def labelled(
        self, label: doc.Content, content: doc.Content, *, indent: int, label_width: int
    ) -> None:
        """Write a label and, beside it, text wrapped in its own column."""
        start = _padded(styled(label), label_width)
        lines = self._wrapped(styled(content), self.width - indent - label_width)
        for i, line in enumerate(lines or [Text()]):
            self._put(indent, (start if i == 0 else Text(" " * label_width)) + line)

    def table(
        self, columns: Sequence[doc.Column], rows: Sequence[doc.Row], *, indent: int = INDENT
    ) -> None:
        """Write aligned columns; a row of titles comes first if any column has one."""
        kept = [i for i, c in enumerate(columns) if c.from_width <= self.width]
        body = [[self._cell(row.cells[i]) for i in kept] for row in rows]
        notes = [row.notes for row in rows]
        self.grid([columns[i] for i in kept], body, indent=indent, notes=notes)

    def grid(
        self,
        columns: Sequence[doc.Column],
        body: Sequence[list[Text]],
        *,
        indent: int = INDENT,
        notes: Sequence[Sequence[doc.Content]] = (),
    ) -> None:
        """Write aligned columns of text that is already safe."""
        if not body:
            return
        titles = [styled(doc.dim(c.title)) for c in columns]
        with_titles = [titles, *body] if any(c.title for c in columns) else body
        widths = self._widths(columns, with_titles, indent)
        self._shorten_paths(columns, with_titles, widths)
        if with_titles is not body:
            self._table_row(columns, titles, widths, indent)
        for cells, below in zip_longest(body, notes, fillvalue=()):
            self._table_row(columns, cells, widths, indent)
            for note in below:
                self.paragraph(note, indent=indent + 2 * INDENT)

    def _cell(self, cell: doc.Cell) -> Text:
        if not isinstance(cell, doc.Gauge):
            return styled(cell)
        first, last = round(cell.start * _GAUGE_CELLS), round(cell.end * _GAUGE_CELLS)
        bar = self.glyphs.empty * first + self.glyphs.full * (last - first)
        return Text(bar.ljust(_GAUGE_CELLS, self.glyphs.empty), style=STYLES[cell.style])

    def render(self, places: Mapping[str, str] = MappingProxyType({})) -> str:
        """Return the page as text, ending in a newline.

        Args:
            places: words -> link target, used with color; a part of a longer name gets no link.
        """
        if not self.options.color:
            return "".join(f"{line.plain.rstrip()}\n" for line in self._lines)
        from rich.console import Console  # noqa: PLC0415 - slow to load, and only for color

        out = io.StringIO()
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
            for word, target in places.items():
                line.highlight_regex(rf"(?<![\w.-]){re.escape(word)}(?!\d)", f"link {target}")
            console.print(line, soft_wrap=True)
        return out.getvalue()

    def _put(self, indent: int, line: Text) -> None:
        self._lines.append(Text(" " * indent) + line)

    def _wrapped(self, text: Text, width: int) -> list[Text]:
        bound = text.copy()
        bound.plain = _UNIT.sub(_BOUND, text.plain)  # no line breaks between a number and its unit
        lines = list(bound.wrap(_ANY_CONSOLE, max(width, 10)))
        for line in lines:
            line.plain = line.plain.replace(_BOUND, " ")
            line.rstrip()
        return lines

    def _widths(
        self, columns: Sequence[doc.Column], grid: Sequence[Sequence[Text]], indent: int
    ) -> list[int]:
        """Return the width of each column: what it needs, or a share of the remaining width."""
        natural = [max(row[i].cell_len for row in grid) for i in range(len(columns))]
        widths = [
            min(need, c.max_width or (MAX_FIT if c.is_fitted else need))
            for need, c in zip(natural, columns, strict=True)
        ]
        flexible = [i for i, c in enumerate(columns) if not c.is_fitted]
        room = self.width - indent - GAP * (len(columns) - 1)
        room -= sum(w for i, w in enumerate(widths) if i not in flexible)
        # The narrowest column first: width that it does not need goes to the others.
        for rank, i in enumerate(sorted(flexible, key=lambda i: widths[i])):
            share = max(room // (len(flexible) - rank), 8)
            widths[i] = min(widths[i], share)
            room -= widths[i]
        return widths

    def _table_row(
        self, columns: Sequence[doc.Column], row: Sequence[Text], widths: Sequence[int], indent: int
    ) -> None:
        cells: list[list[Text]] = []
        for column, text, width in zip(columns, row, widths, strict=True):
            if column.kind != "path" and text.cell_len > width:
                whole = _commas_opened(text, width) if column.kind == "list" else text
                cells.append(self._wrapped(whole, width))
            else:
                cells.append([text])
        for i in range(max(len(lines) for lines in cells)):
            line = Text()
            for j, (column, lines, width) in enumerate(zip(columns, cells, widths, strict=True)):
                part = lines[i] if i < len(lines) else Text()
                line += Text(" " * (GAP if j else 0)) + _padded(
                    part, width, to_right=column.kind == "right"
                )
            self._put(indent, line)

    def _shorten_paths(
        self, columns: Sequence[doc.Column], rows: Sequence[list[Text]], widths: Sequence[int]
    ) -> None:
        """Shorten the paths of each column together, so that different paths look different."""
        for i, (column, width) in enumerate(zip(columns, widths, strict=True)):
            if column.kind != "path":
                continue
            whole, dots = [row[i] for row in rows], self.glyphs.ellipsis
            short = escape.shorten_apart([t.plain for t in whole], width, dots)
            for row, text, plain in zip(rows, whole, short, strict=True):
                while cell_len(plain) > width:  # wide characters
                    plain = dots + plain[len(dots) + 1 :]  # noqa: PLW2901 - cut further
                if plain != text.plain:
                    row[i] = Text(plain, style=str(text.spans[0].style) if text.spans else "")


def styled(content: doc.Content) -> Text:
    """Return some content as terminal text: escaped, with its styles."""
    whole = Text()
    for text, style in doc.spans(content):
        whole.append(escape.terminal(escape.bounded(text)), style=STYLES[style] or None)
    return whole


def _commas_opened(text: Text, width: int) -> Text:
    """Return text with a space to break at after the last comma that fits on each line."""
    parts = text.split(",", include_separator=True)
    opened, used = Text(), 0
    for part in parts:
        if used and used + part.cell_len > width:
            if not part.plain.startswith(" "):  # a leading space is a place to break already
                opened.append(" ")
            used = 0
        opened.append_text(part)
        used += part.cell_len
    return opened


def _padded(text: Text, width: int, *, to_right: bool = False) -> Text:
    pad = Text(" " * max(0, width - text.cell_len))
    return pad + text if to_right else text + pad
