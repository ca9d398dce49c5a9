"""FD401: memory from one line grows step by step and is not freed."""

from __future__ import annotations

from typing import Final

import numpy as np

from fragdoctor.analysis.owners import NamedBlocks, main_owner, named_blocks
from fragdoctor.analysis.result import Growth, IdleGraph, KeptKind, KeptMemory, KeptPattern
from fragdoctor.future.repetition import BoundedContainer
from fragdoctor.model.arrays import distinct, is_among
from fragdoctor.model.census import HoldingKind, Owner
from fragdoctor.model.finding import Confidence, Severity, in_bytes, line_text
from fragdoctor.model.snapshot import I64
from fragdoctor.rules.rule import Context, Findings, Found, rule
from fragdoctor.units import format_count, format_share, format_size, plural

MAX_LINES: Final = 5
"""The most lines to name; a leaked graph shows up as many lines of the model."""


@rule("FD401", Severity.ERROR)
def growing_line(context: Context) -> Findings:
    """Memory from one line grows step by step and is not freed.

    What it finds. Lines whose blocks of many different steps are all still live at the end.

    Why it costs memory. It grows until nothing is left, however large the device is.

    Evidence used. Allocation and free events with their stacks, cut into steps of the program.

    What to do. Keep loss.item() or tensor.detach().cpu() in place of tensors that carry a graph,
    clear lists and caches, evaluate under torch.no_grad(), release kept exceptions.

    What it can get wrong. A cache that fills on purpose grows too, until it is full. Short traces
    show too few steps to tell.

    Example. features.append(output) keeps 16 MiB a step.

    References. FAQ: My model reports "cuda runtime error(2)": don't accumulate history across your
    training loop.
    """
    analysis = context.need_trace()
    for growth in analysis.growth[:MAX_LINES]:
        stack = context.python_stack(growth.stack)
        line = context.frame(growth.frame) or (stack[0] if stack else None)
        leads = analysis.kept is not None and growth in analysis.kept.lines
        yield Found(
            f"{growth_text(context, growth)}.",
            severity=Severity.ERROR if leads else Severity.INFO,
            confidence=Confidence.LIKELY if leads else Confidence.POSSIBLE,
            n_bytes=growth.survivor_bytes,
            evidence=in_bytes(
                {"growth per step": growth.slope_bytes, "survivors": growth.survivor_bytes}, "trace"
            ),
            locations=stack or (() if line is None else (line,)),
        )


KIND_WORDS: Final = {
    KeptKind.ACTIVATION: ("activation", "activations"),
    KeptKind.LOSS: ("loss", "losses"),
    KeptKind.STATE: ("tensor of optimizer state", "tensors of optimizer state"),
    KeptKind.COPY: ("copy", "copies"),
    KeptKind.GRADIENT: ("result of the backward pass", "results of the backward pass"),
    KeptKind.TENSOR: ("tensor", "tensors"),
}


def made_text(context: Context, kept: KeptMemory) -> str:
    """Return what is kept, by the line that makes it, as part of a sentence."""
    what = "the models that" if kept.pattern is KeptPattern.MODELS else "what"
    return f"{what} {maker_text(context, kept)} makes"


def maker_text(context: Context, kept: Growth | KeptMemory) -> str:
    """Return the line that makes what grows, as part of a sentence."""
    return line_text(context.frame(kept.frame) or context.user_line(kept.stack))


def gathered_text(context: Context, kept: KeptMemory) -> str:
    """Return what the last evaluation gathers, as the beginning of a sentence."""
    owner = keeper(context, kept)
    keeps = "The evaluation" if owner is None else f"In the evaluation, {owner_name(owner)}"
    return (
        f"{keeps} keeps what {maker_text(context, kept)} makes: "
        f"{slope_text(kept)}, {_recorded_text(context, kept)}"
    )


def idle_graph_text(context: Context, graph: IdleGraph) -> str:
    """Return what an evaluation keeps in its graph, as the beginning of a sentence."""
    line = context.frame(graph.frame)
    where = "" if line is None else f" at {line_text(line)}"
    return (
        f"The model called{where} keeps {format_size(graph.n_bytes)} of results, "
        f"{format_share(graph.share, 1)} of what it makes, as much as a forward pass of training "
        f"({format_share(graph.usual_share, 1)}): it builds a graph, and most steps have no "
        "backward pass for that call"
    )


