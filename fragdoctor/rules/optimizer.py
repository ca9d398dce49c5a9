"""Memory of optimizer state, told by the stacks that made it."""

from __future__ import annotations

from dataclasses import dataclass

from fragdoctor.analysis.categories import OPTIMIZER_STATE, TEMPORARIES
from fragdoctor.analysis.passes import OPTIMIZER
from fragdoctor.analysis.result import DeviceAnalysis, Holder
from fragdoctor.analysis.stack_roles import OPTIMIZER_FILE, OPTIMIZER_STEP
from fragdoctor.rules.context import Context


def is_optimizer_stack(context: Context, stack: int) -> bool:
    """Tell whether an allocation was made inside an optimizer's step."""
    return any(
        OPTIMIZER_FILE.search(frame.filename) and OPTIMIZER_STEP.match(frame.function)
        for frame in context.stack(stack)
    )


def optimizer_holders(context: Context, analysis: DeviceAnalysis) -> tuple[Holder, ...]:
    """Return the holders whose memory was made inside an optimizer's step."""
    return tuple(h for h in analysis.holders if is_optimizer_stack(context, h.stack))


def fails_in_optimizer(context: Context, analysis: DeviceAnalysis) -> bool:
    """Tell whether the failing request itself was made inside an optimizer's step."""
    return any(is_optimizer_stack(context, oom.stack) for oom in analysis.ooms[-1:])


@dataclass(frozen=True, slots=True)
class StepMemory:
    """What the optimizer's steps hold at their worst moment: state to stay, and temporaries."""

    state_bytes: int
    temporary_bytes: int
    peak_bytes: int


def step_memory(analysis: DeviceAnalysis) -> StepMemory | None:
    """Return what a step holds at its peak; None where the trace does not tell steps apart."""
    found = [] if analysis.phases is None else analysis.phases.phases
    for phase in found:
        if phase.label == OPTIMIZER:
            held = {s.category: s.n_bytes for s in phase.held}
            return StepMemory(
                held.get(OPTIMIZER_STATE, 0), held.get(TEMPORARIES, 0), phase.worst_peak_bytes
            )
    return None
