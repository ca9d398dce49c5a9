"""The memory map: one bar a device, to scale, with a legend that says what each part is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from fragdoctor.model.diagnosis import DeviceFigures, Diagnosis
from fragdoctor.model.oom import OomMessage
from fragdoctor.report.base import Verbosity
from fragdoctor.report.phrases import shown_first
from fragdoctor.report.text.page import INDENT, Column, Glyphs, Page, Span
from fragdoctor.units import format_share, format_size, plural

# A device with a hundredth of another's memory is not what the report is about.
IDLE_SHARE: Final = 0.01


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the bar."""

    name: str
    n_bytes: int
    glyph: str
    style: str
    meaning: str


def write_memory(page: Page, diagnosis: Diagnosis) -> None:
    """Write a bar and the key figures of each device that has any memory to show."""
    figures = {f.device: f for f in diagnosis.devices}
    most = max((f.reserved_bytes or 0 for f in figures.values()), default=0)
    verbose = page.options.verbosity is Verbosity.VERBOSE
    idle: list[str] = []
    for device in shown_first(diagnosis, list(figures)):
        reserved = figures[device].reserved_bytes or 0
        is_main = device == diagnosis.verdict.device or reserved > most * IDLE_SHARE
        if reserved and (is_main or verbose):
            _write_device(page, figures[device], message_of(diagnosis, device))
        elif reserved:
            idle.append(f"GPU {device} {format_size(reserved)}")
    if idle:
        page.paragraph((f"Also reserved: {', '.join(idle)}.", "dim"))


def message_of(diagnosis: Diagnosis, device: int) -> OomMessage | None:
    """Return the message that the diagnosis is about, if it speaks of this device."""
    log = diagnosis.case.oom
    if log is None or not 0 <= log.primary < len(log.messages):
        return None
    message = log.messages[log.primary]
    return message if message.device_index in (None, device) else None


def parts_of(figures: DeviceFigures, message: OomMessage | None, glyphs: Glyphs) -> list[Part]:
    """Return what the device's memory is made of, largest claim first, free memory last.

    The parts sum to the device's total where a message gives it, else to the capacity that
    PyTorch could have, else to what it has reserved.
    """
    reserved = figures.reserved_bytes or 0
    live = min(figures.allocated_bytes or 0, reserved)
    pending = _clip((figures.active_bytes or live) - live, reserved - live)
    pinned = figures.pinned_free_bytes or 0
    releasable = figures.releasable_bytes or 0
    cached = _clip(reserved - live - pending, reserved)
    pools = _clip(figures.private_pools_bytes or 0, cached)
    pinned = _clip(pinned, cached - pools)
    releasable = _clip(releasable, cached - pools - pinned)
    other = cached - pools - pinned - releasable
    parts = [
        Part("live", live, glyphs.live, "cyan", "in use by tensors"),
        Part("pending", pending, glyphs.pending, "magenta", "freed, waits for other streams"),
        Part("pinned", pinned, glyphs.pinned, "red", "free, but live blocks hold its segments"),
        Part("pools", pools, glyphs.pools, "yellow", "free inside private pools"),
        Part("cached", other, glyphs.pinned, "red", "free in PyTorch's cache"),
        Part("releasable", releasable, glyphs.releasable, "green", "free, returned on demand"),
    ]
    outside, free = _beyond(figures, message, reserved)
    parts.append(
        Part("outside", outside, glyphs.outside, "blue", "not PyTorch's caching allocator")
    )
    parts.append(Part("free", free, glyphs.free, "dim", "not reserved by PyTorch"))
    return [p for p in parts if p.n_bytes > 0]


def apportion(parts: list[Part], width: int) -> list[int]:
    """Return the cells of each part: to scale, at least one each, ``width`` in all."""
    total = sum(p.n_bytes for p in parts)
    if not total or width < len(parts):
        return [0] * len(parts)
    exact = [p.n_bytes * width / total for p in parts]
    cells = [max(1, int(x)) for x in exact]
    # Largest remainder first; the largest part pays for the cells that small ones were given.
    by_remainder = sorted(range(len(parts)), key=lambda i: int(exact[i]) - exact[i])
    step = 0
    while sum(cells) < width:
        cells[by_remainder[step % len(parts)]] += 1
        step += 1
    while sum(cells) > width:
        cells[max(range(len(parts)), key=lambda i: cells[i])] -= 1
    return cells


def _beyond(figures: DeviceFigures, message: OomMessage | None, reserved: int) -> tuple[int, int]:
    """Return (memory outside PyTorch, free memory) of the device, 0 where nobody says."""
    if message is not None and message.total_bytes and message.free_bytes is not None:
        free = max(0, message.free_bytes)
        return max(0, message.total_bytes - free - reserved), free
    if figures.capacity_bytes is not None:
        return 0, max(0, figures.capacity_bytes - reserved)
    return 0, 0


def _clip(value: int, upper: int) -> int:
    return max(0, min(value, upper))


def _write_device(page: Page, figures: DeviceFigures, message: OomMessage | None) -> None:
    parts = parts_of(figures, message, page.glyphs)
    total = sum(p.n_bytes for p in parts)
    page.heading("Memory", f"GPU {figures.device}, {format_size(total)} shown")
    frame = len(page.glyphs.bar_start) + len(page.glyphs.bar_end)
    cells = apportion(parts, page.width - 2 * INDENT - frame)
    bar: list[Span] = [(page.glyphs.bar_start, "dim")]
    bar += [(p.glyph * n, p.style) for p, n in zip(parts, cells, strict=True)]
    bar.append((page.glyphs.bar_end, "dim"))
    page.verbatim(bar)
    page.table(
        [Column(), Column(), Column(align="right"), Column(align="right"), Column("wrap")],
        [
            [
                (p.glyph, p.style),
                p.name,
                format_size(p.n_bytes),
                _share(p.n_bytes, total),
                (p.meaning, "dim"),
            ]
            for p in parts
        ],
    )
    page.paragraph((_figures_line(figures), "dim"))


def _share(part: int, whole: int) -> str:
    # Nearly all is not all: what is left over may be what the verdict is about.
    shown = format_share(part, whole)
    return ">99 %" if shown == "100 %" and part < whole else shown


def _figures_line(figures: DeviceFigures) -> str:
    """Return the further figures of a device that the input gives, in one sentence."""
    of = "" if figures.capacity_bytes is None else f" of {format_size(figures.capacity_bytes)}"
    said = [f"Reserved {format_size(figures.reserved_bytes)}{of}"]
    for label, value in (
        ("peak reserved", figures.peak_reserved_bytes),
        ("peak allocated", figures.peak_allocated_bytes),
        ("largest free block", figures.largest_free_block_bytes),
    ):
        if value is not None:
            said.append(f"{label} {format_size(value)}")
    if figures.alloc_retries is not None:
        said.append(plural(figures.alloc_retries, "retry", "retries"))
    if figures.ooms is not None:
        said.append(plural(figures.ooms, "OOM"))
    if figures.n_events is not None:
        said.append(plural(figures.n_events, "event"))
    return ", ".join(said) + "."
