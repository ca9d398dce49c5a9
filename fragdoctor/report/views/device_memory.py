"""What a device's memory is made of, and its course over time: bar, timeline, phases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from fragdoctor.model.case import OomMessage
from fragdoctor.model.diagnosis import (
    IDLE_SHARE,
    DeviceFigures,
    Diagnosis,
    Moment,
    MomentFigures,
    TimelineStrip,
)
from fragdoctor.model.finding import line_text
from fragdoctor.model.phases import (
    Category,
    CategoryShare,
    HeldBytes,
    MomentReport,
    PhaseFigures,
    PhaseReport,
    TrainingPhase,
)
from fragdoctor.report import document as doc
from fragdoctor.report.document import NO_STACK, Detail, Style, dim, location_text, strong
from fragdoctor.report.words import CATEGORY_NAMES, LIVE_WHEN, by_device, sureness
from fragdoctor.rules.request_sources import request_of_message
from fragdoctor.units import format_count, format_share, format_size, plural, signed_size

MIN_SHOWN_SHARE: Final = 0.05
"""What is a smaller share of the largest row, or of its whole, only distracts."""

_MAX_HELD: Final = 2
_PEAK_PLACES: Final = {
    TrainingPhase.UNKNOWN: "",
    TrainingPhase.SETUP: "the setup",
    TrainingPhase.FORWARD: "the forward pass",
    TrainingPhase.BACKWARD: "the backward pass",
    TrainingPhase.OPTIMIZER: "the optimizer step",
}
_KEPT_MEANS: Final = (
    "Kept: outlives its step and is none of the others, such as library workspaces, caches, copies "
    "of weights, or a leak."
)


def phase_sections(diagnosis: Diagnosis) -> list[doc.Section]:
    """Return the training phases of each device: their peaks, and what those are made of."""
    found = sorted(diagnosis.phases, key=by_device(diagnosis))
    return [_phases(report) for report in found if len(report.phases) > 1]


def _phases(report: PhaseReport) -> doc.Section:
    def marked(phase: PhaseFigures, text: str) -> doc.Content:
        return strong(text) if phase.phase is report.peak_phase else text

    table = doc.tabled(
        report.phases,
        doc.Column("phase", lambda p: marked(p, p.phase.word)),
        doc.Column("passes", lambda p: "unknown" if p.n_passes is None else doc.count(p.n_passes),
                   "right"),
        doc.Column("usual peak", lambda p: doc.size(p.n_passes and p.median_peak_bytes), "right"),
        doc.Column("worst", lambda p: marked(p, format_size(p.worst_peak_bytes)), "right"),
        doc.Column("mostly", _held, "wrap"),
    )  # fmt: skip
    place = _PEAK_PLACES[report.peak_phase]
    peak = f"The peak of {format_size(report.peak_bytes)} is in {place}." if place else ""
    limits = f"Activations and caches cannot be distinguished: {report.reason}."
    said = " ".join(s for s in (peak, limits if report.reason else "") if s)
    has_kept = any(
        s.category is Category.KEPT and s.n_bytes >= MIN_SHOWN_SHARE * report.peak_bytes
        for s in (*report.at_peak, *report.at_rest)
    )
    blocks = (
        table,
        doc.Paragraph(said),
        _categories(report),
        doc.Paragraph(dim(_KEPT_MEANS if has_kept else "")),
    )
    note = f"GPU {report.device}, allocated memory by phase of a training step"
    name = f"phases-{report.device}"
    return doc.Section("Phases", blocks, note, name, report.device, detail=Detail.FULL)


def _held(phase: PhaseFigures) -> str:
    """Return what holds most of a phase's peak, in a few words."""
    return _shares(phase.held[:_MAX_HELD], sum(s.n_bytes for s in phase.held), MIN_SHOWN_SHARE)


def _categories(report: PhaseReport) -> doc.Table:
    peak = {s.category: s.n_bytes for s in report.at_peak}
    rest = {s.category: s.n_bytes for s in report.at_rest}

    def between_steps(share: CategoryShare) -> str:
        return format_size(rest.get(share.category, 0)) if report.at_rest else "-"

    def main_line(share: CategoryShare) -> str:
        return line_text(share.lines[0].location if share.lines else None, NO_STACK)

    return doc.tabled(
        [*report.at_peak, *(s for s in report.at_rest if s.category not in peak)],
        doc.Column("memory", lambda s: CATEGORY_NAMES[s.category]),
        doc.Column("at peak", lambda s: format_size(peak.get(s.category, 0)), "right",
                   style=Style.STRONG),
        doc.Column("between steps", between_steps, "right"),
        doc.Column("sure", sureness),
        doc.Column("mostly from", main_line, "path", style=Style.CODE),
        notes=lambda s: [dim(location_text(x.location)) for x in s.lines[1:]],
    )  # fmt: skip


