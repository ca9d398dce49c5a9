"""The page's text parts as plain values for the template: what stands where, already worded.

Strings stay raw here; the template escapes every one of them (``html.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from fragdoctor.analysis.result import DeviceAnalysis
from fragdoctor.model.diagnosis import DeviceFigures, Diagnosis, HolderReport, PinReport, Status
from fragdoctor.model.finding import Location
from fragdoctor.model.oom import OomMessage
from fragdoctor.model.phases import PhaseReport
from fragdoctor.report import escape
from fragdoctor.report.base import RenderOptions
from fragdoctor.report.phase_words import shown_phases
from fragdoctor.report.phrases import shown_first
from fragdoctor.report.text.memory import message_of, parts_of
from fragdoctor.report.text.page import Page
from fragdoctor.units import format_count, format_size

MAX_ROWS: Final = 40
"""Rows of a table; what is left out is counted below it."""

STATUS_WORDS: Final = {
    Status.PASS: "pass",
    Status.WARN: "look",
    Status.FAIL: "fail",
    Status.SKIP: "unknown",
}


@dataclass(frozen=True, slots=True)
class BarPart:
    """One part of the memory bar, in per cent of its width."""

    name: str
    meaning: str
    n_bytes: int
    x: float
    width: float


@dataclass(frozen=True, slots=True)
class DeviceView:
    """What the page says about one device in words and tables."""

    device: int
    figures: DeviceFigures | None
    bar: Sequence[BarPart]
    bar_total: int
    request_bytes: int | None
    key_figures: Sequence[tuple[str, str, str]]
    pins: Sequence[PinReport]
    n_more_pins: int
    n_shared_pins: int
    holders: Sequence[HolderReport]
    n_more_holders: int
    moments: Sequence[Moment]
    phases: PhaseReport | None = None


@dataclass(frozen=True, slots=True)
class Moment:
    """A row of the timeline's table."""

    what: str
    state: int
    allocated_bytes: int
    active_bytes: int
    reserved_bytes: int
    note: str = ""


def device_views(
    diagnosis: Diagnosis, analyses: Mapping[int, DeviceAnalysis], max_rows: int = MAX_ROWS
) -> list[DeviceView]:
    """Return one view per device that any input speaks of, the verdict's device first."""
    figures = {f.device: f for f in diagnosis.devices}
    known = sorted(set(figures) | set(analyses))
    return [
        _device_view(diagnosis, d, figures.get(d), analyses.get(d), max_rows)
        for d in shown_first(diagnosis, known)
    ]


def _device_view(
    diagnosis: Diagnosis,
    device: int,
    figures: DeviceFigures | None,
    analysis: DeviceAnalysis | None,
    max_rows: int,
) -> DeviceView:
    message = message_of(diagnosis, device)
    parts = [] if figures is None else parts_of(figures, message, Page(RenderOptions()).glyphs)
    total = sum(p.n_bytes for p in parts)
    bar, x = [], 0.0
    for part in parts:
        width = 100 * part.n_bytes / total
        bar.append(BarPart(part.name, part.meaning, part.n_bytes, x, width))
        x += width
    all_pins = [p for p in diagnosis.pins if p.device == device]
    pins = [p for p in all_pins if p.pinned_bytes > 0]
    holders = [h for h in diagnosis.holders if h.device == device]
    return DeviceView(
        device=device,
        figures=figures,
        bar=bar,
        bar_total=total,
        request_bytes=_request(message, analysis),
        key_figures=_key_figures(figures),
        pins=pins[:max_rows],
        n_more_pins=len(pins[max_rows:]),
        n_shared_pins=len(all_pins) - len(pins),
        holders=holders[:max_rows],
        n_more_holders=len(holders[max_rows:]),
        moments=_moments(diagnosis, analysis),
        phases=next((p for p in shown_phases(diagnosis) if p.device == device), None),
    )


def _request(message: OomMessage | None, analysis: DeviceAnalysis | None) -> int | None:
    """Return the request that failed: the message's, else the last ``oom`` of the trace."""
    if message is not None and message.is_device_oom and message.requested_bytes is not None:
        return message.requested_bytes
    if analysis is not None and analysis.ooms and analysis.ooms[-1].is_last_row:
        return analysis.ooms[-1].rounded_bytes
    return None


