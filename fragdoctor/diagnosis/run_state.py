"""How the run stands where the input ends, and what a reader should know about the inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from fragdoctor.analysis.result import DeviceAnalysis
from fragdoctor.frozen import frozen
from fragdoctor.model.case import NO_FAILURE, BundleFacts, Case
from fragdoctor.model.diagnosis import Cause, HostMemoryReport, RunState
from fragdoctor.model.snapshot import Action
from fragdoctor.rules.failed_request import rounding_bytes
from fragdoctor.rules.input_quality.cut_message import missing_figures
from fragdoctor.rules.rule import Context
from fragdoctor.units import format_count, format_size

_MOST_HOST_LINES: Final = 3
"""Source lines of the host's memory that are named."""

LITTLE_TO_SPARE: Final = 0.05
"""Less than this share of the capacity above the peak of live memory is near the limit."""


def run_state(context: Context, cause: Cause) -> RunState:
    """Return how the run stands on the device that the verdict is about, with its cause."""
    n_ooms = context.stats[-1].n_ooms if context.stats else None
    if context.analysis is not None and context.analysis.ooms and cause is Cause.HEALTHY:
        # The program caught its failures and resumed its work; a search for a batch that fits ends
        # where it left enough to spare.
        return RunState.FITS if _has_settled(context, context.analysis) else RunState.NEAR_LIMIT
    if _has_failure(context) or n_ooms:
        return RunState.FAILED
    analysis = context.analysis
    if analysis is not None and not analysis.capture.has_trace:
        is_empty = not analysis.reserved_bytes
        return RunState.EMPTY if is_empty else RunState.NO_HISTORY
    was_retried = context.message is not None and context.message.is_warning
    if was_retried or (context.retries and context.retries[0]) or _is_full(context, analysis):
        return RunState.NEAR_LIMIT
    return RunState.FITS if analysis is not None or n_ooms == 0 else RunState.UNKNOWN


@frozen
class BackOff:
    """A line whose request failed, and that asked for less from then on.

    Attributes:
        failed_bytes: its last request that failed.
        served_bytes: its largest one that was served since.
        peak_bytes: most live memory since.
        stack: of these requests.
    """

    failed_bytes: int
    served_bytes: int
    peak_bytes: int
    stack: int


def backed_off(analysis: DeviceAnalysis) -> BackOff | None:
    """Return how a program came to terms with its last failure; None if it did not ask for less."""
    if not analysis.ooms or analysis.timeline is None:
        return None
    last, trace = analysis.ooms[-1], analysis.trace
    row = last.row - trace.first_row
    events = trace.events
    if last.stack < 0:
        return None
    same = np.isin(events.stack[row + 1 :], trace.stacks.same_to_user_line(last.stack))
    same &= events.action[row + 1 :] == Action.ALLOC
    served = int(events.size_bytes[row + 1 :][same].max(initial=0))
    if not 0 < served < last.rounded_bytes:
        return None
    peak = int(analysis.timeline.active_bytes[row + 1 :].max(initial=0))
    return BackOff(last.rounded_bytes, served, peak, last.stack)


def _has_settled(context: Context, analysis: DeviceAnalysis) -> bool:
    found, failed = backed_off(analysis), context.failed_request
    capacity = context.total_bytes or (failed.available_bytes if failed is not None else None)
    if found is None or not capacity:
        return False
    return capacity - found.peak_bytes >= LITTLE_TO_SPARE * capacity


def _has_failure(context: Context) -> bool:
    if context.analysis is not None and context.analysis.ooms:
        return True
    message = context.message
    return message is not None and message.sub_kind != NO_FAILURE and not message.is_warning


def _is_full(context: Context, analysis: DeviceAnalysis | None) -> bool:
    """Return whether the peak of live memory came close to what PyTorch could have."""
    capacity = context.total_bytes
    if analysis is None or analysis.timeline is None or not capacity:
        return False
    peak = analysis.timeline.peak_active_bytes
    return capacity - peak < LITTLE_TO_SPARE * capacity


NO_EVENT = (
    "The snapshot holds no out-of-memory event: it was taken at another moment than the message."
)


