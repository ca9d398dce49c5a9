"""The interactive page: the document of a diagnosis, with graphics that answer to the mouse.

What the graphics show travels in a compressed blob and reaches the page as text nodes and canvas
text only.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

from fragdoctor.errors import ConfigError
from fragdoctor.model.diagnosis import Diagnosis
from fragdoctor.report import escape, html
from fragdoctor.report.charts import drawn
from fragdoctor.report.document import Chart, Graphic, ReportDocument
from fragdoctor.report.page.payload import encode_payload, shown_analyses
from fragdoctor.units import format_size

MAX_PAGE_BYTES: Final = 5_000_000
SCALES: Final = (1.0, 0.5, 0.2, 0.05)
SCRIPTS: Final = (
    "decode",
    "drawing",
    "vector",
    "common",
    "envelope",
    "lives",
    "bands",
    "timeline",
    "timeline_painting",
    "segment_map",
    "icicle",
    "tables",
    "whatif",
    "explorer",
    "main",
)


READING_SCRIPTS: Final = ("drawing", "common", "envelope", "charts")
WITHOUT_TRACE: Final = {
    "events": "This recording has no events that can be stepped through.",
    "whatif": "Nothing was replayed: that takes a recording of a run that failed or was tight.",
    "blocks": "This recording does not say which blocks lived when.",
}


def graphics_of(document: ReportDocument) -> dict[str, str]:
    """Return the graphics that the explorer shows, each with what stands there without its data."""
    blocks = [b for s in document.sections for b in s.blocks if isinstance(b, Graphic)]
    found = {b.name: b.absent for b in blocks}
    return {**found, **WITHOUT_TRACE} if found else {}


def render_page(diagnosis: Diagnosis, document: ReportDocument, *, is_live: bool = False) -> str:
    """Return the whole page, below 5 MB: the graphics are made coarser until it is.

    A live page asks the server that it came from to replay what-ifs.

    Raises:
        ConfigError: even the coarsest is larger.
    """
    script = _script(SCRIPTS)
    devices = sorted({*shown_analyses(diagnosis), *(f.device for f in diagnosis.devices)})
    page = ""
    for scale in SCALES:
        page = html.page(
            document,
            "page/page.html.j2",
            script,
            html.source("page/reading.css") + html.source("page/explorer.css"),
            may_ask=is_live,
            payload=encode_payload(diagnosis, scale, is_live=is_live),
            devices=devices,
            graphics=graphics_of(document),
        )
        if len(page.encode()) <= MAX_PAGE_BYTES:
            return page
    raise ConfigError(
        f"The page would be {format_size(len(page.encode()))}, above its limit of 5 MB.",
        hint="Choose one device with --device, or take --format json.",
    )


def render_reading_page(document: ReportDocument) -> str:
    """Return a document whose charts can be read with the pointer and whose tables sort."""
    charts = [
        {
            "across": drawn(chart).across,
            "series": [
                {"name": s.name, "x": list(s.x), "y": list(s.y), "number": s.number}
                for s in chart.series
                if s.shape == "step"
            ],
        }
        for chart in charts_of(document)
    ]
    return html.page(
        document,
        "page/reading.html.j2",
        _script(READING_SCRIPTS),
        html.source("page/reading.css"),
        charts=escape.json_in_script(json.dumps(charts)),
    )


def charts_of(document: ReportDocument) -> list[Chart]:
    """Return the charts of a document in the order in which a page shows them."""
    blocks = [b for s in document.sections for b in s.only(html.EVERYTHING)]
    return [b for b in blocks if isinstance(b, Chart)]


def _script(names: Sequence[str]) -> str:
    return "\n".join(html.source(f"page/{name}.js") for name in names)
