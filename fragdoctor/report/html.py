"""A document as one HTML file that needs nothing else: no network, no framework, strict policy.

Every string of an input is hostile. Text reaches the markup through ``escape.visible`` and
Jinja2's autoescape alone; the policy names the file's own style and script by hash and allows
nothing else, so that markup that slipped through could still not run or load anything.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
from collections.abc import Callable, Sequence
from importlib.resources import files
from types import CodeType
from typing import Any, Final

import jinja2
from jinja2.bccache import Bucket
from markupsafe import Markup

from fragdoctor.model.diagnosis import SegmentRun
from fragdoctor.report import escape
from fragdoctor.report.base import RenderOptions
from fragdoctor.report.charts import drawn, of_strip
from fragdoctor.report.document import Detail, Gauge, ReportDocument, Spark, plain, spans
from fragdoctor.report.words import share_of
from fragdoctor.units import format_count, format_size, plural

MAX_SHOWN: Final = 1500
"""Characters of one text: a file may hold names of megabytes."""

MAX_ROWS: Final = 5000
"""Rows of one table: beyond, a page is slower than anybody reads."""

LONG_TABLE: Final = 40
"""Rows from which on a table is folded."""

EVERYTHING: Final = (Detail.USUAL, Detail.FULL)
"""But not ``Detail.PAGE``: the interactive page has a place of its own for its graphics."""


def render(document: ReportDocument, options: RenderOptions) -> str:
    """Return the document as a page without any script; it always has everything."""
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

    The template is ``document.html.j2`` or one that extends it; script and style are the page's
    own, beside the style of all reports. ``may_ask``: the script may ask the server that the page
    came from. ``values`` are further values for the template.
    """
    style = source("report.css") + style
    made = environment(EVERYTHING)
    made.globals["links"] = document.links
    return (
        made.get_template(template).render(
            document=document,
            style=Markup(style),  # noqa: S704 - our own file
            script=Markup(script),  # noqa: S704 - our own file
            policy=policy(style, script, may_ask=may_ask),
            interactive=bool(script),
            **values,
        )
        + "\n"
    )


def environment(shown: Sequence[Detail]) -> jinja2.Environment:
    """Return an environment that escapes every expression and shows what cannot be seen."""
    made = jinja2.Environment(
        loader=jinja2.PackageLoader("fragdoctor.report", "templates"),
        bytecode_cache=_COMPILED,
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_visible,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "size": format_size,
        "count": format_count,
        "share": share_of,
        "spans": lambda content: list(spans(content)),
        "plain": plain,
        "drawn": drawn,
        "chart": of_strip,
        "curve": _curve,
        "pieces": _pieces,
        "path": Markup,  # coordinates only; a path is longer than text may be
    }
    made.globals |= {
        "plural": plural,
        "shown": shown,
        "max_rows": MAX_ROWS,
        "long_table": LONG_TABLE,
        "is_gauge": lambda cell: isinstance(cell, Gauge),
        "is_spark": lambda cell: isinstance(cell, Spark),
        "next_id": _counter(),
    }
    return made


class _Compiled(jinja2.BytecodeCache):
    """Templates that this process has compiled: a job has a page for each rank."""

    def __init__(self) -> None:
        self._code: dict[str, CodeType] = {}

    def load_bytecode(self, bucket: Bucket) -> None:
        """Put in what was compiled from the same source."""
        bucket.code = self._code.get(bucket.key + bucket.checksum)

    def dump_bytecode(self, bucket: Bucket) -> None:
        """Keep what was compiled."""
        if bucket.code is not None:
            self._code[bucket.key + bucket.checksum] = bucket.code


_COMPILED: Final = _Compiled()


def policy(style: str, script: str = "", *, may_ask: bool = False) -> str:
    """Return the content security policy: this style and this script, by hash, and nothing else.

    A page that may ask reaches the server that it came from besides.
    """
    scripts = f"'{_hash(script)}'" if script else "'none'"
    asks = "connect-src 'self'; " if may_ask else ""
    return (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src {scripts}; "
        f"{asks}img-src data:; base-uri 'none'; form-action 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    )


def source(name: str) -> str:
    """Return a style or script of ours: ``page/main.js``."""
    return files("fragdoctor.report").joinpath("templates", *name.split("/")).read_text("utf-8")


def _counter() -> Callable[[], str]:
    numbers = itertools.count(1)
    return lambda: str(next(numbers))


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode('ascii')}"


def _visible(value: object) -> object:
    """Make what cannot be seen visible and bound what is long, in every expression."""
    if isinstance(value, Markup) or not isinstance(value, str):
        return value
    n_more = len(value) - MAX_SHOWN
    visible = escape.visible(value[:MAX_SHOWN])
    return f"{visible} ... ({format_count(n_more)} more characters)" if n_more > 0 else visible


def _curve(spark: Spark) -> str:
    """Return the points of a small curve, 100 wide and 20 high."""
    top = max(spark.values, default=0) or 1
    n = max(1, len(spark.values) - 1)
    return " ".join(
        f"{100 * i / n:.1f},{20 - 18 * v / top:.1f}" for i, v in enumerate(spark.values)
    )


def _pieces(runs: tuple[SegmentRun, ...]) -> list[tuple[str, float, float]]:
    """Return the kind, the start and the width of each run of blocks, in per cent."""
    total = sum(run.n_bytes for run in runs) or 1
    pieces, start = [], 0
    for run in runs:
        kind = "pin" if run.pin is not None else run.kind.value
        pieces.append((kind, 100 * start / total, 100 * run.n_bytes / total))
        start += run.n_bytes
    return pieces
