"""Cards for Jupyter: the short report of a diagnosis, or the contents of a snapshot at a glance.

A card is the terminal's report as one piece of HTML with inline styles only, no script and nothing
to load. Text takes the color of the notebook, so the card fits both light and dark themes.
"""

from __future__ import annotations

from io import StringIO
from typing import Final

import numpy as np
from msgspec.structs import replace
from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from fragdoctor.model.diagnosis import Diagnosis
from fragdoctor.model.prescription import Prescription
from fragdoctor.model.snapshot import BlockState, Snapshot
from fragdoctor.report import document as doc
from fragdoctor.report import escape, text
from fragdoctor.report.base import RenderOptions, render
from fragdoctor.report.document import code, dim, strong
from fragdoctor.report.views import analyze, prescription
from fragdoctor.units import format_count, format_size

MAX_DEVICES: Final = 16
_FRAMES: Final = ("checklist", "recommendations", "stranders", "holders")
_WIDTH: Final = 100

# Readable on both white and black; dim text is halfway between the first two.
_COLORS: Final = TerminalTheme(
    (160, 160, 160),
    (110, 110, 110),
    [
        (0, 0, 0), (229, 72, 77), (42, 157, 87), (199, 138, 18), (60, 130, 200), (160, 100, 190),
        (30, 140, 160), (128, 128, 128),
    ],
)  # fmt: skip
_BOX: Final = (
    '<pre style="border:1px solid rgba(128,128,128,.4);border-radius:4px;padding:.7em 1em;'
    "color:inherit;background:transparent;overflow-x:auto;white-space:pre;"
    'font:12px/1.4 ui-monospace,Menlo,Consolas,monospace">{code}</pre>'
)


def diagnosis_card(diagnosis: Diagnosis) -> str:
    """Return the short report of a diagnosis as HTML."""
    document = analyze.document(diagnosis, RenderOptions())
    tables = dim(f"As tables: {', '.join(f'{name}_frame()' for name in _FRAMES)}")
    last = doc.Section("", [doc.Paragraph(tables)])
    return _card(replace(document, sections=[*document.sections, last], footer=""))


def diagnosis_page(diagnosis: Diagnosis) -> str:
    """Return the page of a diagnosis."""
    return render("analyze", "html", diagnosis, RenderOptions())


def snapshot_card(snapshot: Snapshot) -> str:
    """Return the contents of a snapshot as HTML: its origin, its settings, and each device."""
    origin = snapshot.provenance
    facts = [*analyze.file_facts(origin), *analyze.setting_facts(snapshot.settings)[:1]]
    titles = ("", "reserved", "allocated", "events", "segments")
    devices = doc.Table(
        [doc.Column(title, kind="right" if title else "fit") for title in titles],
        [doc.Row(_device_row(snapshot, device)) for device in snapshot.devices[:MAX_DEVICES]],
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
        lead=[doc.facts(*facts)],
        sections=[doc.Section("", blocks), doc.Section("", [advice])],
    )
    return _card(document)


def _device_row(snapshot: Snapshot, device: int) -> list[str]:
    """Return the name of a device, its reserved and allocated memory, its events and segments."""
    segments, blocks = snapshot.segments, snapshot.blocks
    is_mine = segments.device == device
    is_live = is_mine[blocks.segment] & (blocks.state == BlockState.ALLOCATED)
    # Sizes in a file are hostile: sum them as Python integers, which do not wrap around.
    reserved_bytes = sum(segments.total_bytes[is_mine].tolist())
    allocated_bytes = sum(blocks.size_bytes[is_live].tolist())
    rows = snapshot.events.device_slice(device)
    counts = (int(rows.stop - rows.start), int(np.count_nonzero(is_mine)))
    sizes = (reserved_bytes, allocated_bytes)
    return [f"GPU {device}", *map(format_size, sizes), *map(format_count, counts)]


def prescription_card(found: Prescription) -> str:
    """Return a prescription as a card."""
    return _card(prescription.document(found))


def _card(document: doc.ReportDocument) -> str:
    """Return the terminal's short report as HTML, with rich's colors as inline styles."""
    shown = text.render(document, RenderOptions(_WIDTH, color=True, unicode=True))
    console = Console(file=StringIO(), width=_WIDTH, record=True)
    console.print(Text.from_ansi(shown), soft_wrap=True, end="")
    return console.export_html(theme=_COLORS, code_format=_BOX, inline_styles=True)
