"""Remedies for memory that grows: from step to step, in an evaluation, or from trial to trial."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from fragdoctor.analysis.growing_buffers import buffers_of
from fragdoctor.analysis.result import KeptKind, KeptMemory, KeptPattern
from fragdoctor.diagnosis.bench import Attempt, without
from fragdoctor.diagnosis.remedies.remedy import JudgedCase, Proposal, Remedy, Weight, proposes
from fragdoctor.future.training_edits import requests_removed
from fragdoctor.model.census import HoldingKind, Owner
from fragdoctor.model.diagnosis import Cause, Predicted
from fragdoctor.model.finding import Confidence, Location, line_text
from fragdoctor.model.snapshot import Action
from fragdoctor.rules.growth.growing_line import (
    gathered_text,
    growth_text,
    keeper,
    made_text,
    maker_text,
)
from fragdoctor.rules.rule import Context
from fragdoctor.story.trends import accumulation, growth_sentence, has_process_each
from fragdoctor.trace.stacks import EVALUATION, PACKAGE, USER, classify_file
from fragdoctor.trace.trace import Trace
from fragdoctor.units import format_count, format_size

FREEING: Final = (
    (
        "del frees nothing while another reference remains: a list of results, a callback, a "
        "closure, an exception's traceback."
    ),
    "gc.collect() frees what only reference cycles keep, nothing that is still in use.",
    (
        "empty_cache() gives unused cache back to the driver: reserved falls, allocated does not; "
        "it cures no leak, and the next trial pays for new segments."
    ),
)
"""What each of the three calls fails to do."""


@proposes("Evaluate without building graphs")
def no_grad(remedy: Remedy, case: JudgedCase) -> Iterator[Proposal]:
    """Propose no_grad if graphs are kept that no backward pass will use.

    If modules were recorded, their kept results distinguish a graph from outputs alone. The
    outputs of an evaluation that already runs under no_grad are not a graph.
    """
    kept, analysis = _kept(case), case.context.analysis
    if kept is None or analysis is None:
        return
    stack = kept_stack(case.context, kept)
    is_seen, evaluates = kept.pattern is KeptPattern.EVALUATION, is_evaluation(stack)
    is_told = kept.pattern is KeptPattern.GRAPH or is_seen
    may_be = is_told or (not len(analysis.trace.module_rows) and kept.pattern in MAY_BE_GRAPHS)
    owner = keeper(case.context, kept)
    is_tensors = owner is not None and owner.kind is HoldingKind.CONTAINER  # no graph behind them
    if is_tensors or not (is_seen or (evaluates and may_be)):
        return
    maker, held = maker_text(case.context, kept), format_size(kept.survivor_bytes)
    reason = (
        "No backward pass ran while it grew, as in an evaluation"
        if is_seen
        else "The growth comes from code that evaluates"
    )
    title = remedy.title
    change = f"wrap the loop that reaches {maker} in torch.no_grad() or torch.inference_mode()"
    if is_seen and not evaluates and any(k.kind is KeptKind.LOSS for k in kept.kinds):
        title = "Run the backward pass for each batch, or evaluate without graphs"
        change = (
            "in training call (loss / n).backward() for each of n micro-batches, in place of "
            f"one backward() of their sum; in an evaluation {change}"
        )
        reason = "Graph after graph was built at this line, and no backward pass ran"
    elif owner is None:  # the outputs of all layers, kept in a list, look the same
        change += "; if it already is, keep the outputs on the host (.cpu())"
    yield remedy.proposal(
        title=title,
        weight=Weight.CURES if case.cause is Cause.LEAK and is_told else Weight.HELPS,
        confidence=Confidence.LIKELY if is_told else Confidence.POSSIBLE,
        change=change,
        why=f"{reason}; with gradients on, every kept output keeps its whole graph ({held} here).",
        locations=stack,
        predicted=_predicted(case, kept),
        cost="None: evaluation needs no gradients.",
        caveats=("model.eval() alone does not stop graphs from being built.",),
        saves_bytes=kept.survivor_bytes,
        attempts=without(kept),
    )


MAY_BE_GRAPHS: Final = (KeptPattern.RESULTS, KeptPattern.TENSORS)
"""Patterns that graphs of an evaluation may have if modules were not recorded."""


@proposes("Release what keeps growing")
def free_leak(remedy: Remedy, case: JudgedCase) -> Iterator[Proposal]:
    """Propose freeing what grows, by what keeps it."""
    kept = _kept(case)
    if kept is None:
        return
    context = case.context
    change = WAYS[kept.pattern]
    is_graph = kept.pattern in (KeptPattern.GRAPH, KeptPattern.EVALUATION)
    if is_graph and any(k.kind is KeptKind.LOSS for k in kept.kinds):
        change = LOSS_KEPT
    title = made_text(context, kept)
    verb = "Bound" if kept.pattern is KeptPattern.BUFFER else "Release"
    owner = keeper(context, kept)
    fills = owner is not None and owner.max_items > 0
    if owner is not None and owner.kind in _KEEPERS:
        verb, title, change = _by_name(owner, title, change, kept.pattern)
    yield remedy.proposal(
        title=f"{verb} {title}",
        weight=Weight.CURES if case.cause is Cause.LEAK or fills else Weight.HELPS,
        confidence=Confidence.LIKELY,
        change=change,
        why=f"{_sites_text(context, kept)}.",
        locations=kept_stack(context, kept),
        predicted=_predicted(case, kept),
        cost="None, if the tensors are not needed.",
        caveats=(
            ("A tensor that keeps its graph keeps every activation behind it.",) if is_graph else ()
        ),
        saves_bytes=kept.survivor_bytes,
        attempts=without(kept),
    )


_KEEPERS: Final = (HoldingKind.CONTAINER, HoldingKind.GRAPH, HoldingKind.CYCLE)
_SPECIAL: Final = (KeptPattern.COPIES, KeptPattern.OPTIMIZER, KeptPattern.GRADIENTS)
"""Patterns whose own advice says more than the holder that a census found."""


def _by_name(owner: Owner, what: str, change: str, pattern: KeptPattern) -> tuple[str, str, str]:
    """Return verb, object and change of the advice if a census names what keeps the memory."""
    title = f"{owner.name}, which keeps {what}"
    if owner.kind is HoldingKind.CYCLE:
        way = "set a reference of the cycle to None when it is done, or make one a weakref.ref"
        return "Break the reference cycle", title, f"{way}; gc.collect() frees what it keeps"
    verb = "Detach" if owner.kind is HoldingKind.GRAPH else "Bound"
    way = f"clear {owner.name} or give it a limit, or keep .detach().cpu() of what it needs"
    if owner.kind is HoldingKind.GRAPH:
        way = f"store {owner.name} without its graph: .detach(), or .item() where it is one number"
    elif pattern in (KeptPattern.OPTIMIZER, KeptPattern.MODELS) or not owner.n_items:
        return verb, title, f"keep in {owner.name} only {OF_EACH}"
    elif owner.max_items:
        way = (
            f"give {owner.name} room for fewer than its {format_count(owner.max_items)} items, or "
            "keep them in host memory (.cpu())"
        )
    return verb, title, f"{way}; {change}" if pattern in _SPECIAL else way


LOSS_KEPT: Final = (
    "keep loss.item() where the loss itself is kept or added up (total += loss.item()): the loss "
    "holds the graph of its step, with every activation; an exception that is kept with its "
    "traceback does the same"
)

OF_EACH: Final = (
    "what is needed of each model or optimizer: numbers (.item()), or its state_dict() on the host"
)

WAYS: Final = {
    KeptPattern.GRAPH: (
        "find what keeps a result of each step with its graph (a list of outputs, a state that is "
        "carried over, an exception with its traceback) and store .detach() of it, or its .item()"
    ),
    KeptPattern.EVALUATION: (
        "collect outputs without their graphs and on the host: outputs.append(out.detach().cpu())"
    ),
    KeptPattern.RESULTS: (
        "find the list, dict or attribute that collects these outputs; keep the number that you "
        "need from them, or .detach().cpu()"
    ),
    KeptPattern.COPIES: (
        "keep the copies on the host ({k: v.cpu() for k, v in model.state_dict().items()}), or "
        "only the last or best of them"
    ),
    KeptPattern.MODELS: (
        "models are kept with their gradients and optimizers: find the list, dict or exception "
        f"that keeps them, and keep only {OF_EACH}"
    ),
    KeptPattern.OPTIMIZER: (
        "make the optimizer once, before the loop; to change its learning rate set "
        "optimizer.param_groups[i]['lr'], and keep no reference to an old optimizer"
    ),
    KeptPattern.GRADIENTS: (
        "do not keep gradients from step to step: optimizer.zero_grad(set_to_none=True), and "
        ".detach() where one is stored; create_graph=True keeps the whole backward pass alive"
    ),
    KeptPattern.SHAPES: (
        "a tensor is kept for each new shape, as a cache keyed by shape does: give the cache a "
        "limit (functools.lru_cache(maxsize=...)), or pad to a few lengths"
    ),
    KeptPattern.BUFFER: (
        "give the buffer a limit (keep the newest rows: buffer = buffer[-n:].clone()), and make it "
        "once with torch.empty(n, ...) in place of torch.cat in each step"
    ),
    KeptPattern.TENSORS: (
        "find the list, deque, dict or attribute that keeps them; give it a limit, or keep .cpu() "
        "of what it needs"
    ),
}
"""What to change, by the pattern of the kept memory."""


def _kept(case: JudgedCase) -> KeptMemory | None:
    """Return the growing memory that the verdict is about, or None for other verdicts."""
    analysis = case.context.analysis
    if analysis is None or not case.supports(Cause.LEAK):
        return None
    return analysis.kept


def kept_stack(context: Context, kept: KeptMemory) -> tuple[Location, ...]:
    """Return the stack that makes most of what grows, from the named line outward."""
    stack, line = context.python_stack(kept.stack), context.frame(kept.frame)
    if line is None:
        return stack
    return stack[stack.index(line) :] if line in stack else (line,)


MAX_SITES: Final = 3


def _sites_text(context: Context, kept: KeptMemory) -> str:
    """Return what is kept, and which lines allocate it if other lines keep it."""
    text = growth_text(context, kept)
    others = [g for g in kept.lines if g.frame not in (kept.frame, -1)][:MAX_SITES]
    if not others:
        return text
    sites = ", ".join(
        f"{line_text(context.frame(g.frame))} ({format_size(g.survivor_bytes)})" for g in others
    )
    return f"{text}; allocated at {sites}"


def is_evaluation(stack: Sequence[Location]) -> bool:
    """Return whether a stack runs through program code whose name says that it evaluates.

    Frames of the interpreter do not count, since every stack has ``_PyEval_EvalFrame``.
    """
    own = [f for f in stack if classify_file(f.filename) in (USER, PACKAGE)]
    return any(EVALUATION.search(f.function) or EVALUATION.search(f.basename) for f in own)


def _predicted(case: JudgedCase, kept: KeptMemory) -> Predicted:
    r = case.failed_request
    if r is None or r.margin_bytes is None:
        return Predicted()
    margin = r.margin_bytes + kept.survivor_bytes
    return Predicted(fits=margin >= 0, margin_bytes=margin, method="arithmetic")


@proposes("Gather the results of the evaluation on the host")
def gather_on_host(remedy: Remedy, case: JudgedCase) -> Iterator[Proposal]:
    """Propose it if the failure came while an evaluation gathered its results."""
    analysis = case.context.analysis
    kept = None if analysis is None else analysis.gathered
    if kept is None or analysis is None or not case.is_allocator_case:
        return
    yield remedy.proposal(
        weight=Weight.CURES,
        change="call outputs.append(out.cpu()), or keep only the number that you need",
        why=f"{gathered_text(case.context, kept)}.",
        locations=kept_stack(case.context, kept),
        cost="A copy to the host for each batch; as much host memory.",
        saves_bytes=kept.survivor_bytes,
        attempts=without(kept) or _without_buffers(analysis.trace),
    )


def _without_buffers(trace: Trace) -> list[Attempt]:
    """Return the run without the buffers that grow by copies, as if they grew on the host."""
    asks = np.isin(trace.events.action, (Action.ALLOC, Action.OOM))
    asks &= np.isin(trace.events.stack, [b.stack for b in buffers_of(trace)])
    return [Attempt.of_edit(requests_removed(np.flatnonzero(asks), "buffers on the host"))]


# ---- from trial to trial ---------------------------------------------------------------------


@proposes("Free each trial's memory before the next one starts")
def free_between_trials(remedy: Remedy, case: JudgedCase) -> Iterator[Proposal]:
    """Propose it for trials in one process; processes that end leave nothing to free."""
    story = case.context.story
    if story is None or len(story.trials) < 2 or not case.is_allocator_case:
        return
    if has_process_each(story):
        return
    grown = accumulation(story)
    if grown is not None:
        why = growth_sentence(grown)
        weight = Weight.CURES if case.supports(Cause.LEAK) else Weight.HELPS
    else:
        why = "The log does not print what is allocated between trials, so it may grow."
        weight = Weight.MAY_HELP
    yield remedy.proposal(
        weight=weight,
        confidence=Confidence.LIKELY if grown is not None else Confidence.POSSIBLE,
        change="at the end of each trial, del model, optimizer, batch and loss, then call "
        "gc.collect() and torch.cuda.empty_cache()",
        why=why,
        cost="Milliseconds a trial.",
        caveats=FREEING,
    )
