"""Letting go of memory that grows, at its line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from fragdoctor.analysis.result import Growth
from fragdoctor.diagnosis.remedies.plan import CURES, Plan, Proposal, propose
from fragdoctor.model.diagnosis import Cause, Predicted
from fragdoctor.model.finding import Confidence, Evidence, Location
from fragdoctor.rules.context import place
from fragdoctor.rules.growth.significance import leading_growth
from fragdoctor.units import format_size, plural

_EVALUATION: Final = re.compile(
    r"eval|valid|infer|predict|test|generate|sample|score", re.IGNORECASE
)


def remedies(plan: Plan) -> Iterator[Proposal]:
    """Propose to free a growing memory, and no_grad where it grows in evaluation."""
    if not plan.supports(Cause.LEAK):
        return
    analysis = plan.context.analysis
    growth = leading_growth(plan.context, analysis) if analysis is not None else None
    if growth is None:
        yield _without_line(plan)
        return
    stack = plan.context.python_stack(growth.stack)
    line = plan.context.frame(growth.frame) or (stack[0] if stack else None)
    if is_evaluation(stack):
        yield _no_grad(plan, growth, line, stack)
    yield _free(plan, growth, line, stack)


def is_evaluation(stack: tuple[Location, ...]) -> bool:
    """Tell whether a stack runs through code whose name says that it evaluates."""
    return any(
        _EVALUATION.search(f.function) or _EVALUATION.search(re.split(r"[/\\]", f.filename)[-1])
        for f in stack
    )


def _predicted(plan: Plan, growth: Growth) -> Predicted:
    r = plan.refusal
    if r is None or r.margin_bytes is None:
        return Predicted()
    fits = r.margin_bytes + growth.survivor_bytes >= 0
    return Predicted(
        fits=fits, margin_bytes=r.margin_bytes + growth.survivor_bytes, method="arithmetic"
    )


def _free(
    plan: Plan, growth: Growth, line: Location | None, stack: tuple[Location, ...]
) -> Proposal:
    return propose(
        "free-leak",
        f"Let go of what {place(line)} keeps",
        weight=CURES + 5 if plan.cause is Cause.LEAK else CURES - 30,
        confidence=Confidence.LIKELY,
        change=f"store loss.item() or tensor.detach().cpu() in place of the tensor made at "
        f"{place(line)}, or clear the list, cache or dict that keeps it",
        why=f"{plural(growth.n_survivors, 'block')} of {format_size(growth.survivor_bytes)} "
        f"{'survives' if growth.n_survivors == 1 else 'survive'}, "
        f"{format_size(growth.slope_bytes)} more in each of {plural(growth.n_steps, 'step')}.",
        locations=stack or (() if line is None else (line,)),
        predicted=_predicted(plan, growth),
        cost="None, if the tensors are not needed.",
        caveats=("A tensor that keeps its graph keeps every activation behind it.",),
        verify="memory_allocated() after each step stays level.",
        evidence=(
            Evidence("survivors", growth.survivor_bytes, "bytes", "trace"),
            Evidence("growth per step", growth.slope_bytes, "bytes", "trace"),
        ),
        saves_bytes=growth.survivor_bytes,
    )


def _no_grad(
    plan: Plan, growth: Growth, line: Location | None, stack: tuple[Location, ...]
) -> Proposal:
    return propose(
        "no-grad",
        "Evaluate without building graphs",
        weight=CURES + 8 if plan.cause is Cause.LEAK else CURES - 25,
        confidence=Confidence.LIKELY,
        change=f"wrap the loop that reaches {place(line)} in torch.no_grad() or "
        "torch.inference_mode()",
        why="The growth comes from code that evaluates; with gradients on, every kept output keeps "
        f"its whole graph ({format_size(growth.survivor_bytes)} here).",
        locations=stack or (() if line is None else (line,)),
        predicted=_predicted(plan, growth),
        cost="None: evaluation needs no gradients.",
        caveats=("model.eval() alone does not stop graphs from being built.",),
        verify="memory_allocated() stays level during evaluation.",
        saves_bytes=growth.survivor_bytes,
    )


def _without_line(plan: Plan) -> Proposal:
    return propose(
        "find-leak",
        "Find the line that keeps memory",
        weight=CURES,
        confidence=Confidence.POSSIBLE,
        change="with fragdoctor.record('leak'): around a few steps; or "
        "torch.cuda.memory._record_memory_history(max_entries=100000) before and "
        "torch.cuda.memory._dump_snapshot('leak.pickle') after them",
        why=plan.verdict.summary,
        cost="A few microseconds per allocation while recording.",
        verify="fragdoctor analyze leak (or leak.pickle) names the growing line.",
    )
