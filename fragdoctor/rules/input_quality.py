"""FD9xx: what the input does not show."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from fragdoctor.model.case import OomMessage
from fragdoctor.model.finding import Confidence, Evidence, Severity
from fragdoctor.rules.rule import Context, Found, rule
from fragdoctor.units import format_count, format_size, plural


@rule("FD901", Severity.INFO)
def cut_history(context: Context) -> Iterator[Found]:
    """The recorded history is incomplete.

    What it finds. Blocks that were live before the first event: the ring buffer overflowed, or
    recording began after the model was built.

    Why it costs memory. It does not; it limits what can be said. Peaks, growth and replays hold for
    the recorded part only.

    Evidence used. The state that undoing all events leaves, and the number of events.

    What to do. Record with a larger max_entries, from the start, or only around the failing step.

    What it can get wrong. The file does not say that events were dropped; a round number of events
    is the sign.

    Example. 8,000 events and 1.2 GiB live before the first of them.

    References. torch.cuda.memory: Snapshotting memory, max_entries.
    """
    analysis = context.need_trace()
    quality = analysis.capture
    if not (quality.is_truncated or quality.is_late_start):
        return
    how = "was probably cut by a full buffer" if quality.is_truncated else "began late"
    yield Found(
        f"The history {how}: {format_size(quality.initial_live_bytes)} were live before its "
        "first event.",
        confidence=Confidence.LIKELY if quality.is_truncated else Confidence.PROVEN,
        evidence=(
            Evidence("live before", quality.initial_live_bytes, "bytes", "trace"),
            Evidence("events", analysis.n_events, "count", "trace"),
        ),
        key="cut" if quality.is_truncated else "late",
    )


@rule("FD902", Severity.INFO)
def no_history(context: Context) -> Iterator[Found]:
    """The snapshot has no history of events.

    What it finds. Snapshots without a trace: recording was off, or recorded the state only.

    Why it costs memory. It does not; peaks, failures, growth and replays cannot be seen.

    Evidence used. The trace of the device.

    What to do. fragdoctor run train.py records from the start and needs no change in the code.
    Inside a program: with fragdoctor.record(): ... around the part that matters, or
    torch.cuda.memory._record_memory_history(max_entries=100000) before it, then _dump_snapshot.

    What it can get wrong. A device that was not used has no events either.

    Example. torch.cuda.memory_snapshot() pickled without recording.

    References. torch.cuda.memory: Snapshotting memory.
    """
    analysis = context.need_analysis()
    if analysis.capture.has_trace or not analysis.n_segments:
        return
    yield Found(
        "The snapshot has no history: failures, peaks and growth before it cannot be seen.",
        confidence=Confidence.PROVEN,
    )


@rule("FD903", Severity.INFO)
def no_stacks(context: Context) -> Iterator[Found]:
    """No stacks were recorded.

    What it finds. Snapshots in which no live block and no allocation has a stack.

    Why it costs memory. It does not; who holds and strands memory remains unnamed.

    Evidence used. Stacks of blocks and events.

    What to do. Record with context="all" or context="alloc", and stacks="python".

    What it can get wrong. Nothing known.

    Example. _record_memory_history(context=None).

    References. torch.cuda.memory: Snapshotting memory, context.
    """
    analysis = context.need_analysis()
    if analysis.capture.has_stacks > 0 or not (analysis.n_blocks or analysis.n_events):
        return
    yield Found(
        "No stacks were recorded: memory cannot be traced to source lines.",
        confidence=Confidence.PROVEN,
    )


@rule("FD904", Severity.WARNING)
def missing_events(context: Context) -> Iterator[Found]:
    """Events are missing from the trace or contradict the state.

    What it finds. Kinds of events that the rest of the trace implies but that were not recorded
    (skip_actions), and events that cannot be undone from the final state.

    Why it costs memory. It does not; figures over time become estimates and replays are refused.

    Evidence used. Undoing the trace from the recorded final state.

    What to do. Record without skip_actions.

    What it can get wrong. Another allocator behind the same interface produces such traces too.

    Example. free_requested events were skipped: frees complete that were never requested.

    References. torch.cuda.memory: Snapshotting memory, skip_actions.
    """
    analysis = context.need_trace()
    quality = analysis.capture
    if quality.missing_actions:
        text = f"Events of these kinds are missing: {', '.join(quality.missing_actions)}."
    elif not quality.is_consistent:
        text = (
            f"{plural(quality.n_contradictions, 'event')} "
            f"{'contradicts' if quality.n_contradictions == 1 else 'contradict'} "
            "the final state."
        )
    else:
        return
    yield Found(
        text,
        confidence=Confidence.PROVEN,
        evidence=(Evidence("contradictions", quality.n_contradictions, "count", "trace"),),
    )


@rule("FD905", Severity.WARNING)
def foreign_allocator(context: Context) -> Iterator[Found]:
    """Blocks do not tile their segments.

    What it finds. Segments whose blocks leave gaps, overlap, or add up to another size.

    Why it costs memory. It does not; the rules of PyTorch's native allocator may not hold.

    Evidence used. Addresses and sizes of the blocks.

    What to do. Read the figures with care; replays of this file are estimates.

    What it can get wrong. A damaged file looks the same.

    Example. A snapshot of an accelerator plug-in that lists live blocks only.

    References. torch.cuda.memory: Snapshotting memory.
    """
    analysis = context.need_analysis()
    n = analysis.capture.tiling_errors
    if not n:
        return
    yield Found(
        f"In {format_count(n)} of {format_count(analysis.n_segments)} segments the blocks do "
        "not tile the segment.",
        confidence=Confidence.PROVEN,
        evidence=(Evidence("segments", n, "count", "snapshot"),),
    )


MAX_NAMES: Final = 5
"""The most names to list; the others are only counted."""


@rule("FD906", Severity.INFO)
def unknown_keys(context: Context) -> Iterator[Found]:
    """The file has unknown keys or values.

    What it finds. Keys of a newer PyTorch, or of a derived one, that the reader counted and
    ignored.

    Why it costs memory. It does not; part of the file may not be understood.

    Evidence used. What the reader found.

    What to do. Update fragdoctor, or tell us about the file.

    What it can get wrong. Unknown keys are mostly harmless additions.

    Example. An action of a version that came out after this program.

    References. torch.cuda.memory: Snapshotting memory.
    """
    snapshot = context.need_analysis().trace.snapshot
    if context.device not in (None, *snapshot.devices[:1]):
        return
    origin = snapshot.provenance
    unknown = {**origin.unknown_keys, **origin.unknown_values}
    if not unknown:
        return
    names = ", ".join(sorted(unknown)[:MAX_NAMES])
    more = len(unknown) - MAX_NAMES
    yield Found(
        f"{format_count(len(unknown))} keys or values are unknown and were ignored: "
        f"{names}{f' and {more} more' if more > 0 else ''}.",
        confidence=Confidence.PROVEN,
        evidence=(Evidence("occurrences", sum(unknown.values()), "count", "snapshot"),),
    )


def missing_figures(message: OomMessage) -> list[str]:
    """Return the figures that a message lacks although its kind prints them."""
    if message.kind != "pytorch-caching-allocator" or message.backend not in ("cuda", "rocm"):
        return []
    if message.sub_kind not in ("", "size-bug"):
        return []
    figures = {
        "device size": message.total_bytes,
        "free": message.free_bytes,
        "allocated": message.allocated_bytes,
    }
    return [name for name, value in figures.items() if value is None]


@rule("FD907", Severity.INFO)
def cut_message(context: Context) -> Iterator[Found]:
    """The message lacks figures that its kind prints.

    What it finds. Allocator messages without allocated, reserved or free memory: cut by a log tool,
    retyped, or printed by a version with a defect.

    Why it costs memory. It does not; capacity and fragmentation cannot be told apart.

    Evidence used. The fields of the message.

    What to do. Give the whole message, up to the advice at its end.

    What it can get wrong. Some backends never print all figures (XPU before 2.9, MPS).

    Example. A log line that ends after "of which 448.00 KiB is free."

    References. CUDA semantics: Memory management.
    """
    message = context.need_message()
    missing = missing_figures(message)
    if missing:
        yield Found(
            f"The message in line {message.line} lacks: {', '.join(missing)}.",
            confidence=Confidence.PROVEN,
        )
