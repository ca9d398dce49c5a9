"""What a reader of the report should know about the inputs and how they fit together."""

from __future__ import annotations

from collections.abc import Sequence

from fragdoctor.model.case import BundleFacts, Case
from fragdoctor.rules.context import Context
from fragdoctor.rules.failed_request import rounding_bytes
from fragdoctor.units import format_count, format_size

NO_EVENT = (
    "The snapshot holds no out-of-memory event: it was taken at another moment than the message."
)


def find_notes(case: Case, contexts: Sequence[Context], leader: Context) -> tuple[str, ...]:
    """Return one sentence each: what is cut, what does not match, what was left out."""
    notes: list[str] = []
    for context in contexts:
        if context.analysis is not None:
            prefix = f"Device {context.device}: " if len(contexts) > 1 else ""
            notes.extend(f"{prefix}{note}" for note in context.analysis.capture.notes)
    notes.extend(_unused_capacity(leader))
    notes.extend(_mismatch(leader))
    if case.bundle is not None:
        notes.extend(_of_bundle(case.bundle))
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
    return tuple(dict.fromkeys(notes))


def _unused_capacity(leader: Context) -> list[str]:
    """Say that an input's own size of the device is used, not the one that was given."""
    given, own = leader.case.overrides.capacity_bytes, leader.total_bytes
    if given is None or own is None or abs(given - own) <= rounding_bytes(own):
        return []
    own_text = f"the input says that the device has {format_size(own)}"
    return [f"The capacity given, {format_size(given)}, is not used: {own_text}."]


def _of_bundle(facts: BundleFacts) -> list[str]:
    """Say when and where a bundle was written, and what it leaves out."""
    of_rank = "" if facts.rank is None else f" of rank {facts.rank}"
    moment = {
        "oom": "at an out-of-memory error",
        "exit": "at the program's exit",
        "block": "at the end of a recorded block",
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