def _key_figures(figures: DeviceFigures | None) -> list[tuple[str, str, str]]:
    """Return (label, value, explanation) of the figures that the input gives."""
    if figures is None:
        return []
    sizes = (
        ("Capacity", figures.capacity_bytes, "what PyTorch could have"),
        ("Peak reserved", figures.peak_reserved_bytes, "most taken from the driver"),
        ("Peak allocated", figures.peak_allocated_bytes, "most held by tensors"),
        ("Reserved", figures.reserved_bytes, "taken from the driver, at the end"),
        ("Allocated", figures.allocated_bytes, "held by tensors, at the end"),
        ("Pinned free", figures.pinned_free_bytes, "free, but in segments that live blocks hold"),
        ("Largest free block", figures.largest_free_block_bytes, "the largest hole in the cache"),
    )
    counts = (
        ("Retries", figures.alloc_retries, "cache flushes after a refusal"),
        ("OOMs", figures.ooms, "refusals that were raised"),
        ("Events", figures.n_events, "in the recorded trace"),
    )
    return [(label, format_size(v), why) for label, v, why in sizes if v is not None] + [
        (label, format_count(v), why) for label, v, why in counts if v is not None
    ]


def _moments(diagnosis: Diagnosis, analysis: DeviceAnalysis | None) -> list[Moment]:
    """Return the moments worth a row: start, peaks, flushes, OOMs, end; in order."""
    snapshot = diagnosis.case.snapshot
    if snapshot is None or analysis is None or analysis.timeline is None:
        return []
    timeline = analysis.timeline
    first_row = snapshot.events.device_slice(analysis.device).start
    places = [("Start of the trace", 0, "")]
    for name, curve in (
        ("Peak allocated", timeline.allocated_bytes),
        ("Peak reserved", timeline.reserved_bytes),
    ):
        places.append((name, int(curve.argmax()), ""))
    for oom in analysis.ooms[-MAX_ROWS // 2 :]:
        note = f"{format_size(oom.rounded_bytes)} asked"
        if oom.device_free_bytes is not None:
            note += f", {format_size(oom.device_free_bytes)} free at the driver"
        places.append(("Out of memory", oom.row - first_row + 1, note))
    end = ("End of the trace", analysis.n_events, "")
    largest = sorted(analysis.flushes, key=lambda f: -f.released_bytes)[: MAX_ROWS // 2]
    places += [
        (
            f"Flush ({f.cause})",
            f.last_row - first_row + 1,
            f"{format_size(f.released_bytes)} returned",
        )
        for f in largest
    ]
    return [
        Moment(
            what,
            state,
            int(timeline.allocated_bytes[state]),
            int(timeline.active_bytes[state]),
            int(timeline.reserved_bytes[state]),
            note,
        )
        for what, state, note in [*sorted(places, key=lambda p: p[1]), end]
    ]


def stack_line(location: Location) -> str:
    """Return ``file:line function`` of one frame for a stack listing."""
    line = f":{location.line}" if 0 < location.line < 2**31 else ""
    return f"{escape.shorten_left(location.filename, 240)}{line}  {location.function[:240]}"


@dataclass(frozen=True, slots=True)
class MessageView:
    """A message of the input as the page quotes it."""

    title: str
    text: str
    is_primary: bool


def message_views(diagnosis: Diagnosis) -> list[MessageView]:
    """Return the messages of the input in their order, each with where it stands."""
    log = diagnosis.case.oom
    if log is None:
        return []
    return [
        MessageView(_message_title(m), m.text or m.kind, i == log.primary)
        for i, m in enumerate(log.messages)
    ]


def _message_title(message: OomMessage) -> str:
    said = [f"line {format_count(message.line)}"]
    if message.rank is not None:
        said.append(f"rank {message.rank}")
    if message.device_index is not None:
        said.append(f"GPU {message.device_index}")
    if message.requested_bytes is not None:
        said.append(f"{format_size(message.requested_bytes)} asked for")
    return ", ".join(said)
