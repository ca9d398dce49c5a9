"""FD904: events are missing from the trace or contradict the state."""

from __future__ import annotations

from fragdoctor.model.finding import Confidence, Evidence, Severity
from fragdoctor.rules.rule import Context, Findings, Found, rule
from fragdoctor.units import plural


@rule("FD904", Severity.WARNING)
def missing_events(context: Context) -> Findings:
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
        n = quality.n_contradictions
        text = f"{plural(n, 'event contradicts', 'events contradict')} the final state."
    else:
        return
    yield Found(
        text,
        confidence=Confidence.PROVEN,
        evidence=(Evidence("contradictions", quality.n_contradictions, "count", "trace"),),
    )
