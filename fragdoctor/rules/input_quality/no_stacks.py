"""FD903: no stacks were recorded."""

from __future__ import annotations

from collections.abc import Iterator

from fragdoctor.model.finding import Confidence, Severity
from fragdoctor.rules.rule import Context, Found, rule


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
