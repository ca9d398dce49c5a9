"""What a report says, in no particular format: a command fills a document, each format renders it.

Every string in a document is raw: hostile until a renderer passes it through ``escape``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum, StrEnum
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, Final, Literal, NamedTuple

from msgspec import Struct, field
from msgspec.structs import replace

from fragdoctor.model.diagnosis import TimelineStrip
from fragdoctor.model.finding import Location
from fragdoctor.report.base import Verbosity
from fragdoctor.units import format_count, format_size


class Style(StrEnum):
    """The role of a few words, not their look: each renderer decides how they look."""

    STRONG = "strong"
    DIM = "dim"
    GOOD = "good"
    WARN = "warn"
    BAD = "bad"
    CODE = "code"


class Detail(StrEnum):
    """The reports that a block appears in."""

    SHORT = "short"
    """The short report alone: the full one says it at greater length."""
    USUAL = "usual"
    """The short and the full report."""
    FULL = "full"
    """The full report alone."""
    PAGE = "page"
    """The interactive page alone."""


DETAILS: Final[Mapping[Verbosity, Sequence[Detail]]] = MappingProxyType(
    {
        Verbosity.QUIET: (),
        Verbosity.NORMAL: (Detail.SHORT, Detail.USUAL),
        Verbosity.FULL: (Detail.USUAL, Detail.FULL),
    }
)
"""The blocks that each report includes."""


class Span(NamedTuple):
    """A few words in one style."""

    text: str
    style: Style


Content = str | Span | Sequence["Content"]
"""The text of a line, a cell or a paragraph."""


strong: Final = partial(Span, style=Style.STRONG)
dim: Final = partial(Span, style=Style.DIM)
good: Final = partial(Span, style=Style.GOOD)
warn: Final = partial(Span, style=Style.WARN)
bad: Final = partial(Span, style=Style.BAD)
code: Final = partial(Span, style=Style.CODE)


def spans(content: Content) -> Iterator[tuple[str, Style | None]]:
    """Yield the words of some content with their styles."""
    if isinstance(content, str):
        yield content, None
    elif isinstance(content, Span):
        yield content.text, content.style
    else:
        for part in content:
            yield from spans(part)


def plain(content: Content) -> str:
    """Return some content as plain text, without its styles."""
    return "".join(text for text, _ in spans(content))


NO_STACK: Final = "(no Python stack)"  # no stack was recorded, or only C++ frames


def location_text(location: Location | None) -> str:
    """Return ``file.py:88 in forward``; the line is left out if it is unknown."""
    return NO_STACK if location is None else str(location)


class Gauge(Struct, frozen=True):
    """A share of a whole, drawn as a bar in a table cell; 0 <= start <= end <= 1."""

    end: float
    start: float = 0.0
    style: Style | None = None


Cell = Content | Gauge


class Column(Struct, frozen=True):
    """A column of a table: its heading, its contents, and its layout.

    Attributes:
        title: its heading, "" for none.
        read: a field of each row's value, such as ``rank.peak_bytes``, or a function of that
            value; without it rows are given as cells. A field's name and type decide its format:
            ``_bytes`` is a size, an integer a count, a ``Location`` a path; None is a dash.
        kind: ``fit`` and ``right`` columns get the width they need; the others share the rest:
            ``wrap`` breaks into lines at spaces, ``list`` after commas, ``path`` is cut on the
            left and shown as code.
        from_width: the narrowest page of text that has room for the column.
        style: the style of all its cells.
    """

    title: str = ""
    read: str | Callable[[Any], Cell] = ""
    kind: Literal["fit", "right", "wrap", "list", "path"] = "fit"
    max_width: int | None = None
    from_width: int = 0
    style: Style | None = None

    @property
    def is_fitted(self) -> bool:
        """Whether it gets the width that it needs."""
        return self.kind in ("fit", "right")


class Row(Struct, frozen=True):
    """A row of a table and the lines below it."""

    cells: Sequence[Cell]
    notes: Sequence[Content] = ()
    style: Style | None = None


class DocumentBlock(Struct, frozen=True, kw_only=True):
    """A part of a document.

    Attributes:
        holds: the field whose content is needed for anything to show, or "" if something always
            shows.
        detail: the reports that include it.
    """

    holds: ClassVar[str] = ""
    detail: Detail = Detail.USUAL

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to show."""
        return bool(self.holds) and not any(getattr(self, self.holds))


