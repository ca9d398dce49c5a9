"""Memory that grows step by step, traced back to what makes it.

What leaks is rarely the line that allocates: a kept loss keeps the activations of every layer. So
the growing lines of the same steps are taken together, and the line through which nearly all of
their bytes are made is looked for: the deepest one that their stacks share.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Final

import numpy as np

from fragdoctor.analysis.passes import BACKWARD, OPTIMIZER
from fragdoctor.analysis.result import DeviceAnalysis, Growth
from fragdoctor.model.snapshot import I32, I64, Snapshot
from fragdoctor.trace import stacks as roles_of
from fragdoctor.trace.code_owners import NATIVE, PACKAGE, TORCH, USER
from fragdoctor.trace.lives import NEVER
from fragdoctor.trace.stacks import LOSS
from fragdoctor.trace.trace import Trace

STEADY_SHARE: Final = 0.8
"""A leak grows in nearly every step; caches and warm-up stop after the first ones."""

MIN_STEPS: Final = 4
"""Fewer steps cannot distinguish growth from the filling of buffers and optimizer state."""

MANY_STEPS: Final = 8
"""Something kept every tenth step is a leak too, once it was seen often enough."""

LARGE_SHARE: Final = 0.05
"""Survivors of at least a twentieth of live memory: less is no reason for a verdict."""

SAME_STEPS: Final = 0.7
"""Lines that grow in as many steps as the leading one, or nearly, grow for the same reason."""

NEARLY_ALL: Final = 0.9
"""Share of the kept bytes that must be made through a line to name it."""

WHOLE_GRAPH: Final = 0.995
"""The same for a kept graph: the loss at its end is a small part of it, but the cause."""

MOST: Final = 0.5

GRAPH_BLOCKS: Final = 3
"""Results of operations that are kept together in one step: an autograd graph."""

MANY_SIZES: Final = 0.8
"""Share of blocks that are of a size of their own where a cache is keyed by shape."""

_COPIES: Final = re.compile(r"^(?:deepcopy|_deepcopy\w*|state_dict|load_state_dict|clone)$")
_NODE: Final = re.compile(r"(?:^|::)([A-Z]\w*Backward\d*|AccumulateGrad|CopySlices)(?:::|$|\()")


class Kind(StrEnum):
    """What a kept block is, as far as its stack shows."""

    ACTIVATION = "activation"
    LOSS = "loss"
    STATE = "optimizer state"
    COPY = "copy"
    GRADIENT = "result of the backward pass"
    TENSOR = "tensor"


class Pattern(StrEnum):
    """The usual ways in which memory is kept by mistake."""

    GRAPH = "graph"
    EVALUATION = "evaluation"
    RESULTS = "results"
    HOOK = "hook"
    COPIES = "copies"
    OPTIMIZER = "optimizer"
    GRADIENTS = "gradients"
    SHAPES = "shapes"
    TENSORS = "tensors"


@dataclass(frozen=True, slots=True)
class KeptKind:
    """Kept blocks of one kind: bytes in all, and how many a step."""

    kind: Kind
    n_per_step: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class KeptMemory:
    """What grows, and what makes it.

    Attributes:
        frame: frame id of the line through which nearly all of it is made; -1 where no stack says.
        stack: id of the stack that makes most of it.
        lines: the growing lines, most bytes first.
        kinds: most bytes first.
        pattern: what it looks like.
        n_steps: in which it grew, by ``slope_bytes`` each (median).
        survivor_bytes, n_survivors: all that is kept.
        node: autograd node that made it, "" where no C++ frame names one.
        forward_frame: for results of the backward pass the frame id of the forward line that the
            pass was working on, -1 where the order of events does not say.
    """

    frame: int
    stack: int
    lines: Sequence[Growth]
    kinds: Sequence[KeptKind]
    pattern: Pattern
    n_steps: int
    slope_bytes: int
    n_survivors: int
    survivor_bytes: int
    node: str = ""
    forward_frame: int = -1


def is_steady(growth: Growth) -> bool:
    """Return whether a line grows steadily and long enough to be called a leak."""
    is_regular = growth.steadiness >= STEADY_SHARE or growth.n_steps >= MANY_STEPS
    return is_regular and growth.n_steps >= MIN_STEPS


def is_significant(growth: Growth, analysis: DeviceAnalysis) -> bool:
    """Return whether a line's growth is steady, and large enough by itself for a verdict."""
    is_large = growth.survivor_bytes >= LARGE_SHARE * max(1, analysis.active_bytes)
    return is_steady(growth) and is_large


