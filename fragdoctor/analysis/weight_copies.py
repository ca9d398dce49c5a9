"""Weights that are held twice: a copy of the model, or an old model next to its successor.

Hardly anything else has the same combination of sizes as the tensors of a model. If another line
made blocks in the same sizes, as many of each or several times as many, they are copies: moving
averages, a best state, a checkpoint on the GPU with its optimizer's state. If one line made all of
them several times, with work in between, a model was built again while the old one was still held.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

import numpy as np
from msgspec import Struct

from fragdoctor.analysis.kept import MIN_SIZES
from fragdoctor.analysis.result import PhaseAnalysis
from fragdoctor.model.arrays import MOST, distinct, is_among
from fragdoctor.model.phases import Category
from fragdoctor.model.snapshot import I64, Action, Bools
from fragdoctor.trace import stacks as roles_of
from fragdoctor.trace.trace import Trace

MIN_BLOCKS: Final = 4

SAME_SHARE: Final = 0.9
"""Share of the model's blocks, and of all bytes, that must match: buffers may be missing."""

STATES: Final = 2
"""The most optimizer states per weight; if there are more, both networks are trained."""


class WeightCopies(Struct, frozen=True):
    """The blocks of weights that are held in addition to the model's.

    Attributes:
        rows: rows of ``Lives``, ascending; an old model's include gradients and optimizer state.
        n_bytes: bytes of all these blocks.
        stack: stack of the largest weight.
        freed_row: event before which an old model could have been freed; None for a copy, which
            need not be made on the GPU at all.
    """

    rows: I64
    n_bytes: int
    stack: int
    freed_row: int | None


def find_weight_copies(
    trace: Trace, phases: PhaseAnalysis | None, state: int
) -> WeightCopies | None:
    """Return the most weights held twice after ``state`` events, or None; old models come first."""
    lives, roles = trace.lives, trace.stacks.roles
    live = lives.allocated_at(state)
    stack = lives.stack[live]
    may_be = (stack >= 0) & ~roles.in_module[stack] & ~roles.in_step[stack]
    may_be &= ~roles.makes_state[stack]
    may_be &= ~np.isin(roles.role[stack], (roles_of.BACKWARD, roles_of.SILENT, roles_of.OPTIMIZER))
    is_weight = roles.makes_model[lives.stack]
    if phases is not None and len(phases.category) == len(lives):
        is_other = np.isin(phases.category, (Category.GRADIENTS, Category.OPTIMIZER_STATE))
        may_be &= ~is_other[live]
        is_weight |= phases.category == Category.PARAMETERS
    rows = live[may_be]
    rows = rows[np.argsort(lives.start[rows], kind="stable")]
    old = _old_model(trace, rows, live, is_weight)
    state_bytes = lives.requested_bytes[live[roles.makes_state[stack]]]
    made = np.flatnonzero(trace.events.action[:state] == Action.ALLOC)
    last = int(made[-1]) if len(made) else -1
    return old if old is not None else _copy(trace, rows, is_weight, state_bytes, last)


def _groups(trace: Trace, rows: I64) -> list[I64]:
    """Return the rows grouped by the user's line that made them."""
    frame = trace.stacks.lines_of(trace.lives.stack[rows])
    ids, member = np.unique(frame, return_inverse=True)
    groups = [rows[member.reshape(-1) == i] for i in range(len(ids))]
    return [group for group in groups if len(group) >= MIN_BLOCKS]


def _copy(
    trace: Trace, rows: I64, is_weight: Bools, state_bytes: I64, last: int
) -> WeightCopies | None:
    """Return a line's blocks that have the same sizes as a model that another line made.

    If the copy was still being made at the end, so that one of its blocks is the ``last`` one that
    was allocated, its sizes are those that the model begins with, in the same order.
    """
    size = trace.lives.requested_bytes
    found: list[WeightCopies] = []
    # If two groups may both be the model, the later one is the copy.
    groups = sorted(_groups(trace, rows), key=lambda g: (-is_weight[g].mean(), g[0]))
    for i, model in enumerate(groups):
        if is_weight[model].mean() < MOST:
            break
        n_states = int(is_among(state_bytes, size[model]).sum())
        if n_states > STATES * len(model):
            continue
        for group in groups[i + 1 :]:
            begins = np.array_equal(size[model[: len(group)]], size[group])
            is_begun = begins and int(trace.lives.start[group[-1]]) == last
            is_begun &= len(distinct(size[group])) >= MIN_SIZES
            n_copies = round(int(size[group].sum()) / int(size[model].sum()))
            if is_begun or _are_alike(np.tile(size[model], n_copies), size[group]):
                found.append(_found(trace, group, group, None))
    return max(found, key=lambda one: one.n_bytes, default=None)


def _old_model(trace: Trace, rows: I64, live: I64, is_weight: Bools) -> WeightCopies | None:
    """Return what is left of the models that a line made before the last one."""
    start, size = trace.lives.start, trace.lives.requested_bytes
    found: list[WeightCopies] = []
    for group in _groups(trace, rows):
        *earlier, last = _turns(trace, group)
        old = [turn for turn in earlier if _are_alike(size[turn], size[last])]
        if not old or is_weight[group].mean() < MOST:
            continue
        begin, end = int(start[old[0][0]]), int(start[last[0]])
        inside = (start[live] >= begin) & (start[live] < end)
        found.append(_found(trace, live[inside], np.concatenate(old), end))
    return max(found, key=lambda one: one.n_bytes, default=None)


def _turns(trace: Trace, group: I64) -> list[I64]:
    """Return a line's blocks, split wherever a module was called in between."""
    called = trace.module_rows
    turn = np.searchsorted(called, trace.lives.start[group])
    return np.split(group, np.flatnonzero(np.diff(turn)) + 1)


def _are_alike(one: I64, other: I64) -> bool:
    """Return whether two groups of blocks have the same sizes, as many of each.

    A network and its mirror (an autoencoder, a generator and its critic) share only large sizes.
    The other may have small blocks besides, such as the step numbers in an optimizer's state.
    """
    both = Counter(one.tolist()) & Counter(other.tolist())
    n, n_bytes = both.total(), sum(size * n for size, n in both.items())
    are_as_many = n >= SAME_SHARE * len(one)
    are_as_large = n_bytes >= SAME_SHARE * max(int(one.sum()), int(other.sum()))
    return len(both) >= MIN_SIZES and are_as_many and are_as_large


def _found(trace: Trace, rows: I64, weights: I64, freed_row: int | None) -> WeightCopies:
    size = trace.lives.size_bytes
    return WeightCopies(
        rows=np.sort(rows),
        n_bytes=int(size[rows].sum()),
        stack=int(trace.lives.stack[weights[int(size[weights].argmax())]]),
        freed_row=freed_row,
    )
