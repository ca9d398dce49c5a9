"""Cards for Jupyter: the short report of a diagnosis, or what a snapshot holds, at a glance.

One piece of HTML with inline styles alone, no script and nothing that is loaded. Text takes the
colour of the notebook, so that the card fits a light and a dark one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

import numpy as np

from fragdoctor.model.diagnosis import Diagnosis
from fragdoctor.model.prescription import Prescription
from fragdoctor.model.snapshot import BlockState, Snapshot
from fragdoctor.report import document as doc
from fragdoctor.report import escape
from fragdoctor.report.base import RenderOptions, Verbosity
from fragdoctor.report.document import Style, code, dim, strong
from fragdoctor.report.views import analyze, prescription
from fragdoctor.units import format_count, format_size

MAX_DEVICES: Final = 16
MAX_TEXT: Final = 400
"""Characters of one text: a file may hold names of megabytes."""

# Readable on white and on black.
_COLOURS: Final = {Style.GOOD: "#2a9d57", Style.BAD: "#e5484d", Style.WARN: "#c78a12"}
_GREY: Final = "rgba(128,128,128,.6)"
_CODE: Final = "font:12px ui-monospace,monospace;background:rgba(128,128,128,.15);padding:0 .3em"
_STYLES: Final = {
    Style.STRONG: "font-weight:600",
    Style.DIM: "opacity:.65",
    Style.CODE: _CODE,
    **{style: f"color:{colour};font-weight:600" for style, colour in _COLOURS.items()},
}
_BOX: Final = (
    "border:1px solid rgba(128,128,128,.4);border-left:4px solid {};border-radius:4px;"
    "padding:.7em 1em;max-width:62em;color:inherit;background:transparent;"
    "font:13px/1.45 system-ui,sans-serif"
)
_TABLE: Final = (
    "font:inherit;border-collapse:collapse;border:none;margin:0;color:inherit;"
    "background:transparent"
)
_CELL: Final = (
    "border:none;padding:.1em 1.2em .1em 0;vertical-align:top;background:transparent;"
    "color:inherit;white-space:normal;text-align:"
)
_FRAMES: Final = ("checklist", "recommendations", "stranders", "holders")
_TITLE: Final = "font-weight:600;font-size:1.15em"
_HEADING: Final = "font-weight:600;margin:.8em 0 .2em"


def diagnosis_card(diagnosis: Diagnosis) -> str:
    """Return the short report of a diagnosis as HTML."""
    document = analyze.document(diagnosis, RenderOptions())
    tables = dim(f"As tables: {', '.join(f'{name}_frame()' for name in _FRAMES)}")
    last = doc.Section("", [doc.Paragraph(tables)])
    return _card(replace(document, sections=[*document.sections, last]))


def snapshot_card(snapshot: Snapshot) -> str:
    """Return what a snapshot holds as HTML: its origin, its settings, and each device."""
    origin = snapshot.provenance
    high = origin.version_high or "newer"
    container = f"{origin.container} {origin.compression}".rstrip()
    conf = snapshot.settings.conf or "defaults"
    facts: list[tuple[str, doc.Content]] = [
        ("Size", f"{format_size(origin.n_bytes)}, {container}"),
        ("Written by", f"PyTorch {origin.version_low} to {high}" if origin.version_low else "-"),
        ("Settings", conf if snapshot.settings.is_recorded else "not recorded"),
    ]
    devices = doc.tabled(
        snapshot.devices[:MAX_DEVICES],
        doc.Column("", lambda d: f"GPU {d}"),
        doc.Column("reserved", lambda d: format_size(_reserved(snapshot, d)), "right"),
        doc.Column("allocated", lambda d: format_size(_allocated(snapshot, d)), "right"),
        doc.Column("events", lambda d: format_count(_n_events(snapshot, d)), "right"),
        doc.Column("segments", lambda d: format_count(_n_segments(snapshot, d)), "right"),
        n_left_out=max(0, len(snapshot.devices) - MAX_DEVICES),
    )
    nothing = "" if snapshot.devices else "It holds no device memory and no trace."
    name = escape.shorten_left(origin.source, 80)
    blocks = (devices, doc.Paragraph(nothing))
    advice = doc.Paragraph(["What is wrong: ", code("fragdoctor.diagnose(snapshot)")])
    document = doc.ReportDocument(
        title=name,
        headline=[strong("Memory snapshot"), dim(f"  {name}")],
        brief=[],
        lead=[doc.Facts(facts)],
        sections=[doc.Section("", blocks), doc.Section("", [advice])],
    )
    return _card(document)


# Sizes of a file are hostile: summed as Python's integers, which do not wrap around.
def _reserved(snapshot: Snapshot, device: int) -> int:
    return sum(snapshot.segments.total_bytes[snapshot.segments.device == device].tolist())


def _allocated(snapshot: Snapshot, device: int) -> int:
    blocks = snapshot.blocks
    if not len(blocks):
        return 0
    mine = snapshot.segments.device[blocks.segment] == device
    return sum(blocks.size_bytes[mine & (blocks.state == BlockState.ALLOCATED)].tolist())


def _n_segments(snapshot: Snapshot, device: int) -> int:
    return int(np.count_nonzero(snapshot.segments.device == device))


def _n_events(snapshot: Snapshot, device: int) -> int:
    rows = snapshot.events.device_slice(device)
    return int(rows.stop - rows.start)


def prescription_card(found: Prescription) -> str:
    """Return a prescription as a card."""
    return _card(prescription.document(found))


def _card(document: doc.ReportDocument) -> str:
    details = doc.DETAILS[Verbosity.NORMAL]
    parts = [f'<div style="{_TITLE}">{_content(document.headline)}</div>']
    parts += [_block(b) for b in doc.Section("", document.lead).only(details)]
    for section in document.sections:
        inner = "".join(_block(b) for b in section.only(details))
        title = f'<div style="{_HEADING}">{_text(section.title)}</div>' if section.title else ""
        parts.append(f"{title}{inner}" if inner else "")
    colour = _COLOURS.get(document.tone, _GREY) if document.tone else _GREY
    return f'<div style="{_BOX.format(colour)}">{"".join(parts)}</div>'


def _block(block: doc.DocumentBlock) -> str:
    """Return a block as HTML; pictures are left to reports."""
    if isinstance(block, doc.Paragraph):
        return f"<div>{_content(block.content)}</div>"
    if isinstance(block, doc.Code):
        lines = "<br>".join(_text(line) for line in block.lines)
        return f'<div><code style="{_CODE}">{lines}</code></div>'
    if isinstance(block, doc.Bullets):
        return "".join(f"<div>- {_content(item)}</div>" for item in block.items)
    if isinstance(block, doc.Facts):
        return _rows([(_span(label, Style.DIM), _content(c)) for label, c in block.items])
    if isinstance(block, doc.Table):
        rows = [[_cell(cell) for cell in row.cells] for row in block.rows[: block.shown]]
        titles = [_span(c.title, Style.DIM) for c in block.columns]
        has_titles = any(c.title for c in block.columns)
        more = f"{format_count(block.n_left_out)} more" if block.n_left_out else ""
        return _rows([titles, *rows] if has_titles else rows) + _text(more)
    return ""


def _rows(rows: Iterable[Iterable[str]]) -> str:
    cell = f'<td style="{_CELL}left">'
    body = "".join(f"<tr>{''.join(f'{cell}{c}</td>' for c in row)}</tr>" for row in rows)
    return f'<table style="{_TABLE}">{body}</table>'


def _cell(cell: doc.Cell) -> str:
    return "" if isinstance(cell, doc.Drawn) else _content(cell)


def _content(content: doc.Content) -> str:
    return "".join(_span(text, style) for text, style in doc.spans(content))


def _span(text: str, style: Style | None) -> str:
    return f'<span style="{_STYLES[style]}">{_text(text)}</span>' if style else _text(text)


def _text(text: str) -> str:
    """Return text for HTML, cut where a file made it absurdly long."""
    return escape.html(text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}...")
