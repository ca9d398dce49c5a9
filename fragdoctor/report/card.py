"""Cards for Jupyter: a snapshot or a diagnosis at a glance.

One piece of HTML with inline styles alone, no script and nothing that is loaded. Text takes the
colour of the notebook, so that the card fits a light and a dark one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from fragdoctor.model.diagnosis import Cause, Diagnosis, Recommendation, Status
from fragdoctor.model.snapshot import BlockState, Snapshot
from fragdoctor.report import escape
from fragdoctor.report.phrases import also_text, location_text, predicted_text, verdict_title
from fragdoctor.report.text.checklist import TITLES
from fragdoctor.units import format_count, format_size, plural

MAX_SHOWN: Final = 3
MAX_DEVICES: Final = 16
MAX_TEXT: Final = 400
"""Characters of one text: a file may hold names of megabytes."""

# Readable on white and on black.
_GOOD, _BAD, _OPEN, _DIM = "#2a9d57", "#e5484d", "#c78a12", "opacity:.65"
_MARKS: Final = {
    Status.PASS: ("ok", _GOOD),
    Status.WARN: ("warn", _OPEN),
    Status.FAIL: ("FAIL", _BAD),
    Status.SKIP: ("skip", "inherit"),
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
_TITLE: Final = "font-weight:600;font-size:1.15em"
_HEADING: Final = "font-weight:600;margin:.8em 0 .2em"
_CODE: Final = "font:12px ui-monospace,monospace;background:rgba(128,128,128,.15);padding:0 .3em"


def diagnosis_card(diagnosis: Diagnosis) -> str:
    """Return the verdict, the checklist, the best advice and the worst pins as HTML."""
    verdict = diagnosis.verdict
    colour = _colour(verdict.cause)
    title = verdict_title(verdict)
    where = "" if verdict.device is None else f", GPU {verdict.device}"
    parts = [
        _div(title + where, f"{_TITLE};color:{colour}"),
        _div(verdict.summary),
        _div(f"Also: {also_text(verdict)}.") if verdict.also else "",
        _div(f"To settle: {verdict.decider}", _DIM) if verdict.decider else "",
        _checklist(diagnosis),
        _advice(diagnosis.recommendations),
        _pins(diagnosis),
        _div(
            "As tables: checklist_frame(), recommendations_frame(), pins_frame(), holders_frame()",
            f"margin-top:.8em;{_DIM}",
        ),
    ]
    return _box(parts, colour)


def snapshot_card(snapshot: Snapshot) -> str:
    """Return what a snapshot holds as HTML: its origin, its settings, and each device."""
    origin = snapshot.provenance
    high = origin.version_high or "newer"
    versions = f"PyTorch {origin.version_low} to {high}" if origin.version_low else "unknown"
    facts = [
        (
            "Size",
            f"{format_size(origin.n_bytes)}, {origin.container} {origin.compression}".rstrip(),
        ),
        ("Written by", versions),
        ("Settings", _settings(snapshot)),
    ]
    parts = [
        _div(f"Memory snapshot {escape.shorten_left(origin.source, 80)}", _TITLE),
        _table(("", ""), [(_span(a, _DIM), _text(b)) for a, b in facts], titled=False),
        _devices(snapshot),
        _div("What is wrong: fragdoctor.diagnose(snapshot)", f"margin-top:.8em;{_DIM}"),
    ]
    return _box(parts, "rgba(128,128,128,.6)")


def _colour(cause: Cause) -> str:
    if cause in (Cause.HEALTHY, Cause.NOT_MEMORY):
        return _GOOD
    return _OPEN if cause is Cause.UNKNOWN else _BAD


def _settings(snapshot: Snapshot) -> str:
    if not snapshot.settings.is_recorded:
        return "not recorded"
    return snapshot.settings.conf or "defaults"


def _devices(snapshot: Snapshot) -> str:
    segments, blocks = snapshot.segments, snapshot.blocks
    of_block = segments.device[blocks.segment] if len(blocks) else np.zeros(0, np.int32)
    rows = []
    for device in snapshot.devices[:MAX_DEVICES]:
        mine, own = segments.device == device, of_block == device
        is_live = own & (blocks.state == BlockState.ALLOCATED)
        events = snapshot.events.device_slice(device)
        # Sizes of a file are hostile: summed as Python's integers, which do not wrap around.
        reserved = sum(segments.total_bytes[mine].tolist())
        live = sum(blocks.size_bytes[is_live].tolist())
        sizes = (format_size(reserved), format_size(live))
        counts = (events.stop - events.start, int(mine.sum()), int(own.sum()))
        rows.append(tuple(map(_text, (f"GPU {device}", *sizes, *map(format_count, counts)))))
    if not rows:
        return _div("It holds no device memory and no trace.")
    titles = ("", "reserved", "live", "events", "segments", "blocks")
    more = len(snapshot.devices) - len(rows)
    rest = _div(f"{plural(more, 'more device')}", _DIM) if more > 0 else ""
    return f'<div style="margin-top:.6em">{_table(titles, rows, align="right")}</div>{rest}'


def _checklist(diagnosis: Diagnosis) -> str:
    rows = []
    for item in diagnosis.checklist:
        word, colour = _MARKS[item.status]
        needs_detail = item.status in (Status.WARN, Status.FAIL) and item.detail
        detail = f"<br>{_span(item.detail, _DIM)}" if needs_detail else ""
        style = f"color:{colour};font-weight:600" if colour != "inherit" else _DIM
        value = item.value if item.status is not Status.SKIP else item.value or item.detail
        title = TITLES.get(item.id, item.title)
        rows.append((_span(word, style), _text(title), _text(value) + detail))
    return _section("Checklist", _table(("", "", ""), rows, titled=False))


def _advice(recommendations: Sequence[Recommendation]) -> str:
    items = []
    for r in recommendations[:MAX_SHOWN]:
        todo = f'<br><code style="{_CODE}">{_text(r.setting)}</code>' if r.setting else ""
        todo = todo or (f"<br>{_text(r.change)}" if r.change else "")
        predicted = predicted_text(r.predicted)
        effect = f"<br>{_span(f'Predicted: {predicted}', _DIM)}" if predicted else ""
        items.append(
            f'<li style="margin:0 0 .3em">{_text(r.title)} '
            f"{_span(f'({r.confidence})', _DIM)}{todo}{effect}</li>"
        )
    listed = f'<ol style="margin:0;padding-left:1.6em">{"".join(items)}</ol>' if items else ""
    return _section(
        "What to do, best first", listed + _more(len(recommendations), "recommendations_frame()")
    )


def _pins(diagnosis: Diagnosis) -> str:
    rows = [
        (
            _text(format_size(p.pinned_bytes)),
            _text(format_count(p.n_blocks)),
            _text(format_size(p.block_bytes)),
            _text(location_text(p.location)),
        )
        for p in diagnosis.pins[:MAX_SHOWN]
    ]
    if not rows:
        return ""
    table = _table(("frees", "blocks", "size", "allocated at"), rows)
    return _section(
        "Live blocks that pin free memory", table + _more(len(diagnosis.pins), "pins_frame()")
    )


def _more(n: int, where: str) -> str:
    return _div(f"{n - MAX_SHOWN} more in {where}", _DIM) if n > MAX_SHOWN else ""


def _section(title: str, content: str) -> str:
    return f'<div style="{_HEADING}">{_text(title)}</div>{content}' if content else ""


def _table(
    titles: Sequence[str],
    rows: Iterable[Sequence[str]],
    align: str = "left",
    *,
    titled: bool = True,
) -> str:
    """Return a table; the cells are HTML already."""
    cell = f'<td style="{_CELL}{align}">'
    head = "".join(f"{cell}{_span(t, _DIM)}</td>" for t in titles)
    body = "".join(f"<tr>{''.join(f'{cell}{c}</td>' for c in row)}</tr>" for row in rows)
    return f'<table style="{_TABLE}">{f"<tr>{head}</tr>" if titled else ""}{body}</table>'


def _box(parts: Iterable[str], colour: str) -> str:
    return f'<div style="{_BOX.format(colour)}">{"".join(parts)}</div>'


def _div(text: str, style: str = "") -> str:
    return f'<div style="{style}">{_text(text)}</div>' if style else f"<div>{_text(text)}</div>"


def _span(text: str, style: str) -> str:
    return f'<span style="{style}">{_text(text)}</span>'


def _text(text: str) -> str:
    """Return text for HTML, cut where a file made it absurdly long."""
    shown = text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}..."
    return escape.html(shown)
