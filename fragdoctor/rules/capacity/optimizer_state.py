"""FD204: a request failed inside the optimizer's step."""

from __future__ import annotations

from fragdoctor.analysis.result import DeviceAnalysis
from fragdoctor.model.finding import Confidence, Evidence, Severity
from fragdoctor.model.phases import Category, TrainingPhase
from fragdoctor.rules.rule import Context, Findings, Found, Skip, rule
from fragdoctor.units import format_size


@rule("FD204", Severity.WARNING)
def optimizer_state(context: Context) -> Findings:
    """A request failed inside the optimizer's step.

    What it finds. A failing request whose stack runs through an optimizer, and the state that the
    optimizer holds.

    Why it costs memory. Adam keeps two tensors per parameter, made in the first step: a model that
    trained through its first backward pass fails right after it.

    Evidence used. Stacks of the failing request and of live blocks.

    What to do. An optimizer with less state (8-bit Adam, Adafactor, SGD), foreach=False for a lower
    peak, sharded or offloaded state.

    What it can get wrong. An optimizer of your own in a file without "optim" in its path is not
    recognized. Without stacks the rule cannot judge.

    Example. exp_avg_sq of the last layer finds no room after 1.5 GiB of state.

    References. torch.optim.Adam: foreach; FAQ: out of memory.
    """
    analysis = context.need_trace()
    if not analysis.ooms:
        return
    if not context.stack(analysis.ooms[-1].stack):
        raise Skip("the failing request has no stack")
    if not fails_in_optimizer(analysis):
        return
    held = state_in_step(analysis)
    yield Found(
        "The request failed inside the optimizer's step"
        f"{f', which already holds {format_size(held)} of state' if held else ''}.",
        confidence=Confidence.LIKELY,
        n_bytes=held,
        evidence=(Evidence("optimizer state", held, "bytes", "snapshot"),),
        locations=context.user_stack(analysis.ooms[-1].stack),
    )


def fails_in_optimizer(analysis: DeviceAnalysis) -> bool:
    """Return whether the failing request itself was made inside an optimizer's step."""
    return any(analysis.trace.stacks.roles.in_step[oom.stack] for oom in analysis.ooms[-1:])


def state_in_step(analysis: DeviceAnalysis) -> int:
    """Return the bytes of state that a step holds at its peak, or 0 if no steps are seen."""
    phases = () if analysis.phases is None else analysis.phases.report.phases
    held = (s for p in phases if p.phase == TrainingPhase.OPTIMIZER for s in p.held)
    return next((s.n_bytes for s in held if s.category == Category.OPTIMIZER_STATE), 0)
