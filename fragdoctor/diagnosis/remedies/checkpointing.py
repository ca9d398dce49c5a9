"""Gradient checkpointing: activations against compute."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from fragdoctor.diagnosis.remedies.plan import HELPS, MAY_HELP, Plan, Proposal, propose
from fragdoctor.diagnosis.remedies.workload import fails_in_optimizer_step, workload_of
from fragdoctor.model.diagnosis import Cause
from fragdoctor.model.finding import Confidence
from fragdoctor.units import format_size

EXAMPLE_LAYERS: Final = 24
"""Layers of the worked example; the real number is in the program, not in a memory file."""


def remedies(plan: Plan) -> Iterator[Proposal]:
    """Propose it where activations of training fill the device."""
    if not plan.is_allocator_case or plan.refusal is None:
        return
    if plan.cause not in (Cause.CAPACITY, Cause.TRANSIENT_PEAK):
        return
    r = plan.refusal
    if r.total_bytes is not None and r.requested_bytes > r.total_bytes:
        return
    if fails_in_optimizer_step(plan):
        return
    work = workload_of(plan)
    share = 1 / math.sqrt(EXAMPLE_LAYERS)
    example = "activations of L layers shrink to about 1/sqrt(L)"
    if work.activation_bytes is not None:
        example = (
            f"the {format_size(work.activation_bytes)} of activations would shrink to about "
            f"{format_size(work.activation_bytes * share)} with {EXAMPLE_LAYERS} layers "
            "(1/sqrt(L))"
        )
    yield propose(
        "gradient-checkpointing",
        "Checkpoint the layers of the model",
        weight=HELPS + 10 if work.activation_bytes is not None else MAY_HELP + 10,
        confidence=Confidence.LIKELY if work.activation_bytes is not None else Confidence.POSSIBLE,
        change="torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) around each "
        "repeated block",
        why="A transformer keeps about L x B x S x H x bytes per element for each stored tensor "
        f"(layers, batch, sequence, hidden size); {example}.",
        cost="About 33 % more compute: the forward pass runs once more.",
        caveats=("Training only: it does nothing for weights, optimizer state or inference.",),
        verify="Peak allocated memory of a step falls; its time grows by about a third.",
    )