def find_kept(analysis: DeviceAnalysis) -> KeptMemory | None:
    """Return the growing memory that a verdict should be about; None where nothing leaks."""
    steady = [g for g in analysis.growth if is_steady(g)]
    if not steady:
        return None
    lead = max(steady, key=lambda g: g.survivor_bytes)
    lines = sorted(
        (g for g in analysis.growth if g is lead or _grows_along(g, lead)),
        key=lambda g: -g.survivor_bytes,
    )
    total = sum(g.survivor_bytes for g in lines)
    if total < LARGE_SHARE * max(1, analysis.active_bytes):
        return None
    return _traced(analysis, lead, lines)


def _grows_along(growth: Growth, lead: Growth) -> bool:
    low, high = sorted((growth.n_steps, lead.n_steps))
    overlap = min(growth.last_event, lead.last_event) - max(growth.first_event, lead.first_event)
    return low >= SAME_STEPS * high and overlap > 0


def _traced(analysis: DeviceAnalysis, lead: Growth, lines: Sequence[Growth]) -> KeptMemory:
    trace = analysis.trace
    rows = _survivors(trace, lines)
    stack, size = trace.lives.stack[rows], trace.lives.size_bytes[rows]
    kind = _kinds(trace, stack)
    n_steps = lead.n_steps
    kinds = []
    for one in Kind:
        chosen = kind == list(Kind).index(one)
        if chosen.any():
            n = max(1, round(int(chosen.sum()) / n_steps))
            kinds.append(KeptKind(one, n, int(size[chosen].sum())))
    kinds.sort(key=lambda k: -k.n_bytes)
    largest = int(_heaviest(stack, size)) if len(rows) else lead.stack
    pattern = _pattern(analysis, rows, kinds, n_steps)
    made, share = stack, NEARLY_ALL
    if pattern in (Pattern.GRAPH, Pattern.EVALUATION):
        is_result = np.isin(kind, (list(Kind).index(Kind.ACTIVATION), list(Kind).index(Kind.LOSS)))
        made, size, share = stack[is_result], size[is_result], WHOLE_GRAPH
    return KeptMemory(
        frame=_shared_frame(trace, made, size, share),
        stack=largest,
        lines=tuple(lines),
        kinds=tuple(kinds),
        pattern=pattern,
        n_steps=n_steps,
        slope_bytes=sum(g.slope_bytes for g in lines),
        n_survivors=sum(g.n_survivors for g in lines),
        survivor_bytes=sum(g.survivor_bytes for g in lines),
        node=_node(trace, largest),
        forward_frame=_forward_frame(trace, rows[stack == largest]),
    )


def _survivors(trace: Trace, lines: Sequence[Growth]) -> I64:
    """Return the lives that the growing lines made in the trace and that are still there."""
    lives = trace.lives
    rows = np.flatnonzero((lives.start >= 0) & (lives.free == NEVER))
    frame = trace.stacks.lines_of(lives.stack[rows])
    first = min(g.first_event for g in lines) - trace.first_row
    last = max(g.last_event for g in lines) - trace.first_row
    inside = (lives.start[rows] >= first) & (lives.start[rows] <= last)
    return rows[np.isin(frame, [g.frame for g in lines]) & inside]


def _heaviest(stack: I32, size: I64) -> int:
    ids, member = np.unique(stack, return_inverse=True)
    total = np.zeros(len(ids), np.int64)
    np.add.at(total, member.reshape(-1), size)
    return int(ids[total.argmax()])


def _kinds(trace: Trace, stack: I32) -> I64:
    """Return the place in ``Kind`` of each block, by the stack that made it."""
    roles, names = trace.stacks.roles, list(Kind)
    kind = np.full(len(stack), names.index(Kind.TENSOR), np.int64)
    kind[roles.in_module[stack]] = names.index(Kind.ACTIVATION)
    kind[trace.stacks.calls(LOSS)[stack]] = names.index(Kind.LOSS)
    kind[trace.stacks.calls(_COPIES)[stack]] = names.index(Kind.COPY)
    role = roles.role[stack]
    is_backward = np.isin(role, (roles_of.BACKWARD, roles_of.SILENT))
    kind[is_backward] = names.index(Kind.GRADIENT)
    kind[roles.in_step[stack] | roles.makes_state[stack]] = names.index(Kind.STATE)
    return kind


def _shared_frame(trace: Trace, stack: I32, size: I64, share: float) -> int:
    """Return the deepest user line through which a share of the bytes is made, -1 without one.

    Where several lines of one function make them, the one that makes most stands for it.
    """
    table, classes = trace.stacks.python, trace.stacks.classes
    ids, member = np.unique(stack[stack >= 0], return_inverse=True)
    weight = np.zeros(len(ids), np.int64)
    np.add.at(weight, member.reshape(-1), size[stack >= 0])
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
            here = _function(trace.snapshot, frame)
            alike = sum(w for f, w in total.items() if _function(trace.snapshot, f) == here)
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


