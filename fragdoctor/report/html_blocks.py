"""The sections and blocks of a document as HTML elements; charts are drawn from numbers alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final

from markupsafe import Markup

from fragdoctor.report import document as doc
from fragdoctor.report.document import Chart
from fragdoctor.report.markup import joined, ours, tag
from fragdoctor.report.words import share_of
from fragdoctor.units import GIB, KIB, MIB, TIB, format_count, format_size, plural

MAX_ROWS: Final = 5000
"""The most rows of one table: nobody reads more, and they slow the page down."""

LONG_TABLE: Final = 40
"""Tables with more rows are folded."""

FIRST_ITEMS: Final = 4
"""Items of a list that a page shows; the rest is folded."""

EVERYTHING: Final = (doc.Detail.USUAL, doc.Detail.FULL)
"""``Detail.PAGE`` is left out: the interactive page has its own place for its graphics."""


def section(one: doc.Section) -> Markup | None:
    """Return a section; a folded one shows only its heading until it is opened."""
    kept = one.only(EVERYTHING)
    if not kept:
        return None
    note = [" ", tag("span", one.note, class_="unit")] if one.note else None
    heading = tag("h2", one.title, note) if one.title else None
    body = [block(b, one.title) for b in kept]
    is_folded = one.is_folded and heading is not None
    return tag(
        "section",
        tag("details", tag("summary", heading), body) if is_folded else [heading, body],
        class_=("fold" if is_folded else "open") + (" device" if one.device is not None else ""),
        id=one.id or None,
        data_device=one.device,
    )


def blocks(some: Iterable[doc.DocumentBlock], label: str = "") -> list[Markup | None]:
    """Return the blocks that a page shows; ``label`` names their tables for screen readers."""
    return [block(b, label) for b in some if b.detail in EVERYTHING and not b.is_empty]


def block(one: doc.DocumentBlock, label: str) -> Markup | None:  # noqa: PLR0911 - one a block
    """Return a block, or None for one that only another kind of report can show."""
    match one:
        case doc.Paragraph():
            return tag("p", content(one.content))
        case doc.Facts():
            pairs = [(tag("dt", name), tag("dd", content(said))) for name, said in one.items]
            return tag("dl", [tag("div", pair) for pair in pairs], class_="facts")
        case doc.Bullets():
            return tag("ul", [tag("li", content(item)) for item in one.items], class_="plain")
        case doc.Code():
            return _code(one)
        case doc.Table():
            return _table(one, label)
        case doc.Listing():
            return _listing(one)
        case doc.Bar():
            return _bar(one)
        case doc.Chart():
            return chart(one)
    return None


def content(words: doc.Content) -> Markup:
    """Return words, each in its style."""
    return joined(_styled(said, style) for said, style in doc.spans(words))


def _styled(said: str, style: doc.Style | None) -> str:
    match style:
        case None:
            return said
        case doc.Style.CODE:
            return tag("code", said)
        case doc.Style.STRONG:
            return tag("b", said)
    return tag("span", said, class_=style.value)


def _code(one: doc.Code) -> Markup:
    if one.is_quoted:
        return tag("p", [tag("code", line) for line in one.lines], class_="copyline")
    if len(one.lines) > 1:
        return tag("pre", [(tag("code", line), ours("\n")) for line in one.lines])
    copy = tag("button", "Copy", type="button", class_="quiet copy js", aria_label="Copy")
    return tag("div", tag("code", one.lines[0]), copy, class_="copyline")


def _table(one: doc.Table, label: str) -> Markup:
    shown = tag(
        "div",
        tag("table", _head(one.columns), tag("tbody", _rows(one))),
        class_="scroll",
        tabindex=0 if label else None,
        role="region" if label else None,
        aria_label=label or None,
    )
    n_left = one.n_left_out + max(0, len(one.rows) - MAX_ROWS)
    more = tag("p", f"{format_count(n_left)} more with --format json", class_="dim")
    parts = [shown, more if n_left else None]
    if len(one.rows) <= LONG_TABLE:
        return joined(parts)
    summary = f"{label or 'Table'}: {plural(len(one.rows), 'row')}"
    return tag("details", tag("summary", summary), parts)


def _head(columns: Sequence[doc.Column]) -> Markup | None:
    if not any(c.title for c in columns):
        return None
    titles = [
        tag("th", c.title, scope="col", class_="n" if c.kind == "right" else None) for c in columns
    ]
    return tag("thead", tag("tr", titles))


def _rows(one: doc.Table) -> list[Markup]:
    """Return the rows; a row's notes stand in the first wide column, which heads the row."""
    wide = [i for i, c in enumerate(one.columns) if not c.is_fitted]
    heads, noted = (wide[0], wide[0]) if wide else (0, len(one.columns) - 1)
    rows = []
    for row in one.rows[:MAX_ROWS]:
        cells = []
        for i, (column, cell) in enumerate(zip(one.columns, row.cells, strict=True)):
            is_gauge = isinstance(cell, doc.Gauge)
            kind = "n" if column.kind == "right" else f"c-{column.kind}"
            mark = (" graph" if is_gauge else "") + (" row-head" if i == heads else "")
            cells.append(
                tag(
                    "td",
                    _gauge(cell) if isinstance(cell, doc.Gauge) else content(cell),
                    _notes(row.notes) if i == noted else None,
                    class_=kind + mark,
                    data_title=column.title if column.title and cell else None,
                )
            )
        rows.append(tag("tr", cells, class_=f"{row.style.value}-row" if row.style else None))
    return rows


