"""The interactive page: the document of a diagnosis, with graphics that answer to the mouse.

What the graphics show travels in a compressed blob and reaches the page as text nodes and canvas
text only.
"""

from __future__ import annotations

from typing import Final

from fragdoctor.errors import ConfigError
from fragdoctor.model.diagnosis import Diagnosis
from fragdoctor.report import html
from fragdoctor.report.document import ReportDocument
from fragdoctor.report.page.payload import encode_payload, shown_analyses
from fragdoctor.units import format_size

MAX_PAGE_BYTES: Final = 3_000_000
SCALES: Final = (1.0, 0.5, 0.2, 0.05)
SCRIPTS: Final = (
    "decode",
    "drawing",
    "envelope",
    "timeline",
    "timeline_painting",
    "segment_map",
    "icicle",
    "main",
)


def render_page(diagnosis: Diagnosis, document: ReportDocument) -> str:
    """Return the whole page, below 3 MB: the graphics are made coarser until it is.

    Raises:
        ConfigError: even the coarsest is larger.
    """
    script = "\n".join(html.source(f"page/{name}.js") for name in SCRIPTS)
    devices = sorted({*shown_analyses(diagnosis), *(f.device for f in diagnosis.devices)})
    page = ""
    for scale in SCALES:
        page = html.page(
            document,
            "page/page.html.j2",
            script,
            payload=encode_payload(diagnosis, scale),
            devices=devices,
        )
        if len(page.encode()) <= MAX_PAGE_BYTES:
            return page
    raise ConfigError(
        f"The page would be {format_size(len(page.encode()))}, above its limit of 3 MB.",
        hint="Choose one device with --device, or take --format json.",
    )