MAX_MOMENT_LINES: Final = 10
"""The most lines of a moment in the short report."""

MIN_EVENTS: Final = 20
"""Fewest events of a timeline: a shorter one says no more than the figures do."""

_SHARE_SHOWN: Final = 0.001
"""The smallest share of a moment's memory for which a category is named."""

_NO_TIMELINE: Final = (
    "This device has no recorded trace, so there is no timeline. Record one with "
    "torch.cuda.memory._record_memory_history() before the first step."
)
_FIGURES: Final = (
    ("capacity", "capacity_bytes", "what PyTorch could have"),
    ("peak reserved", "peak_reserved_bytes", "most taken from the driver"),
    ("peak allocated", "peak_allocated_bytes", "most held by tensors"),
    ("reserved", "reserved_bytes", "taken from the driver, {at}"),
    ("allocated", "allocated_bytes", "held by tensors, {at}"),
    (
        "stranded free",
        "stranded_free_bytes",
        "free, but in segments that live blocks hold, {at}",
    ),
    ("largest free block", "largest_free_block_bytes", "the largest hole in the cache, {at}"),
    ("retries", "alloc_retries", "cache flushes after a failed request"),
    ("OOMs", "ooms", "failed requests that were raised"),
    ("events", "n_events", "in the recorded trace"),
)


def message_of(diagnosis: Diagnosis, device: int) -> OomMessage | None:
    """Return the message that the diagnosis is about, if it is about this device."""
    message = diagnosis.case.primary_message
    return message if message is not None and message.device_index in (None, device) else None


def moment_of(diagnosis: Diagnosis, device: int | None) -> MomentFigures | None:
    """Return the figures of the moment that a device's report is about; None without a snapshot."""
    figures = diagnosis.figures_of(device)
    return None if figures is None else figures.moment


def when(moment: MomentFigures | None) -> str:
    """Return a note that names the moment of the figures, or "" if it is the end of the file."""
    return "" if moment is None or moment.is_end else f", {LIVE_WHEN[moment.moment]}"


_PAGED: Final = 1.02
"""Reserved memory above this multiple of the device's is partly in host memory; below it, the
excess may be rounding."""


def memory_sections(diagnosis: Diagnosis) -> list[doc.Section]:
    """Return the bar of each device's memory, the verdict's device first."""
    most = max((f.reserved_bytes or 0 for f in diagnosis.devices), default=0)
    sections = []
    for i, f in enumerate(sorted(diagnosis.devices, key=by_device(diagnosis))):
        is_main = (
            f.device == diagnosis.verdict.device or (f.reserved_bytes or 0) > most * IDLE_SHARE
        )
        parts = parts_of(f, message_of(diagnosis, f.device))
        # A message that was cut off may not say what PyTorch held.
        if parts and (f.moment, f.reserved_bytes, f.allocated_bytes) != (None, None, None):
            detail = Detail.USUAL if is_main and i == 0 else Detail.FULL
            sections.append(_memory(diagnosis, f, parts, detail))
    return sections


