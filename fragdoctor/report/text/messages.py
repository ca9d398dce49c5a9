"""The messages of a log: which one came first, on which rank and line."""

from __future__ import annotations

from typing import Final

from fragdoctor.model.diagnosis import Diagnosis
from fragdoctor.model.oom import LogMarker, OomMessage
from fragdoctor.report.base import Verbosity
from fragdoctor.report.text.page import Cell, Column, Page
from fragdoctor.units import format_count, format_size

_SHOWN: Final = 8


def write_messages(page: Page, diagnosis: Diagnosis) -> None:
    """Write the list of messages, first cause on top, and the lines that belong to the story.

    One message alone needs no list: the verdict is about it.
    """
    log = diagnosis.case.oom
    if log is None or (len(log.messages) < 2 and not log.markers):
        return
    verbose = page.options.verbosity is Verbosity.VERBOSE
    if len(log.messages) > 1 and (verbose or diagnosis.story is None):
        page.heading("Messages", f"{format_count(len(log.messages))} in this text")
        order = sorted(range(len(log.messages)), key=lambda i: (i != log.primary, i))
        shown = order if verbose else order[:_SHOWN]
        ranked = any(m.rank is not None for m in log.messages)
        page.table(
            _columns(ranked=ranked),
            [_row(log.messages[i], first=i == log.primary, ranked=ranked) for i in shown],
        )
        if len(order) > len(shown):
            n_more = format_count(len(order) - len(shown))
            page.paragraph((f"{n_more} more with --verbose", "dim"))
    if log.markers and (verbose or diagnosis.story is None):  # the story holds them
        page.heading("Beside them" if len(log.messages) > 1 else "Other lines of this text")
        markers = log.markers if verbose else log.markers[:_SHOWN]
        page.table([Column(), Column(), Column("wrap")], [_marker_row(m) for m in markers])
        if len(log.markers) > len(markers):
            n_more = format_count(len(log.markers) - len(markers))
            page.paragraph((f"{n_more} more with --verbose", "dim"))


def _columns(*, ranked: bool) -> list[Column]:
    return [
        Column(),
        Column(title="line", align="right"),
        *([Column(title="rank", align="right")] if ranked else []),
        Column(title="GPU", align="right"),
        Column(title="asked", align="right"),
        Column(title="free", align="right"),
        Column("wrap", title="kind"),
    ]


def _row(message: OomMessage, *, first: bool, ranked: bool) -> list[Cell]:
    kind = message.kind if message.kind != "pytorch-caching-allocator" else message.backend
    if message.sub_kind:
        kind = f"{kind}, {message.sub_kind}"
    return [
        ("first" if first else "", "bold"),
        format_count(message.line),
        *(["-" if message.rank is None else str(message.rank)] if ranked else []),
        "-" if message.device_index is None else str(message.device_index),
        _size(message.requested_bytes),
        _size(message.free_bytes),
        kind,
    ]


def _marker_row(marker: LogMarker) -> list[Cell]:
    rank = "" if marker.rank is None else f", rank {marker.rank}"
    text = marker.text if len(marker.text) <= 160 else marker.text[:157] + "..."
    return [f"line {format_count(marker.line)}{rank}", marker.kind, (text, "dim")]


def _size(n_bytes: int | None) -> str:
    return "-" if n_bytes is None else format_size(n_bytes)
