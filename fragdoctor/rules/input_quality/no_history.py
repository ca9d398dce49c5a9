"""FD902: the snapshot has no history of events."""

from __future__ import annotations

from collections.abc import Iterator

from fragdoctor.model.finding import Confidence, Severity
from fragdoctor.rules.rule import Context, Found, rule


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
