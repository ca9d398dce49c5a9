"""FD903: events and blocks without stacks."""

from __future__ import annotations

from collections.abc import Iterator

from fragdoctor.model.finding import Confidence, Finding, Severity
from fragdoctor.rules.rule import Context, Rule


class NoStacks(Rule):
    """No stacks were recorded.

    What it finds. Snapshots in which no live block and no allocation has a stack.

    Why it costs memory. It does not; who holds and strands memory remains unnamed.

    Evidence used. Stacks of blocks and events.

    What to do. Record with context="all" or context="alloc", and stacks="python".

    What it can get wrong. Nothing known.

    Example. _record_memory_history(context=None).

    References. torch.cuda.memory: Snapshotting memory, context.
    """

    code = "FD903"
    severity = Severity.INFO

    def check(self, context: Context) -> Iterator[Finding]:
        """Yield one finding if there are no stacks at all."""
        analysis = context.need_analysis()
        if analysis.capture.has_stacks > 0 or not (analysis.n_blocks or analysis.n_events):
            return
        yield self.finding(
            context,
            "No stacks were recorded: memory cannot be traced to source lines.",
            confidence=Confidence.PROVEN,
        )