def _function(snapshot: Snapshot, frame: int) -> tuple[str, str]:
    found = snapshot.frame(frame)
    return found.filename, found.name


def _pattern(
    analysis: DeviceAnalysis, rows: I64, kinds: Sequence[KeptKind], n_steps: int
) -> Pattern:
    """Return what the kept memory looks like."""
    trace = analysis.trace
    stack = trace.lives.stack[rows]
    total = max(1, sum(k.n_bytes for k in kinds))
    share = {k.kind: k.n_bytes / total for k in kinds}
    for kind, pattern in (
        (Kind.STATE, Pattern.OPTIMIZER),
        (Kind.COPY, Pattern.COPIES),
        (Kind.GRADIENT, Pattern.GRADIENTS),
    ):
        if share.get(kind, 0.0) >= MOST:
            return pattern
    results = share.get(Kind.ACTIVATION, 0.0) + share.get(Kind.LOSS, 0.0)
    if len(rows) >= GRAPH_BLOCKS * n_steps and results >= MOST:
        is_training = Kind.LOSS in share or _trains_meanwhile(analysis, rows)
        return Pattern.GRAPH if is_training else Pattern.EVALUATION
    sizes = trace.lives.requested_bytes[rows]
    if len(rows) >= MIN_STEPS and len(np.unique(sizes)) >= MANY_SIZES * len(rows):
        return Pattern.SHAPES
    if _is_hook(trace, _heaviest(stack, trace.lives.size_bytes[rows])) if len(rows) else False:
        return Pattern.HOOK
    return Pattern.RESULTS if results >= MOST else Pattern.TENSORS


def _trains_meanwhile(analysis: DeviceAnalysis, rows: I64) -> bool:
    """Return whether the program runs a backward pass or an optimizer while the memory grows."""
    phases, start = analysis.phases, analysis.trace.lives.start[rows]
    if phases is None or not len(phases.labels):
        return True
    first, end = int(start.min()), int(start.max())
    inside = (phases.first[1:] > first) & (phases.first[:-1] <= end)
    return bool(np.isin(phases.labels[inside], (BACKWARD, OPTIMIZER)).any())


def _is_hook(trace: Trace, stack: int) -> bool:
    """Return whether a stack's innermost user function was called by a module's machinery.

    A module calls ``forward`` and the hooks that are registered on it, nothing else.
    """
    table, classes, snapshot = trace.stacks.python, trace.stacks.classes, trace.snapshot
    if stack < 0:
        return False
    frames = table.frames[table.offsets[stack] : table.offsets[stack + 1]].tolist()
    for inner, outer in pairwise(frames):
        if classes[inner] in (USER, PACKAGE):
            caller, function = snapshot.frame(outer), snapshot.frame(inner).name
            is_called = caller.name in ("_call_impl", "inner", "__call__", "_slow_forward")
            return is_called and function not in ("forward", "_forward_unimplemented")
    return False


def _node(trace: Trace, stack: int) -> str:
    """Return the autograd node that a stack's C++ frames name, the innermost one."""
    if stack < 0:
        return ""
    classes = trace.stacks.classes
    table = trace.snapshot.stacks
    for frame in table.frames[table.offsets[stack] : table.offsets[stack + 1]].tolist():
        if classes[frame] == NATIVE:
            found = _NODE.search(trace.snapshot.frame(frame).name[:1000])
            if found:
                return found.group(1)
    return ""


def _forward_frame(trace: Trace, rows: I64) -> int:
    """Return the forward line that the backward pass worked on when it made some blocks.

    A node frees what it saved as soon as it has run: the next block of the forward pass that goes
    after a result was made belongs to the line that the result is the gradient of.
    """
    lives, lines = trace.lives, trace.stacks
    role = lines.roles.role[lives.stack[rows]]
    rows = rows[np.isin(role, (roles_of.BACKWARD, roles_of.SILENT))]
    saved = np.flatnonzero(lines.roles.in_module[lives.stack] & (lives.free >= 0))
    saved = saved[lives.free[saved] != NEVER]
    if not len(rows) or not len(saved):
        return -1
    saved = saved[np.argsort(lives.free[saved], kind="stable")]
    at = np.searchsorted(lives.free[saved], lives.start[rows])
    behind = saved[at[at < len(saved)]]
    frames, count = np.unique(lines.lines_of(lives.stack[behind]), return_counts=True)
    return int(frames[count.argmax()]) if len(frames) else -1
