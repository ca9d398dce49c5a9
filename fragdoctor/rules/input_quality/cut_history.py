"""FD901: the recorded history is incomplete."""

from __future__ import annotations

from fragdoctor.model.finding import Confidence, Evidence, Severity
from fragdoctor.rules.rule import Context, Findings, Found, rule
from fragdoctor.units import format_size


@rule("FD901", Severity.INFO)
def cut_history(context: Context) -> Findings:
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
        f"The history {how}: {format_size(quality.initial_live_bytes)} was live before its "
        "first event.",
        confidence=Confidence.LIKELY if quality.is_truncated else Confidence.PROVEN,
        evidence=(
            Evidence("live before", quality.initial_live_bytes, "bytes", "trace"),
            Evidence("events", analysis.n_events, "count", "trace"),
        ),
        key="cut" if quality.is_truncated else "late",
    )