def keeper(context: Context, kept: KeptMemory) -> Owner | None:
    """Return who holds most of what grows according to a census, or None if unknown.

    If several names do, it is the one that holds what the line that is named makes.
    """
    if context.snapshot is None or context.analysis is None:
        return None
    table = context.snapshot.stacks
    places = np.flatnonzero(table.frames == kept.frame)
    through = distinct(np.searchsorted(table.offsets, places, "right") - 1)
    made = kept.rows[is_among(context.analysis.trace.lives.stack[kept.rows], through)]
    return holder_of(context, made if len(made) else kept.rows)


def holder_of(context: Context, rows: I64) -> Owner | None:
    """Return who holds most of some rows of ``Lives`` according to a census, or None."""
    a, named = context.analysis, _named(context)
    if a is None or named is None:
        return None
    return main_owner(named, rows, a.trace.lives.size_bytes[rows])


def filling_container(context: Context, kept: KeptMemory) -> BoundedContainer | None:
    """Return the container with a limit that holds what grows, or None if nothing bounds it."""
    named, owner = _named(context), keeper(context, kept)
    if named is None or owner is None or not owner.max_items or not owner.n_items:
        return None
    rows = np.flatnonzero(named.of_row == named.owners.index(owner))
    return BoundedContainer(rows, len(rows) * owner.max_items // owner.n_items)


def _named(context: Context) -> NamedBlocks | None:
    a = context.analysis
    return None if a is None else named_blocks(a.trace, context.case.censuses)


def owner_name(owner: Owner) -> str:
    """Return an owner's name with what it is, to begin a sentence."""
    if owner.kind is HoldingKind.CONTAINER and owner.n_items:
        return f"{owner.name} ({owner.class_name} of {format_count(owner.n_items)})"
    if owner.kind is HoldingKind.GRAPH:
        return f"The autograd graph of {owner.name}"
    if owner.kind is HoldingKind.CYCLE:
        return f"The reference cycle {owner.name}"
    return owner.name or f"A {owner.class_name}"


def slope_text(kept: KeptMemory) -> str:
    """Return how fast it grows."""
    return f"{format_size(kept.slope_bytes)} a {'batch' if kept.in_evaluation else 'step'}"


def growth_text(context: Context, kept: Growth | KeptMemory) -> str:
    """Return which line makes it, how fast it grows and how much is left, as a sentence."""
    blocks = plural(kept.n_survivors, "block")
    return (
        f"{maker_text(context, kept)} keeps {format_size(kept.slope_bytes)} more in each of "
        f"{rounds_text(kept)}: {blocks} of {format_size(kept.survivor_bytes)} "
        f"{'is' if kept.n_survivors == 1 else 'are'} live"
    )


def rounds_text(kept: Growth | KeptMemory) -> str:
    """Return in how many steps it grew, or in how many batches of an evaluation."""
    if kept.in_evaluation:
        return plural(kept.n_steps, "batch of the evaluation", "batches of the evaluation")
    return plural(kept.n_steps, "step")


def kept_text(context: Context, kept: KeptMemory) -> str:
    """Return what is kept and how it grows, as the beginning of a sentence."""
    kinds = ", ".join(plural(k.n_per_step, *KIND_WORDS[k.kind]) for k in kept.kinds[:3])
    within = context.line_of_library(kept.stack)
    where = "" if within is None else f", most in {line_text(within)}"
    owner = keeper(context, kept)
    keeps = "Something keeps" if owner is None else f"{owner_name(owner)} keeps"
    return (
        f"{keeps} {made_text(context, kept)}{where}: {kinds}, "
        f"{slope_text(kept)}, {_recorded_text(context, kept)}"
    )


def _recorded_text(context: Context, kept: KeptMemory) -> str:
    """Return how much was recorded of it; if the recording began later, there is more."""
    a = context.analysis
    when = "in the last" if a is not None and a.trace.is_cut else "after"
    return f"{format_size(kept.survivor_bytes)} {when} {rounds_text(kept)}"