def _gauge(cell: doc.Gauge) -> Markup:
    start, width = f"{100 * cell.start:.2f}", f"{100 * (cell.end - cell.start):.2f}"
    return tag(
        "svg",
        tag("rect", class_="track", width=100, height=8),
        tag("rect", class_="fill", x=start, width=width, height=8),
        class_=f"gauge {cell.style.value}" if cell.style else "gauge",
        viewBox="0 0 100 8",
        preserveAspectRatio="none",
        aria_hidden="true",
    )


def _notes(lines: Sequence[doc.Content]) -> list[Markup] | Markup:
    said = [tag("span", content(line), class_="note") for line in lines]
    if len(lines) <= 2:
        return said
    return tag("details", tag("summary", content(lines[0])), said[1:], class_="stack")


def _bar(one: doc.Bar) -> Markup:
    total, places, x = one.total_bytes, [], 0.0
    for part in one.parts:
        width = 100 * part.n_bytes / total
        size = format_size(part.n_bytes)
        title = tag("title", f"{part.name}: {size}, {part.meaning}")
        at, wide = f"{x:.3f}%", f"{width:.3f}%"
        places.append(
            tag("rect", title, class_=f"part {part.name}", x=at, y=4, width=wide, height=28)
        )
        x += width
    label = ", ".join(f"{p.name} {format_size(p.n_bytes)}" for p in one.parts)
    picture = tag(
        "svg",
        tag("rect", class_="track", x=0, y=4, width="100%", height=28),
        places,
        _request(one.request_bytes, total) if one.request_bytes else None,
        class_="membar",
        role="img",
        aria_label=label,
        width="100%",
        height=62 if one.request_bytes else 36,
    )
    legend = [_legend(part, total) for part in one.parts]
    return joined(picture, tag("ul", legend, class_="legend"))


def _request(n_bytes: int, total_bytes: int) -> list[Markup]:
    width = min(100 * n_bytes / total_bytes, 100)
    beyond = " (beyond the bar)" if n_bytes > total_bytes else ""
    return [
        tag("rect", class_="part request", x=0, y=40, width=f"{width:.3f}%", height=6),
        tag("text", f"requested: {format_size(n_bytes)}{beyond}", class_="request-text", x=0, y=60),
    ]


