"""Optimizer state: created in the first step, as large as the weights or twice that."""

from __future__ import annotations

from collections.abc import Iterator

from fragdoctor.diagnosis.remedies.plan import HELPS, Plan, Proposal, propose
from fragdoctor.model.diagnosis import Cause
from fragdoctor.model.finding import Confidence
from fragdoctor.rules.optimizer import fails_in_optimizer, optimizer_holders
from fragdoctor.units import format_size


def remedies(plan: Plan) -> Iterator[Proposal]:
    """Propose smaller state where the failure is in the optimizer."""
    analysis = plan.context.analysis
    if analysis is None or plan.cause not in (Cause.CAPACITY, Cause.TRANSIENT_PEAK):
        return
    if not fails_in_optimizer(plan.context, analysis):
        return
    held = sum(h.now_bytes for h in optimizer_holders(plan.context, analysis))
    yield propose(
        "smaller-optimizer-state",
        "Use an optimizer with less state",
        weight=HELPS + 25,
        confidence=Confidence.LIKELY,
        change="8-bit Adam, Adafactor or SGD; foreach=False lowers the peak of a step; shard with "
        "ZeRO or FSDP; offload the state to the host",
        why=f"The request failed inside the optimizer's step, which had made {format_size(held)} "
        "of state until then.",
        cost="Another optimizer needs its own tuning; offloading is slow.",
        caveats=("A smaller batch makes room only as far as gradients and activations shrink.",),
        verify="Allocated memory after the first step falls.",
        saves_bytes=held or None,
    )