class Paragraph(DocumentBlock, frozen=True):
    """Sentences."""

    content: Content

    @property
    def is_empty(self) -> bool:
        """Whether there is not a single word."""
        return not plain(self.content)


class Gap(DocumentBlock, frozen=True):
    """Space between the blocks before and after."""


class Facts(DocumentBlock, frozen=True):
    """Labeled values."""

    holds: ClassVar[str] = "items"
    items: Sequence[tuple[str, Content]]


def facts(*items: tuple[str, Content], detail: Detail = Detail.USUAL) -> Facts:
    """Return labeled values, without labels whose value is empty."""
    return Facts([(label, said) for label, said in items if plain(said)], detail=detail)


class Bullets(DocumentBlock, frozen=True):
    """Sentences of equal importance."""

    holds: ClassVar[str] = "items"
    items: Sequence[Content]


def bullets(*items: Content) -> Bullets:
    """Return the sentences that are not empty."""
    return Bullets([item for item in items if plain(item)])


class Code(DocumentBlock, frozen=True):
    """Lines to copy as they are; a line break inside a line is shown as an escape.

    Quoted lines only need to be recognized, so they may be cut at the page's width.
    """

    holds: ClassVar[str] = "lines"
    lines: Sequence[str]
    is_quoted: bool = False


class ListItem(Struct, frozen=True):
    """An entry of a list: a label such as its number, its first line, and the blocks below it."""

    head: Content
    blocks: Sequence[DocumentBlock] = ()
    label: str = ""
    style: Style = Style.STRONG


class Listing(DocumentBlock, frozen=True):
    """Entries with blocks of their own, such as recommendations; the short report shows a few.

    ``is_airy`` leaves room between them.
    """

    holds: ClassVar[str] = "items"
    items: Sequence[ListItem]
    shown: int | None = None
    is_airy: bool = False


class Table(DocumentBlock, frozen=True):
    """Aligned columns; the short report shows the first ``shown`` rows.

    ``n_left_out`` is the number of rows that even the document does not hold.
    """

    holds: ClassVar[str] = "rows"
    columns: Sequence[Column]
    rows: Sequence[Row]
    shown: int | None = None
    n_left_out: int = 0


def tabled(
    items: Iterable[Any],
    *columns: Column,
    notes: Callable[[Any], Sequence[Content]] | None = None,
    style: Callable[[Any], Style | None] | None = None,
    **table: Any,
) -> Table:
    """Return a table with a row for each value; the columns read the values.

    ``notes`` returns the lines below a row, ``style`` the style of a row; ``table`` are further
    fields of the table.
    """
    values = list(items)
    rows = [
        Row(
            [_cell(value, column) for column in columns],
            () if notes is None else notes(value),
            None if style is None else style(value),
        )
        for value in values
    ]
    laid_out = [_as_read(column, values) for column in columns]
    return Table(laid_out, rows, **table)


def _as_read(column: Column, values: Sequence[Any]) -> Column:
    """Return a column laid out to suit the values that it reads: figures are right-aligned."""
    if column.kind != "fit" or not isinstance(column.read, str):
        return column
    read = [_field(value, column.read) for value in values]
    if column.read.endswith("_bytes") or any(isinstance(v, int | float) for v in read):
        return replace(column, kind="right")
    return replace(column, kind="path") if any(isinstance(v, Location) for v in read) else column