def find_notes(
    case: Case,
    contexts: Sequence[Context],
    leader: Context,
    host: HostMemoryReport | None = None,
) -> tuple[str, ...]:
    """Return one sentence each: what is cut, what does not match, what was left out."""
    notes: list[str] = []
    for context in contexts:
        if context.analysis is not None:
            prefix = f"Device {context.device}: " if len(contexts) > 1 else ""
            notes.extend(f"{prefix}{note}" for note in context.analysis.capture.notes)
    notes.extend(_mismatch(leader))
    if case.bundle is not None:
        notes.extend(_of_bundle(case.bundle))
    if case.oom is not None and case.oom.damage:
        notes.append(case.oom.damage)
    missing = [] if leader.message is None else missing_figures(leader.message)
    if missing and leader.analysis is None:
        notes.append(f"The message is cut: it lacks {', '.join(missing)}.")
    if case.oom is not None and len(case.oom.messages) > 1:
        notes.append(
            f"{format_count(len(case.oom.messages))} messages are in the text; the verdict is "
            f"about the one in line {case.oom.messages[case.oom.primary].line}."
        )
    if len(contexts) > 1:
        notes.append(
            f"{len(contexts)} devices are in the snapshot; the verdict is about device "
            f"{leader.device}."
        )
    if host is not None:
        notes.extend(_of_host(host))
    return tuple(dict.fromkeys(notes))


def _of_host(host: HostMemoryReport) -> list[str]:
    """Tell the host's page-locked memory apart from that of the GPUs; PyTorch 2.15 records it."""
    cached = f", {format_size(host.cached_bytes)} of it cached for reuse"
    held = f"The host has {format_size(host.reserved_bytes)} page-locked (pinned)"
    notes = [f"{held}{cached if host.cached_bytes else ''}: it is in no figure here."]
    if host.moment is None:
        return notes
    when = f"at the {host.moment}"
    lines = "; ".join(
        f"{format_size(h.n_bytes)} by {h.location or 'lines that were not recorded'}"
        for h in host.holders[:_MOST_HOST_LINES]
    )
    notes.append(
        f"Host tensors held {format_size(host.held_bytes)} of page-locked memory {when}"
        f"{f' ({lines})' if lines else ''}, and {format_size(host.peak_bytes)} at most."
    )
    notes.extend(
        f"Page-locked memory of the host grows at {g.location or 'a line that was not recorded'}: "
        f"{format_size(g.bytes_per_step)} a step, {format_size(g.survivor_bytes)} by the end. It "
        "is the computer's memory, not a GPU's."
        for g in host.growth[:_MOST_HOST_LINES]
    )
    return notes if host.reserved_bytes else notes[1:]


def _of_bundle(facts: BundleFacts) -> list[str]:
    """Say when and where a bundle was written, and what it leaves out."""
    of_rank = "" if facts.rank is None else f" of rank {facts.rank}"
    moment = {
        "oom": "at an out-of-memory error",
        "exit": "at the program's exit",
        "block": "at the end of a recorded block",
        "request": "while it ran, for fragdoctor attach",
        "signal": f"at {facts.signal or 'a signal'}",
    }.get(facts.reason, "")
    notes = [f"The bundle{of_rank} was written {moment}."] if moment else []
    if facts.n_ooms > 1:
        left_out = f", {format_count(facts.n_skipped)} of them without a bundle"
        notes.append(
            f"The process had run out of memory {format_count(facts.n_ooms)} times by then"
            f"{left_out if facts.n_skipped else ''}."
        )
    notes.extend(f"Not in the bundle: {problem}." for problem in facts.problems[:3])
    notes.extend(f"Of the bundle {problem}." for problem in facts.unusable)
    return notes


def _mismatch(leader: Context) -> list[str]:
    """Say where message and snapshot are not about the same failure."""
    message, analysis = leader.message, leader.analysis
    if message is None or analysis is None or message.requested_bytes is None:
        return []
    wanted = message.requested_bytes
    if not analysis.ooms:
        return [NO_EVENT]
    slack = rounding_bytes(wanted)
    if any(abs((o.message_bytes or o.segment_bytes) - wanted) <= slack for o in analysis.ooms):
        return []
    text = (
        f"No out-of-memory event of the snapshot is about the {format_size(wanted)} of the message"
    )
    return [f"{text}: they may be of different runs."]
