"""The moment that a report describes, and what was allocated at any other requested moment."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from fragdoctor.analysis.attribution import find_stranders
from fragdoctor.analysis.free_space import QUIET
from fragdoctor.analysis.growth import StepEnds
from fragdoctor.analysis.host_memory import host_memory
from fragdoctor.analysis.result import DeviceAnalysis, OomEvent, Strander
from fragdoctor.errors import ConfigError
from fragdoctor.future.steps import Steps
from fragdoctor.model.arrays import largest_groups
from fragdoctor.model.diagnosis import Cause, HostMemoryReport, Moment, Verdict
from fragdoctor.model.phases import Category, HeldBytes, MomentReport
from fragdoctor.model.snapshot import I64, Action, Snapshot
from fragdoctor.rules.failed_request import FailedRequest, rounding_bytes
from fragdoctor.rules.rule import Context
from fragdoctor.trace.lives import Layout, Totals
from fragdoctor.trace.trace import Trace
from fragdoctor.units import format_count, plural


class DecidingMoment(Struct, frozen=True, eq=False, dict=True):
    """The moment of one device that everything on the first screen describes.

    Attributes:
        analysis: analysis of the device.
        kind: the failure that decides the verdict, else the peak, else the end.
        state: how many events of the device's trace come before the moment.
        is_end: whether nothing happened on the device after the moment.
        failed: what failed on this device at the moment, or None if nothing did.
    """

    analysis: DeviceAnalysis
    kind: Moment
    state: int
    is_end: bool = True
    failed: OomEvent | None = None

    @cached_property
    def layout(self) -> Layout:
        """The device's segments and blocks at the moment, with later events undone."""
        trace = self.analysis.trace
        return trace.layout if self.is_end else trace.layout_at(self.state)

    @cached_property
    def stranders(self) -> Sequence[Strander]:
        """Who stranded free memory at the failure, or at the end if nothing failed.

        At a peak, hardly anything is free.
        """
        if self.earlier_failure is None:
            return self.analysis.stranders
        return find_stranders(self.analysis.trace, self.layout)

    @property
    def earlier_failure(self) -> int | None:
        """The state of a failure that more events followed, or None for other moments."""
        return self.state if self.kind is Moment.FAILURE and not self.is_end else None


def deciding_moment(context: Context, leader: Context, verdict: Verdict) -> DecidingMoment | None:
    """Return the moment of a device that its report describes, or None without a snapshot.

    A file is often written after the exception was handled. The failure is the one on the device
    that the verdict is about; other devices are shown at that time if events have times.
    """
    a = context.analysis
    if a is None:
        return None
    end = DecidingMoment(a, Moment.END, a.n_events)
    if context is leader and _is_of_message(a, leader.failed_request):
        return DecidingMoment(a, Moment.FAILURE, a.n_events)
    if a.timeline is None:
        return end
    # A program that recovered from its failures is judged as a whole.
    has_failed = leader.failed_request is not None and verdict.cause is not Cause.HEALTHY
    failed = leader.failed_event if has_failed else None
    if failed is not None:
        state = _state_of(failed, leader, context)
        if state is not None:
            own = failed if context is leader else None
            return DecidingMoment(a, Moment.FAILURE, state, _is_end(a.trace, state), own)
    if verdict.cause is Cause.FRAGMENTATION:
        return end  # the verdict is about the cache that is left at the end
    peak = a.timeline.peak_allocated_state
    return DecidingMoment(a, Moment.PEAK, peak, _is_end(a.trace, peak))


def _is_of_message(a: DeviceAnalysis, failed: FailedRequest | None) -> bool:
    """Return whether a file without the failure's event holds the message's live memory."""
    if failed is None or failed.source != "oom message" or failed.live_bytes is None:
        return False
    return abs(failed.live_bytes - a.active_bytes) <= rounding_bytes(failed.live_bytes)


def _state_of(failed: OomEvent, leader: Context, context: Context) -> int | None:
    """Return how many of a device's events precede a failure, or None if events have no times."""
    assert leader.analysis is not None  # noqa: S101 - it has the failure
    assert context.analysis is not None  # noqa: S101 - checked by the caller
    if context is leader:
        return failed.row
    when = int(leader.analysis.trace.events.time_us[failed.row])
    times = context.analysis.trace.events.time_us
    return int(np.searchsorted(times, when, "right")) if when > 0 else None


def _is_end(trace: Trace, state: int) -> bool:
    return bool(np.isin(trace.events.action[state:], QUIET).all())


MAX_LINES_AT: Final = 100
"""The most lines to list for a moment; they are the largest ones."""

_MOMENTS: Final = re.compile(r"(step|event|oom):([0-9]{1,15})|(peak|oom|end)")
_AS_MOMENT: Final = (
    "Write step:3 for the peak of step 3, event:1200, peak, oom, oom:2 or end; step:3..step:6 for "
    "what changed between two."
)


