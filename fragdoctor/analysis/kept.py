"""Memory that grows step by step, traced back to what makes it.

The line that allocates is rarely the line that leaks: a kept loss keeps the activations of every
layer. So lines that grow in the same steps are taken together, and the search is for the deepest
line that their stacks share: the one through which nearly all of their bytes are made.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import numpy as np

from fragdoctor.analysis.growing_buffers import (
    MIN_BUFFER_GROWTH,
    buffers_of,
    is_input,
    requests_of,
)
from fragdoctor.analysis.growth import StepEnds
from fragdoctor.analysis.result import (
    Growth,
    IdleGraph,
    KeptBlocks,
    KeptKind,
    KeptMemory,
    KeptPattern,
    PhaseAnalysis,
)
from fragdoctor.future.passes import KEPT_SHARE, RoleRuns, kept_of
from fragdoctor.future.steps import StepKind, Steps
from fragdoctor.model.arrays import MOST, distinct, is_among, largest_groups, sum_by
from fragdoctor.model.snapshot import I32, I64, Action, StackTable
from fragdoctor.trace import stacks as roles_of
from fragdoctor.trace.lives import NEVER
from fragdoctor.trace.stacks import LOSS, PACKAGE, TORCH, USER
from fragdoctor.trace.trace import Trace

LARGE_SHARE: Final = 0.05
"""The share of live memory that survivors must have; less is no reason for a verdict. With 0.03,
four batches of a queue that fills are called a leak."""

NEARLY_ALL: Final = 0.995
"""Share of the kept bytes that must be made through a line to name it: the loss at the end of a
kept graph is a small part of it, but the cause."""

GRAPH_BLOCKS: Final = 3
"""Results that one step must keep together for them to count as an autograd graph."""

GRAPH_LINES: Final = 0.25
"""Smallest share of a model's lines whose results a graph keeps; usually it is most lines, but of a
recurrent cell on three lines it is one: the graph of a carried state keeps what tanh returns."""

MIN_SIZES: Final = 2
"""Fewest distinct sizes for copies of weights: one tensor per step may be anything."""

MAX_STATES: Final = 3
"""The most tensors of a weight's size that an optimizer keeps: Adam two, AMSGrad three (torch 2.13,
optim/adam.py)."""

MOST_OF_MODEL: Final = 2 + MAX_STATES
"""What a model holds at most, as a multiple of its weights: these, gradients and states."""

_COPIES: Final = re.compile(r"^(?:deepcopy|_deepcopy\w*|state_dict|load_state_dict|clone)$")


def find_kept(
    trace: Trace,
    steps: StepEnds,
    growth: Sequence[Growth],
    active_bytes: int,
    phases: PhaseAnalysis | None,
) -> KeptMemory | None:
    """Return the growing memory that a verdict should be about, or None if nothing leaks.

    Args:
        trace: trace of the device.
        steps: the steps over which memory grows.
        growth: the lines that grow.
        active_bytes: live memory at the end, before an exception lets go of it.
        phases: phases of the trace, or None if the file shows no passes.
    """
    least = LARGE_SHARE * max(1, active_bytes)
    if sum(g.survivor_bytes for g in growth) + _older_bytes(trace, growth) < least:
        return _growing_buffer(trace, steps, least)
    kept = _traced(trace, phases, growth, steps)
    # State for more and more weights is made as layers are unfrozen.
    thaws = kept.pattern is KeptPattern.OPTIMIZER and _are_of_weights(trace, kept.rows, MAX_STATES)
    return None if thaws else kept


def _growing_buffer(trace: Trace, steps: StepEnds, least_bytes: float) -> KeptMemory | None:
    """Return a buffer that a program grows by copies from step to step, or None.

    In a program that does not train, buffers that the model grows, or that grow side by side as
    keys and values do, are a KV cache, which ends with its request; they do not count.
    """
    lives = trace.lives_of_program
    trains = len(Steps.of(trace).of_kind(StepKind.TRAIN)) > 0
    in_module = trace.stacks.roles.in_module
    found = [
        (b, np.flatnonzero(np.isin(lives.start, b.row)))
        for b in buffers_of(trace)
        if len(distinct(steps.of_rows(b.row))) > MIN_BUFFER_GROWTH
        and (trains or (b.n_buffers == 1 and not in_module[b.stack]))
    ]
    for buffers, rows in found:
        is_batch = is_input(requests_of(trace), buffers, [b for b, _ in found])
        if buffers.total_bytes < least_bytes or is_batch:
            continue
        left = rows[lives.free[rows] == NEVER]
        kind = KeptKind(int(_kinds(trace, np.array([buffers.stack], np.int32))[0]))
        return KeptMemory(
            frame=int(trace.stacks.lines_of(np.array([buffers.stack], np.int32))[0]),
            stack=buffers.stack,
            lines=(),
            kinds=(KeptBlocks(kind, buffers.n_buffers, buffers.total_bytes),),
            pattern=KeptPattern.BUFFER,
            n_steps=len(buffers.row) // buffers.n_buffers - 1,
            slope_bytes=buffers.n_buffers * buffers.step_bytes,
            n_survivors=len(left),
            survivor_bytes=int(lives.size_bytes[left].sum()),
            rows=left,
            ends=steps.end_of(lives.start[left]),
            in_evaluation=steps.in_evaluation,
        )
    return None


# ---- what makes it ------------------------------------------------------------------------------


def _traced(
    trace: Trace, phases: PhaseAnalysis | None, lines: Sequence[Growth], steps: StepEnds
) -> KeptMemory:
    lead, rows = lines[0], survivors(trace, lines)
    stack, size = trace.lives_of_program.stack[rows], trace.lives_of_program.size_bytes[rows]
    kind = _kinds(trace, stack)
    n_steps = lead.n_steps
    sizes = distinct(trace.lives_of_program.requested_bytes[rows])
    if len(sizes) >= MIN_SIZES and _are_of_weights(trace, rows, n_steps):
        kind[kind == KeptKind.TENSOR] = KeptKind.COPY
    kinds = []
    for one in KeptKind:
        chosen = kind == one
        if chosen.any():
            n = max(1, round(int(chosen.sum()) / n_steps))
            kinds.append(KeptBlocks(one, n, int(size[chosen].sum())))
    kinds.sort(key=lambda k: -k.n_bytes)
    largest = int(largest_groups(stack, size).group[0]) if len(rows) else lead.stack
    pattern = _pattern(trace, phases, rows, kinds, n_steps)
    made = stack
    if pattern in (KeptPattern.GRAPH, KeptPattern.EVALUATION):
        is_result = np.isin(kind, (KeptKind.ACTIVATION, KeptKind.LOSS))
        made, size = stack[is_result], size[is_result]
    elif pattern is KeptPattern.MODELS:
        is_weight = trace.stacks.roles.makes_model[stack]
        made, size = stack[is_weight], size[is_weight]
    # The caller of a model holds what it returns, and chooses whether it builds a graph.
    is_of_caller = pattern is KeptPattern.EVALUATION
    is_of_caller |= pattern is KeptPattern.RESULTS and _are_returned(trace, rows)
    table = trace.stacks.outside if is_of_caller else trace.stacks.python
    survivor_bytes = sum(g.survivor_bytes for g in lines)
    return KeptMemory(
        frame=shared_frame(trace, table, made, size, NEARLY_ALL),
        stack=largest,
        lines=tuple(lines),
        kinds=tuple(kinds),
        pattern=pattern,
        n_steps=n_steps,
        slope_bytes=survivor_bytes // n_steps,
        n_survivors=sum(g.n_survivors for g in lines),
        survivor_bytes=survivor_bytes,
        rows=rows,
        ends=steps.end_of(trace.lives_of_program.start[rows]),
        in_evaluation=steps.in_evaluation,
    )


def _are_returned(trace: Trace, rows: I64) -> bool:
    """Return whether most survivors are the last thing that a call of a model makes.

    Survivors that the call makes earlier are kept by the model's own code, or by a hook.
    """
    in_module, lives = trace.stacks.roles.in_module, trace.lives_of_program
    made = np.flatnonzero(trace.events.action == Action.ALLOC)
    stack = trace.events.stack[made]
    place = np.where(in_module[stack], trace.stacks.places[stack], -1)
    begins = np.append(True, place[1:] != place[:-1])
    goes_on = ~begins & ~is_among(stack, distinct(stack[begins]))
    after = np.searchsorted(made, lives.start[rows], side="right")
    return bool(2 * np.count_nonzero(np.append(goes_on, False)[after]) < len(rows))


def _are_of_weights(trace: Trace, rows: I64, n_each: int) -> bool:
    """Return whether the blocks have sizes of older weights, at most so many for each of these."""
    sizes, count = np.unique(trace.lives_of_program.requested_bytes[rows], return_counts=True)
    weights = np.sort(_older_weights(trace, rows))
    n_weights = np.searchsorted(weights, sizes, "right") - np.searchsorted(weights, sizes)
    return bool((count <= n_each * n_weights).all())


def _older_weights(trace: Trace, rows: I64) -> I64:
    """Return the sizes of blocks that may be weights and that are older than some blocks."""
    lives, roles = trace.lives_of_program, trace.stacks.roles
    older = np.flatnonzero((lives.free == NEVER) & (lives.start < lives.start[rows].min()))
    stack = lives.stack[older]
    is_weight = ~roles.in_step[stack] & ~is_among(stack, lives.stack[rows])
    is_weight &= ~roles_of.is_backward(roles.role[stack])
    sizes: I64 = lives.requested_bytes[older[is_weight]]
    return sizes


def survivors(trace: Trace, lines: Sequence[Growth]) -> I64:
    """Return the rows of ``Lives`` that the growing lines made in the trace and never freed."""
    lives = trace.lives_of_program
    rows = np.flatnonzero((lives.start >= 0) & (lives.free == NEVER))
    frame = trace.stacks.lines_of(lives.stack[rows])
    first, last = min(g.first_event for g in lines), max(g.last_event for g in lines)
    inside = (lives.start[rows] >= first) & (lives.start[rows] <= last)
    return rows[np.isin(frame, [g.frame for g in lines]) & inside]


def _older_bytes(trace: Trace, lines: Sequence[Growth]) -> int:
    """Return the bytes of blocks from before the trace that were made as what grows now is."""
    lives = trace.lives_of_program
    older = np.flatnonzero((lives.start < 0) & (lives.free == NEVER) & (lives.stack >= 0))
    if not lines or not len(older):
        return 0
    made = distinct(lives.stack[survivors(trace, lines)])
    return int(lives.size_bytes[older[is_among(lives.stack[older], made)]].sum())


def _kinds(trace: Trace, stack: I32) -> I64:
    """Return the ``KeptKind`` of each block, by the stack that made it."""
    roles = trace.stacks.roles
    kind = np.full(len(stack), KeptKind.TENSOR, np.int64)
    kind[roles.in_module[stack]] = KeptKind.ACTIVATION
    kind[trace.stacks.calls(LOSS)[stack]] = KeptKind.LOSS
    kind[trace.stacks.calls(_COPIES)[stack]] = KeptKind.COPY
    kind[roles_of.is_backward(roles.role[stack])] = KeptKind.GRADIENT
    kind[roles.in_step[stack] | roles.makes_state[stack]] = KeptKind.STATE
    return kind


def shared_frame(trace: Trace, table: StackTable, stack: I32, size: I64, share: float) -> int:
    """Return the deepest user line through which a share of the bytes is made, or -1.

    If several lines of one function make that share, the line with the most bytes stands for them.

    Args:
        trace: trace of the device.
        table: the part of the stacks to look at.
        stack: stack of each block.
        size: bytes of each block.
        share: the required share of all bytes, from 0 to 1.
    """
    classes = trace.stacks.classes
    ids, member = np.unique(stack[stack >= 0], return_inverse=True)
    weight = sum_by(member.reshape(-1), size[stack >= 0], len(ids))
    paths = [
        table.frames[table.offsets[i] : table.offsets[i + 1]][::-1].tolist() for i in ids.tolist()
    ]
    left = [(path, int(w)) for path, w in zip(paths, weight.tolist(), strict=True) if path]
    wanted = share * sum(w for _, w in left)
    shared: list[int] = []
    while left:
        depth = len(shared)
        total: dict[int, int] = {}
        for path, w in left:
            if len(path) > depth:
                total[path[depth]] = total.get(path[depth], 0) + w
        if not total:
            break
        frame = max(total, key=lambda f: total[f])
        if total[frame] < wanted:
            functions = trace.stacks.functions
            alike = sum(w for f, w in total.items() if functions[f] == functions[frame])
            if alike >= wanted:
                shared.append(frame)
            break
        shared.append(frame)
        left = [(path, w) for path, w in left if len(path) > depth and path[depth] == frame]
    for owner in (USER, PACKAGE, TORCH):
        own = [f for f in shared if classes[f] == owner]
        if own:
            return own[-1]
    return -1


def _pattern(
    trace: Trace,
    phases: PhaseAnalysis | None,
    rows: I64,
    kinds: Sequence[KeptBlocks],
    n_steps: int,
) -> KeptPattern:
    """Return what the kept memory looks like."""
    total = max(1, sum(k.n_bytes for k in kinds))
    share = {k.kind: k.n_bytes / total for k in kinds}
    lives = trace.lives_of_program
    built = rows[trace.stacks.roles.makes_model[lives.stack[rows]]]
    if int(lives.size_bytes[built].sum()) * MOST_OF_MODEL >= total:
        return KeptPattern.MODELS
    for kind, pattern in (
        (KeptKind.STATE, KeptPattern.OPTIMIZER),
        (KeptKind.COPY, KeptPattern.COPIES),
        (KeptKind.GRADIENT, KeptPattern.GRADIENTS),
    ):
        if share.get(kind, 0.0) >= MOST:
            return pattern
    results = share.get(KeptKind.ACTIVATION, 0.0) + share.get(KeptKind.LOSS, 0.0)
    if len(rows) >= GRAPH_BLOCKS * n_steps and results >= MOST and _is_graph(trace, rows):
        trains = _trains_meanwhile(trace, phases, rows)
        return KeptPattern.GRAPH if trains else KeptPattern.EVALUATION
    sizes = lives.requested_bytes[rows]
    if len(rows) >= GRAPH_BLOCKS and len(distinct(sizes)) >= MOST * len(rows):
        return KeptPattern.SHAPES
    return KeptPattern.RESULTS if results >= MOST else KeptPattern.TENSORS


def _is_graph(trace: Trace, rows: I64) -> bool:
    """Return whether results from many lines of a model are kept, and as much as training keeps.

    Features, hidden states, keys and values come from only a few of its lines, or are little of
    what it makes.
    """
    lives, in_module = trace.lives_of_program, trace.stacks.roles.in_module
    inside = (lives.start >= lives.start[rows].min()) & (lives.start <= lives.start[rows].max())
    made = np.flatnonzero(inside & in_module[lives.stack])
    kept, lines = made[is_among(made, rows)], distinct(lives.stack[made])
    share = lives.size_bytes[kept].sum() / max(lives.size_bytes[made].sum(), 1)
    from_lines = int(is_among(lines, lives.stack[kept]).sum())
    return bool(share > KEPT_SHARE and from_lines >= GRAPH_LINES * len(lines))


def _trains_meanwhile(trace: Trace, phases: PhaseAnalysis | None, rows: I64) -> bool:
    """Return whether the program runs a backward pass or an optimizer while the memory grows."""
    start = trace.lives_of_program.start[rows]
    if phases is None or not len(phases.labels):
        return True
    first, end = int(start.min()), int(start.max())
    inside = (phases.first[1:] > first) & (phases.first[:-1] <= end)
    return bool(phases.is_training[inside].any())


def find_idle_graph(trace: Trace) -> IdleGraph | None:
    """Return the graph of the evaluation that failed, or None if it builds none that matters."""
    steps, runs = Steps.of(trace), RoleRuns.of(trace)
    is_evaluating = len(steps) > 1 and steps.kind[-1] == StepKind.EVALUATION
    if not is_evaluating or runs is None or not len(trace.oom_rows):
        return None
    trained = steps.of_kind(StepKind.TRAIN)
    backward = runs.first[runs.label == roles_of.BACKWARD]
    if not len(trained) or not (backward > trained[-1]).any():
        return None
    usual, _ = kept_of(trace, int(trained[-1]), int(backward[backward > trained[-1]][0]))
    failed = int(trace.oom_rows[-1])
    share, rows = kept_of(trace, int(steps.rows[-1]), failed)
    lives = trace.lives_of_program
    size = lives.size_bytes[rows]
    live_bytes = int(trace.totals.at([failed])[0, 0])
    if share < MOST * usual or not usual or size.sum() < LARGE_SHARE * live_bytes:
        return None
    called_at = shared_frame(trace, trace.stacks.outside, lives.stack[rows], size, MOST)
    return IdleGraph(called_at, int(size.sum()), share, usual)