def _memory(
    diagnosis: Diagnosis, f: DeviceFigures, parts: Sequence[doc.BarPart], detail: Detail
) -> doc.Section:
    message = message_of(diagnosis, f.device)
    asked = message.requested_bytes if message is not None and message.is_device_oom else None
    bar = doc.Bar(parts, asked)
    blocks: list[doc.DocumentBlock] = [bar, _what_for(f.moment)]
    others = [d for d in diagnosis.devices if d.reserved_bytes and d.device != f.device]
    if others and detail is Detail.USUAL:
        reserved = (f"GPU {d.device} {format_size(d.reserved_bytes or 0)}" for d in others)
        also = dim(f"Also reserved: {', '.join(reserved)}.")
        blocks.append(doc.Paragraph(also, detail=Detail.SHORT))
    is_of_failure = f.moment is not None and f.moment.is_end and f.moment.moment is Moment.FAILURE
    is_told = f.moment is None and message is not None
    at = LIVE_WHEN[Moment.FAILURE if is_told or is_of_failure else Moment.END]
    # A message gives the size of the whole device, and other processes may hold part of it.
    is_device = message is not None and message.total_bytes == f.capacity_bytes
    facts: list[tuple[str, doc.Content]] = []
    for title, name, meaning in _FIGURES:
        if (value := getattr(f, name)) is not None:
            is_whole = is_device and name == "capacity_bytes"
            said = "the whole device" if is_whole else meaning.format(at=at)
            facts.append((title, [f"{doc.plain(doc.written(value, name))}  ", dim(said)]))
    blocks.append(doc.Facts(facts, detail=Detail.FULL))
    is_limited = bar.total_bytes == f.limit_bytes
    allowed = " allowed" if is_limited else ""
    note = f"GPU {f.device}, {format_size(bar.total_bytes)}{allowed}{when(f.moment)}"
    if (
        message is not None
        and message.total_bytes
        and bar.total_bytes > _PAGED * message.total_bytes
    ):
        note = f"{note} on a card of {format_size(message.total_bytes)}"
    return doc.Section("Memory", blocks, note, f"memory-{f.device}", f.device, detail=detail)


def _what_for(moment: MomentFigures | None) -> doc.Paragraph:
    """Return what the allocated memory is for, if that is known for more than half of it."""
    found = () if moment is None else moment.categories
    total = sum(c.n_bytes for c in found)
    known = sum(c.n_bytes for c in found if c.category is not Category.UNKNOWN)
    said = _shares(found, total, MIN_SHOWN_SHARE) if 2 * known > total else ""
    return doc.Paragraph(dim(f"Allocated: {said}." if said else ""))


def parts_of(figures: DeviceFigures, message: OomMessage | None) -> list[doc.BarPart]:
    """Return the parts of the device's memory, largest claim first, free memory last.

    The parts sum to what a memory fraction allows if the device has room for that, else to the
    device's total if a message gives it, else to the capacity available to PyTorch, else to what
    PyTorch has reserved.
    """
    at = figures.moment
    source = figures if at is None else at
    reserved = source.reserved_bytes or 0
    live = min(source.allocated_bytes or 0, reserved)
    pending = _clip((source.active_bytes or live) - live, reserved - live)
    cached = _clip(reserved - live - pending, reserved)
    in_pools = figures.private_pools_bytes if at is None else at.private_pools_free_bytes
    pools = _clip(in_pools or 0, cached)
    stranded = _clip(source.stranded_free_bytes or 0, cached - pools)
    releasable = _clip(source.releasable_bytes or 0, cached - pools - stranded)
    outside, free = _beyond(figures, message, reserved)
    parts = (
        doc.BarPart("allocated", live, "in use by tensors"),
        doc.BarPart("pending", pending, "freed, but waiting for other streams"),
        doc.BarPart("stranded", stranded, "free, but in holes between live blocks"),
        doc.BarPart("pools", pools, "free inside private pools"),
        doc.BarPart("cached", cached - pools - stranded - releasable, "free in PyTorch's cache"),
        doc.BarPart("releasable", releasable, "free, returned on demand"),
        doc.BarPart("outside", outside, _outside_meaning(message)),
        doc.BarPart("free", free, "not reserved by PyTorch"),
    )
    return [p for p in parts if p.n_bytes > 0]


def _outside_meaning(message: OomMessage | None) -> str:
    """Return what the part that is neither live nor free is; a cut-off message leaves it open."""
    request = None if message is None else request_of_message(message)
    if request is not None and request.cache_is_unprinted:
        return "in PyTorch's cache or outside it: not printed"
    return "held outside PyTorch's caching allocator"


def _beyond(figures: DeviceFigures, message: OomMessage | None, reserved: int) -> tuple[int, int]:
    """Return (memory outside PyTorch, free memory) of the device; 0 means unknown.

    Under a limit lower than what the device has left, that limit is the end of the memory.
    """
    outside, free = _of_device(figures, message, reserved)
    left = None if figures.limit_bytes is None else max(0, figures.limit_bytes - reserved)
    return (outside, free) if left is None or left > free else (0, left)