def moment_report(context: Context, asked: str) -> MomentReport:
    """Return what was allocated on a device at a moment.

    Args:
        context: context of the device.
        asked: ``step:N`` (the peak of the N-th step, from 1), ``event:N`` (after N events),
            ``peak``, ``oom`` (the last one), ``oom:N`` (from 1) or ``end``; with ``A..B`` the
            report describes B and says what changed since A.

    Raises:
        ConfigError: ``asked`` is none of these, or the trace has no such moment.
    """
    a = context.analysis
    if a is None or a.timeline is None:
        raise ConfigError(
            "The input has no trace, so no moment of it can be shown.",
            hint="Give a snapshot that was recorded with _record_memory_history().",
        )
    steps = Steps.of(a.trace).rows
    earlier, _, later = asked.rpartition("..")
    title, state = _moment(a, a.timeline, steps, later)
    lives, rows = a.trace.lives, a.trace.lives.allocated_at(state)
    size = lives.size_bytes[rows]
    lines = _held(a.trace.stacks.lines_of(lives.stack[rows]), size)
    allocated, active, reserved = a.timeline.at([state])[0].tolist()
    is_in = np.searchsorted(steps, max(state - 1, 0), "right")
    moment = MomentReport(
        device=a.device,
        asked=title,
        event=state,
        n_events=a.n_events,
        step=int(is_in) or None,
        n_steps=len(steps),
        allocated_bytes=allocated,
        active_bytes=active,
        reserved_bytes=reserved,
        lines=[HeldBytes(context.frame(f), None, *held) for f, *held in lines[:MAX_LINES_AT]],
        categories=categories_at(a, state),
    )
    if not earlier:
        return moment
    since, before = _moment(a, a.timeline, steps, earlier)
    gone = lives.allocated_at(before)
    both, signed = np.concatenate((rows, gone)), np.concatenate((size, -lives.size_bytes[gone]))
    changed = [
        held for held in _held(a.trace.stacks.lines_of(lives.stack[both]), signed) if held[1]
    ]
    return replace(
        moment,
        since=since,
        since_allocated_bytes=int(a.timeline.allocated_bytes[before]),
        changes=[HeldBytes(context.frame(f), None, *held) for f, *held in changed[:MAX_LINES_AT]],
    )


def categories_at(a: DeviceAnalysis, state: int) -> Sequence[HeldBytes]:
    """Return allocated bytes in a state by category, largest first, or nothing if unknown."""
    if not len(a.category):
        return ()
    rows = a.trace.lives.allocated_at(state)
    found = _held(a.category[rows], a.trace.lives.size_bytes[rows])
    return [HeldBytes(None, Category(kind), *held) for kind, *held in found]


def _held(group: npt.NDArray[Any], size: I64) -> list[tuple[int, int, int]]:
    """Return (group, bytes, blocks) per group, largest first; negative sizes are subtracted."""
    sums = largest_groups(group, size)
    return list(zip(*(column.tolist() for column in sums), strict=True))


def _moment(a: DeviceAnalysis, totals: Totals, steps: I64, asked: str) -> tuple[str, int]:
    """Return which moment is meant, in words, and how many events precede it."""
    m = _MOMENTS.fullmatch(asked.strip().lower())
    if m is None:
        raise ConfigError(f"{asked!r} is not a moment of a trace.", hint=_AS_MOMENT)
    kind, number = (m[1] or m[3]), int(m[2] or 0)
    if kind == "peak":
        return "the peak", totals.peak_allocated_state
    if kind == "end":
        return "the end of the trace", a.n_events
    ooms = np.flatnonzero(a.trace.events.action == Action.OOM)
    n_of = {"event": a.n_events, "oom": len(ooms), "step": len(steps)}[kind]
    if kind == "oom" and not m[2]:
        number = max(n_of, 1)
    word = kind.replace("oom", "OOM")
    if not (kind != "event") <= number <= n_of:
        raise ConfigError(
            f"There is no {word} {format_count(number)}.",
            hint=f"The trace has {plural(n_of, word)}. {_AS_MOMENT}",
        )
    if kind == "event":
        return f"event {format_count(number)}", number
    if kind == "oom":
        return f"OOM {number} of {n_of}", int(ooms[number - 1])
    first = int(steps[number - 1])
    end = int(steps[number]) if number < len(steps) else a.n_events
    within = totals.allocated_bytes[first + 1 : end + 1]
    return f"the peak of step {format_count(number)}", first + 1 + int(np.argmax(within))


def host_report(
    snapshot: Snapshot | None, moment: DecidingMoment | None
) -> HostMemoryReport | None:
    """Return the page-locked memory of a snapshot, or None if it has none.

    ``moment`` belongs to the device that the verdict is about. If nothing failed on that device,
    or its failure has no time, the holders are those at the end of the file.
    """
    if snapshot is None:
        return None
    when = step_times = None
    if moment is not None and moment.analysis.capture.has_trace:
        trace = moment.analysis.trace
        times = trace.events.time_us
        rows = StepEnds.of(trace).rows
        step_times = times[np.minimum(rows, len(times) - 1)]
        if moment.failed is not None:
            when = int(times[moment.failed.row])
    return host_memory(snapshot, when if when is not None and when >= 0 else None, step_times)
