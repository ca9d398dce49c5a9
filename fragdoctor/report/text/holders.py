"""Who pins the free memory and who holds the live memory, by line of the user's program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeVar

from fragdoctor.model.diagnosis import Diagnosis, HolderReport, PinReport
from fragdoctor.model.finding import Location
from fragdoctor.report.base import Verbosity
from fragdoctor.report.phrases import location_text, shown_first
from fragdoctor.report.text.page import INDENT, Cell, Column, Page
from fragdoctor.units import format_count, format_size

_SHOWN: Final = 5
_MAX_STACK: Final = 12
_PIN_SHARE: Final = 0.01
_T = TypeVar("_T")


def write_pins(page: Page, diagnosis: Diagnosis) -> None:
    """Write the live blocks that keep free memory in their segments, worst first."""
    pins = _worth_showing(page, diagnosis)
    if not pins:
        return
    page.heading("Pins", "live blocks that keep free memory from being used")
    several = _has_several(diagnosis)
    order = {d: i for i, d in enumerate(shown_first(diagnosis, [p.device for p in diagnosis.pins]))}
    pins.sort(key=lambda p: order[p.device])
    shown = _shown(page, pins)
    columns = [
        *([Column(title="GPU", align="right")] if several else []),
        Column(title="frees", align="right"),
        Column(title="blocks", align="right"),
        Column(title="size", align="right"),
        Column("path", title="allocated at"),
    ]
    rows = [_pin_row(p, several=several) for p in shown]
    page.table(columns, rows, below=_stacks(page, [p.stack for p in shown]))
    _write_rest(page, len(diagnosis.pins) - len(shown))


def write_holders(page: Page, diagnosis: Diagnosis) -> None:
    """Write the live memory by source line, now and at the peak."""
    if not diagnosis.holders:
        return
    page.heading("Holders", "live memory by source line")
    several = _has_several(diagnosis)
    devices = [h.device for h in diagnosis.holders]
    order = {d: i for i, d in enumerate(shown_first(diagnosis, devices))}
    holders = sorted(diagnosis.holders, key=lambda h: order[h.device])
    shown = _shown(page, holders)
    columns = [
        *([Column(title="GPU", align="right")] if several else []),
        Column(title="now", align="right"),
        Column(title="at peak", align="right"),
        Column(title="blocks", align="right"),
        Column("path", title="allocated at"),
    ]
    rows = [_holder_row(h, several=several) for h in shown]
    page.table(columns, rows, below=_stacks(page, [h.stack for h in shown]))
    _write_rest(page, len(holders) - len(shown))


def _worth_showing(page: Page, diagnosis: Diagnosis) -> list[PinReport]:
    """Return the pins that hold a hundredth of their device's memory; all with --verbose."""
    if page.options.verbosity is Verbosity.VERBOSE:
        return list(diagnosis.pins)
    reserved = {d.device: d.reserved_bytes or 0 for d in diagnosis.devices}
    return [
        p
        for p in diagnosis.pins
        if p.pinned_bytes > 0 and p.pinned_bytes >= reserved.get(p.device, 0) * _PIN_SHARE
    ]


def _pin_row(pin: PinReport, *, several: bool) -> list[Cell]:
    where = location_text(pin.location)
    row: list[Cell] = [
        (format_size(pin.pinned_bytes), "bold"),
        format_count(pin.n_blocks),
        format_size(pin.block_bytes),
        where,
    ]
    return [str(pin.device), *row] if several else row


def _holder_row(holder: HolderReport, *, several: bool) -> list[Cell]:
    row: list[Cell] = [
        (format_size(holder.now_bytes), "bold"),
        "-" if holder.peak_bytes is None else format_size(holder.peak_bytes),
        format_count(holder.n_blocks),
        location_text(holder.location),
    ]
    return [str(holder.device), *row] if several else row


def _stacks(page: Page, stacks: Sequence[Sequence[Location]]) -> list[list[Cell]]:
    """Return the lines that follow each row: its stack, innermost frame first (verbose only)."""
    if page.options.verbosity is not Verbosity.VERBOSE:
        return []
    below: list[list[Cell]] = []
    for stack in stacks:
        lines: list[Cell] = [(location_text(f), "dim") for f in stack[:_MAX_STACK]]
        if len(stack) > _MAX_STACK:
            lines.append((f"{len(stack) - _MAX_STACK} more frames", "dim"))
        below.append(lines)
    return below


def _has_several(diagnosis: Diagnosis) -> bool:
    used = [d.device for d in diagnosis.devices if d.reserved_bytes]
    return len(used) > 1


def _shown(page: Page, rows: Sequence[_T]) -> Sequence[_T]:
    return rows if page.options.verbosity is Verbosity.VERBOSE else rows[:_SHOWN]


def _write_rest(page: Page, n_more: int) -> None:
    if n_more > 0:
        page.paragraph((f"{format_count(n_more)} more with --verbose", "dim"), indent=INDENT)
