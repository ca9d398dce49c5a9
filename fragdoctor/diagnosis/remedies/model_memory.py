"""Weights, gradients and state in less memory: precision, sharding, offloading."""

from __future__ import annotations

from collections.abc import Iterator

from fragdoctor.diagnosis.remedies.plan import HELPS, MAY_HELP, Plan, Proposal, propose
from fragdoctor.diagnosis.remedies.workload import fails_in_optimizer_step, only_builds
from fragdoctor.model.diagnosis import Cause
from fragdoctor.model.finding import Confidence
from fragdoctor.units import format_size


def remedies(plan: Plan) -> Iterator[Proposal]:
    """Propose it for capacity; first where nothing but the model is there yet."""
    r = plan.refusal
    if not plan.is_allocator_case or r is None or plan.cause is not Cause.CAPACITY:
        return
    if r.is_alone_too_large:
        return
    is_building = only_builds(plan) and not fails_in_optimizer_step(plan)
    why = (
        f"Nothing was freed before the failure: {format_size(r.live_bytes)} are the model itself."
        if is_building
        else "Lower precision halves weights, gradients and activations alike."
    )
    yield propose(
        "less-model-memory",
        "Keep weights and state in less memory",
        weight=HELPS + 25 if is_building else MAY_HELP + 2,
        confidence=Confidence.LIKELY if is_building else Confidence.POSSIBLE,
        change="bf16 weights or autocast, quantised weights for inference, FSDP or ZeRO over "
        "several GPUs, offloading to the host",
        why=why,
        cost="Lower precision may need care with the loss; sharding and offloading need bandwidth.",
        verify="memory_allocated() after the model is built falls.",
    )
