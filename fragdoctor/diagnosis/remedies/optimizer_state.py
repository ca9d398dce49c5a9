"""Optimizer state: created in the first step, as large as the weights or twice that."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from fragdoctor.diagnosis.remedies.plan import HELPS, Plan, Proposal, propose
from fragdoctor.model.diagnosis import Cause
from fragdoctor.model.finding import Confidence
from fragdoctor.rules.optimizer import (
    StepMemory,
    fails_in_optimizer,
    optimizer_holders,
    step_memory,
)
from fragdoctor.units import format_size

MIN_TEMPORARIES: Final = 0.05
"""Share of the step's peak from which its temporaries are worth a change."""


def remedies(plan: Plan) -> Iterator[Proposal]:
    """Propose smaller state where the failure is in the optimizer."""
    analysis = plan.context.analysis
    if analysis is None or plan.cause not in (Cause.CAPACITY, Cause.TRANSIENT_PEAK):
        return
    if not fails_in_optimizer(plan.context, analysis):
        return
    step = step_memory(analysis)
    held = sum(h.now_bytes for h in optimizer_holders(plan.context, analysis))
    if step is not None:
        held = step.state_bytes
        yield from _without_foreach(step)
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


def _without_foreach(step: StepMemory) -> Iterator[Proposal]:
    """Propose to update one parameter at a time where a step's temporaries are large."""
    if step.temporary_bytes < MIN_TEMPORARIES * step.peak_bytes:
        return
    yield propose(
        "optimizer-without-foreach",
        "Let the optimizer update one parameter at a time",
        weight=HELPS + 27,
        confidence=Confidence.LIKELY,
        change="foreach=False or fused=True where the optimizer is made",
        why=f"At its peak the step held {format_size(step.temporary_bytes)} of temporaries beside "
        f"{format_size(step.state_bytes)} of state: by default all parameters are updated "
        "together (foreach).",
        cost="foreach=False makes the step slower; fused=True does not.",
        caveats=("Not every optimizer offers both.",),
        verify="The peak of the optimizer phase falls.",
        saves_bytes=step.temporary_bytes,
    )