def _cell(value: Any, column: Column) -> Cell:
    if not isinstance(column.read, str):
        cell = column.read(value)
    else:
        cell = written(_field(value, column.read), column.read)
    return cell if column.style is None or not isinstance(cell, str) else Span(cell, column.style)


def _field(value: Any, path: str) -> Any:
    """Return a field of a value, or a field of its field; None has only fields that are None."""
    for name in path.split("."):
        value = None if value is None else getattr(value, name)
    return value


def size(n_bytes: float | None) -> str:
    """Return a size, or a dash if it is unknown."""
    return "-" if n_bytes is None else format_size(n_bytes)


def count(n: int | None) -> str:
    """Return a number, or a dash if it is unknown."""
    return "-" if n is None else format_count(n)


def written(value: Any, name: str = "") -> Content:
    """Return a value as reports write it; its type and the name of its field decide how."""
    if isinstance(value, Location) or (value is None and name == "location"):
        return code(location_text(value))
    if value is None:
        return "-"
    if name.endswith("_bytes"):
        return format_size(value)
    if isinstance(value, int) and not isinstance(value, Enum):
        return format_count(value)
    return str(value)


class BarPart(Struct, frozen=True):
    """A part of a bar: ``name`` also chooses its glyph and color."""

    name: str
    n_bytes: int
    meaning: str


class Bar(DocumentBlock, frozen=True):
    """Bytes that add up to a whole, drawn to scale.

    ``request_bytes`` is the size of the request that failed, drawn for comparison.
    """

    parts: Sequence[BarPart]
    request_bytes: int | None = None

    @property
    def total_bytes(self) -> int:
        """The sum of all parts."""
        return sum(part.n_bytes for part in self.parts)


class Timeline(DocumentBlock, frozen=True):
    """Memory of one device over its trace."""

    strip: TimelineStrip


class Chart(DocumentBlock, frozen=True):
    """Points over one axis, bytes going up, each with a label; ``fit`` are the ends of a line."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    labels: Sequence[str]
    fit: Sequence[tuple[float, float]] = ()


class Graphic(DocumentBlock, frozen=True):
    """A place for one of the interactive graphics; only the interactive page fills it."""

    name: str
    absent: str


class Section(Struct, frozen=True):
    """Blocks under a heading.

    Attributes:
        title: the heading, or "" for blocks without one.
        note: what the title leaves open, in smaller type beside it.
        id: the section's name in links.
        device: the device that it is about, if a report can switch between several.
        is_folded: whether a page shows only its heading until it is opened.
        detail: the reports that include its usual blocks.
    """

    title: str
    blocks: Sequence[DocumentBlock]
    note: str = ""
    id: str = ""
    device: int | None = None
    is_folded: bool = False
    detail: Detail = Detail.USUAL

    def only(self, details: Sequence[Detail]) -> list[DocumentBlock]:
        """Return the blocks that a report with these details shows."""
        return [
            b
            for b in self.blocks
            if (self.detail if b.detail is Detail.USUAL else b.detail) in details and not b.is_empty
        ]


class Figure(Struct, frozen=True):
    """A figure that a page shows large: its label, the figure, and a few words below it."""

    name: str
    value: str
    note: str = ""


class ReportDocument(Struct, frozen=True):
    """Everything that one command says.

    Attributes:
        title: a few words for the window title.
        headline: the answer in one line.
        tone: whether the answer is good or bad.
        brief: the lines of ``--quiet``; ``lead`` comes right after the headline.
        kicker: a few words above the headline, such as what is being judged.
        sections: the rest, most important first.
        footer: what the full report adds.
        figures: the most telling figures, which a page shows beside the headline.
        places: line of the program, as written in the report -> link target at a terminal.
    """

    title: str
    headline: Content
    brief: Sequence[Content]
    sections: Sequence[Section]
    lead: Sequence[DocumentBlock] = ()
    tone: Style | None = None
    kicker: str = ""
    footer: str = ""
    figures: Sequence[Figure] = ()
    places: Mapping[str, str] = field(default_factory=dict)
