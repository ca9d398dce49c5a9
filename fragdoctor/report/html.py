"""A document as one self-contained HTML file: no network, no framework, a strict policy.

Every string from an input is hostile. Text reaches the markup only through ``escape.visible`` and
Jinja2's autoescape. The policy names the file's own style and script by hash and allows nothing
else, so even markup that slipped through could not run or load anything. Charts are drawn from
numbers only.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import jinja2
from markupsafe import Markup
from msgspec import Struct

from fragdoctor.report import escape
from fragdoctor.report.base import RenderOptions
from fragdoctor.report.document import Chart, Detail, Gauge, ReportDocument, plain, spans
from fragdoctor.report.words import share_of
from fragdoctor.units import GIB, KIB, MIB, TIB, format_count, format_size, plural

WIDTH: Final = 1104
HEIGHT: Final = 340
LEFT: Final = 76
RIGHT: Final = 16
TOP: Final = 18
BOTTOM: Final = 34
_MAX_TICKS: Final = 12
_AIR: Final = 0.02
"""The share of the width that stays free beside the outermost points; labels need more."""


class Drawing(Struct, frozen=True):
    """Everything that the SVG of one chart draws, in the coordinates of the drawing.

    ``marks`` are points with their labels, ``fit`` the ends of a line; ticks are places on an axis
    with their labels.
    """

    marks: Sequence[tuple[float, float, str]]
    fit: Sequence[tuple[float, float]]
    x_ticks: Sequence[tuple[float, str]]
    y_ticks: Sequence[tuple[float, str]]


def drawn(chart: Chart) -> Drawing:
    """Return a chart in coordinates."""
    top = max(1, *chart.y, *(y for _, y in chart.fit)) * 1.06
    low, span = min(chart.x), (max(chart.x) - min(chart.x)) or 1.0

    def across(x: float) -> float:
        return LEFT + (_AIR + (1 - 3 * _AIR) * (x - low) / span) * (WIDTH - LEFT - RIGHT)

    def up(y: float) -> float:
        return HEIGHT - BOTTOM - y / top * (HEIGHT - BOTTOM - TOP)

    points = zip(chart.x, chart.y, chart.labels, strict=True)
    return Drawing(
        [(across(x), up(y), label) for x, y, label in points],
        [(across(x), up(y)) for x, y in chart.fit],
        [(across(x), f"{x:g}") for x in chart.x[:: math.ceil(len(chart.x) / _MAX_TICKS)]],
        [(up(size), label) for size, label in _size_ticks(top)],
    )


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


MAX_SHOWN: Final = 1500
"""The most characters of one text: a file may hold names of megabytes."""

MAX_ROWS: Final = 5000
"""The most rows of one table: nobody reads more, and they slow the page down."""

LONG_TABLE: Final = 40
"""Tables with at least this many rows are folded."""
FIRST_ITEMS: Final = 4
"""Measures of a list that a page shows; the rest is folded."""

EVERYTHING: Final = (Detail.USUAL, Detail.FULL)
"""``Detail.PAGE`` is left out: the interactive page has its own place for its graphics."""


def render(document: ReportDocument, options: RenderOptions) -> str:
    """Return the document as a page without any script; it always includes everything."""
    del options
    return page(document, "document.html.j2")


def page(
    document: ReportDocument,
    template: str,
    script: str = "",
    style: str = "",
    *,
    may_ask: bool = False,
    **values: Any,
) -> str:
    """Return a document as a page.

    The template is ``document.html.j2`` or one that extends it. ``script`` and ``style`` belong to
    this page and come on top of the style of all reports. ``may_ask`` lets the script query the
    server that the page came from. ``values`` are further values for the template.
    """
    style = source("report.css") + style
    return (
        environment()
        .get_template(template)
        .render(
            document=document,
            style=Markup(style),  # noqa: S704 - our own file
            script=Markup(script),  # noqa: S704 - our own file
            policy=policy(style, script, may_ask=may_ask),
            **values,
        )
        + "\n"
    )


TEMPLATES: Final = Path(__file__).parent / "templates"


@cache
def environment() -> jinja2.Environment:
    """Return an environment that escapes every expression and shows invisible characters."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_visible,
        trim_blocks=True,
        lstrip_blocks=True,
        optimized=False,  # there is nothing to optimize, and looking for it takes an eighth longer
    )
    made.filters |= {
        "size": format_size,
        "count": format_count,
        "share": share_of,
        "spans": lambda content: list(spans(content)),
        "plain": plain,
        "drawn": drawn,
        "data": Markup,  # made by ourselves; it exceeds the limit for text
    }
    made.globals |= {
        "plural": plural,
        "shown": EVERYTHING,
        "max_rows": MAX_ROWS,
        "long_table": LONG_TABLE,
        "first_items": FIRST_ITEMS,
        "is_gauge": lambda cell: isinstance(cell, Gauge),
    }
    return made


def policy(style: str, script: str = "", *, may_ask: bool = False) -> str:
    """Return the content security policy: allow this style and this script, by hash, nothing else.

    A page that may ask can also reach the server that it came from.
    """
    scripts = f"'{_hash(script)}'" if script else "'none'"
    asks = "connect-src 'self'; " if may_ask else ""
    return (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src {scripts}; "
        f"{asks}img-src data:; base-uri 'none'; form-action 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    )


def source(name: str) -> str:
    """Return one of our styles or scripts, such as ``page/main.js``."""
    return (TEMPLATES / name).read_text("utf-8")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode('ascii')}"


def _visible(value: object) -> object:
    """Make invisible characters visible and cut long text, in every expression."""
    if isinstance(value, Markup) or not isinstance(value, str):
        return value
    n_more = len(value) - MAX_SHOWN
    visible = escape.visible(value[:MAX_SHOWN])
    return f"{visible} ... ({format_count(n_more)} more characters)" if n_more > 0 else visible