def _of_device(
    figures: DeviceFigures, message: OomMessage | None, reserved: int
) -> tuple[int, int]:
    if message is not None and message.total_bytes and message.true_free_bytes is not None:
        free = max(0, message.true_free_bytes)
        return max(0, message.total_bytes - free - reserved), free
    if figures.capacity_bytes is None:
        return 0, 0
    rest = max(0, figures.capacity_bytes - reserved)
    free_then = None if figures.moment is None else figures.moment.device_free_bytes
    free = rest if free_then is None else min(rest, free_then)
    return rest - free, free


def _clip(value: int, upper: int) -> int:
    return max(0, min(value, upper))


def moment_sections(diagnosis: Diagnosis) -> list[doc.Section]:
    """Return what was live at the requested moment."""
    m = diagnosis.moment
    if m is None:
        return []
    step = f", step {format_count(m.step)} of {format_count(m.n_steps)}" if m.step else ""
    note = (
        f"GPU {m.device}, after event {format_count(m.event)} of {format_count(m.n_events)}{step}"
    )
    totals = f"{format_size(m.allocated_bytes)} allocated, {format_size(m.reserved_bytes)} reserved"
    shares = _shares(m.categories, m.allocated_bytes, _SHARE_SHOWN)
    table = _lines(m.lines, format_size, doc.Column("", lambda h: dim(plural(h.n_blocks, "block"))))
    said = doc.Paragraph(f"{totals}: {shares}." if shares else f"{totals}.")
    return [doc.Section(f"At {m.asked}", [said, table], note, "moment"), _change(m)]


def _lines(rows: Sequence[HeldBytes], size: Callable[[int], str], blocks: doc.Column) -> doc.Table:
    size_column = doc.Column("", lambda h: doc.strong(size(h.n_bytes)), "right")
    location = doc.Column("", "location")
    return doc.tabled(rows, size_column, blocks, location, shown=MAX_MOMENT_LINES)


def _shares(categories: Sequence[HeldBytes | CategoryShare], total_bytes: int, least: float) -> str:
    """Return what allocated memory is for, down to a least share: ``activations 71%``."""
    return ", ".join(
        f"{CATEGORY_NAMES[c.category]} {format_share(c.n_bytes, total_bytes)}"
        for c in categories
        if c.n_bytes >= least * total_bytes and c.category is not None
    )


def _change(m: MomentReport) -> doc.Section:
    """Return what changed since the moment that this moment is compared with."""
    if m.since is None or m.since_allocated_bytes is None:
        return doc.Section("Change", ())
    blocks = doc.Column("", lambda h: dim(f"{h.n_blocks:+,} blocks"), "right")
    table = _lines(m.changes, signed_size, blocks)
    change = signed_size(m.allocated_bytes - m.since_allocated_bytes)
    said = doc.Paragraph(
        f"{change}, from {format_size(m.since_allocated_bytes)} to "
        f"{format_size(m.allocated_bytes)} allocated."
    )
    return doc.Section(f"From {m.since} to {m.asked}", [said, table], "by line", "change")


def timeline_section(diagnosis: Diagnosis) -> doc.Section:
    """Return the memory of the verdict's device over its trace, if the trace is long enough."""
    strip = diagnosis.timeline
    blocks = graphic(diagnosis, "timeline", _NO_TIMELINE)
    note = ""
    if strip is not None and strip.n_events > MIN_EVENTS and max(strip.peak_bytes) > 0:
        note = f"GPU {strip.device}, {plural(strip.n_events, 'event')}"
        blocks += [doc.Timeline(strip), _points(strip)]
    return doc.Section("Timeline", blocks, note, "timeline")


def _points(strip: TimelineStrip) -> doc.Table:
    return doc.tabled(
        strip.points,
        doc.Column("moment", "what"),
        doc.Column("after event", "event"),
        doc.Column("allocated", "allocated_bytes"),
        doc.Column("active", "active_bytes", from_width=100),
        doc.Column("reserved", "reserved_bytes"),
        doc.Column("note", "note", "wrap", style=doc.Style.DIM),
        detail=Detail.FULL,
    )


def graphic(diagnosis: Diagnosis, name: str, absent: str) -> list[doc.DocumentBlock]:
    """Return the place of an interactive graphic; only a recording has data for it."""
    if not diagnosis.analyses:
        return []
    return [doc.Graphic(name, absent, detail=Detail.PAGE)]