def _legend(part: doc.BarPart, total_bytes: int) -> Markup:
    key = tag("rect", class_=f"part {part.name}", width=12, height=12)
    return tag(
        "li",
        tag("svg", key, class_="key", width=12, height=12, aria_hidden="true"),
        tag("b", part.name),
        " ",
        tag("span", format_size(part.n_bytes), class_="num"),
        " ",
        tag("span", share_of(part.n_bytes, total_bytes), class_="num dim"),
        " ",
        tag("span", part.meaning, class_="from"),
    )


def _listing(one: doc.Listing) -> Markup:
    n_shown = len(one.items) if len(one.items) <= FIRST_ITEMS + 1 else FIRST_ITEMS
    rest = [_card(item) for item in one.items[n_shown:]]
    first = [_card(item, is_open=i == 0) for i, item in enumerate(one.items[:n_shown])]
    folded = (
        tag("summary", f"{format_count(len(rest))} more"),
        tag("ul", rest, class_="advice"),
    )
    return joined(
        tag("ul", first, class_="advice"),
        tag("details", folded, class_="rest") if rest else None,
    )


def _card(item: doc.ListItem, *, is_open: bool = False) -> Markup:
    head = content(item.head)
    if item.blocks:
        summary = tag("summary", tag("h3", head))
        body = tag("details", summary, blocks(item.blocks), open=is_open)
    else:
        body = tag("p", head)
    rank = tag("div", item.label, class_=f"rank {item.style.value}")
    return tag("li", rank, tag("div", body, class_="body"), class_="card")


WIDTH: Final = 1104
HEIGHT: Final = 340
LEFT: Final = 76
RIGHT: Final = 16
TOP: Final = 18
BOTTOM: Final = 34
_MAX_TICKS: Final = 12
_AIR: Final = 0.02
"""The share of the width that stays free beside the outermost points; labels need more."""


def chart(one: Chart) -> Markup:
    """Return a chart: points with their labels, a line that fits them, and two axes."""
    top = max(1, *one.y, *(y for _, y in one.fit)) * 1.06
    low, span = min(one.x), (max(one.x) - min(one.x)) or 1.0

    def across(x: float) -> str:
        return f"{LEFT + (_AIR + (1 - 3 * _AIR) * (x - low) / span) * (WIDTH - LEFT - RIGHT):.1f}"

    def up(y: float, below: int = 0) -> str:
        return f"{HEIGHT - BOTTOM - y / top * (HEIGHT - BOTTOM - TOP) + below:.1f}"

    sizes = [
        (
            tag("line", class_="grid", x1=LEFT, x2=WIDTH - RIGHT, y1=up(size), y2=up(size)),
            tag("text", label, class_="end", x=LEFT - 8, y=up(size, 4)),
        )
        for size, label in _size_ticks(top)
    ]
    named = one.x[:: math.ceil(len(one.x) / _MAX_TICKS)]
    axis = [tag("text", f"{x:g}", class_="mid", x=across(x), y=HEIGHT - 14) for x in named]
    fit = "M" + "L".join(f"{across(x)} {up(y)}" for x, y in one.fit)
    points = [
        tag("g", tag("circle", tag("title", label), cx=across(x), cy=up(y), r=4), class_="r0")
        for x, y, label in zip(one.x, one.y, one.labels, strict=True)
    ]
    picture = tag(
        "svg",
        sizes,
        axis,
        tag("path", class_="fit r1", d=fit) if one.fit else None,
        points,
        class_="chart",
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_label=one.label,
    )
    return tag("div", picture, class_="scroll", tabindex=0, role="region", aria_label=one.label)


def _size_ticks(top: float) -> list[tuple[float, str]]:
    units = ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"))
    unit, name = next((pair for pair in units if top >= 2 * pair[0]), (1, "B"))
    step = _round_step(top / unit / 5)
    return [
        (i * step * unit, f"{i * step:g} {name}" if i else "0")
        for i in range(int(top / unit / step) + 1)
    ]


def _round_step(rough: float) -> float:
    """Return the next number up that is 1, 2 or 5 times a power of ten."""
    power: float = 10.0 ** math.floor(math.log10(rough))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))
