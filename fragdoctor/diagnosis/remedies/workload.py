"""What part of live memory scales with the batch, as far as the inputs tell."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from fragdoctor.diagnosis.remedies.plan import Plan
from fragdoctor.rules.optimizer import fails_in_optimizer

LOW_PERCENTILE: Final = 5
"""Live memory between steps: weights, gradients kept, optimizer state. The lowest states of a run
are those before the model was built."""

MIN_SWING_SHARE: Final = 0.05
"""Live memory that moves by less than this has no steps to speak of."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Missing bytes, the activations, and the share of the batch that would fit.

    ``activation_bytes`` and ``keep_share`` are None where no trace tells persistent memory from
    what comes and goes.
    """

    missing_bytes: int
    activation_bytes: int | None = None
    persistent_bytes: int | None = None
    keep_share: float | None = None


def fails_in_optimizer_step(plan: Plan) -> bool:
    """Tell whether the request failed inside an optimizer's step, after the backward pass."""
    analysis = plan.context.analysis
    return analysis is not None and fails_in_optimizer(plan.context, analysis)


def workload_of(plan: Plan) -> Workload:
    """Return the split of live memory at the failure."""
    r = plan.refusal
    if r is None:
        return Workload(0)
    missing = max(0, -r.margin_bytes) if r.margin_bytes is not None else 0
    if missing == 0:
        # Packed perfectly it would fit; without new packing this much more must be free.
        missing = max(0, r.requested_bytes - (r.free_bytes or 0))
    analysis = plan.context.analysis
    if analysis is None or analysis.timeline is None or r.live_bytes is None:
        return Workload(missing)
    persistent = int(np.percentile(analysis.timeline.active_bytes, LOW_PERCENTILE))
    activations = r.live_bytes - persistent
    if activations < MIN_SWING_SHARE * r.live_bytes or _steps(plan) < 2:
        return Workload(missing)
    # The failing request belongs to the step as well.
    moving = activations + r.requested_bytes
    return Workload(missing, activations, persistent, 1 - missing / moving)


def _steps(plan: Plan) -> int:
    """Return how often live memory fell to its low level and rose again."""
    analysis = plan.context.analysis
    if analysis is None or analysis.timeline is None:
        return 0
    active = analysis.timeline.active_bytes
    low, high = np.percentile(active, [LOW_PERCENTILE, 95])
    above = active > (low + high) / 2
    return int(np.count_nonzero(above[1:] & ~above[:-1]))
