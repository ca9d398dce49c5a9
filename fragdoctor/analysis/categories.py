"""What each block is for, by the pass it was made in, the pass it was freed in, and its stack.

None of these decides alone: a block made by a backward pass is a gradient only if it outlives that
pass, and a block made by a forward pass is an activation only if a backward pass frees it. If the
trace ends before the block is freed, earlier blocks from the same stack decide; if there are none,
the category is marked as less sure, or unknown.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from fragdoctor.future.passes import NOT_REACHED, Passes
from fragdoctor.model.arrays import distinct, is_among, occurrence, sum_by
from fragdoctor.model.phases import Category, TrainingPhase
from fragdoctor.model.snapshot import U8, Bools
from fragdoctor.trace.lives import BEFORE, NEVER, Lives
from fragdoctor.trace.stacks import StackRoles

POSSIBLE, LIKELY = 0, 1


class Categories(Struct, frozen=True):
    """Category and sureness (``POSSIBLE`` or ``LIKELY``) of each block of ``Lives``."""

    category: U8
    sureness: U8


class _Sorter:
    """The blocks with the passes that made and freed them; the rules below fill in categories."""

    def __init__(self, lives: Lives, roles: StackRoles, passes: Passes) -> None:
        self.passes, self.roles = passes, roles
        self.requested, self.stack = lives.requested_bytes, lives.stack
        self.start, self.is_before = lives.start, lives.start == BEFORE
        self.is_alive = lives.free == NEVER
        of_row = passes.of_rows()
        n = len(of_row)
        self.n_passes = len(passes)
        self.born = of_row[np.clip(lives.start, 0, n - 1)].astype(np.int64)
        self.died = of_row[np.clip(lives.free, 0, n - 1)].astype(np.int64)
        self.died[self.is_alive] = self.n_passes
        self.died[lives.free == BEFORE] = -1
        self.label = passes.label[self.born]
        following = np.append(passes.next_backward(), NOT_REACHED)
        self.backward = following[np.minimum(self.born, self.n_passes)]
        self.second = following[np.minimum(self.backward, self.n_passes)]
        self.category = np.full(len(lives), Category.UNKNOWN, np.uint8)
        self.sureness = np.zeros(len(lives), np.uint8)
        # Blocks not freed in the trace: they wait for a backward pass, or outlived their own.
        self.is_open = np.zeros(len(lives), np.bool_)
        self.is_left = np.zeros(len(lives), np.bool_)

    def put(self, rows: Bools, category: int, sureness: int = LIKELY) -> None:
        """Set the category of blocks."""
        self.category[rows] = category
        self.sureness[rows] = sureness

    def made_in(self, label: int) -> Bools:
        """Return which blocks were made in passes with this label."""
        result: Bools = (self.label == label) & ~self.is_before
        return result


def sort_blocks(lives: Lives, roles: StackRoles, passes: Passes) -> Categories:
    """Return the category of every block of a device with known passes."""
    sorter = _Sorter(lives, roles, passes)
    made = sorter.made_in(TrainingPhase.SETUP)
    sorter.put(made & (sorter.died == sorter.born), Category.TEMPORARIES)
    sorter.put(made & (sorter.died > sorter.born), Category.KEPT, POSSIBLE)
    _sort_forward(sorter)
    if not (passes.label == TrainingPhase.BACKWARD).any():
        _sort_forward_alone(sorter)
    _sort_optimizer(sorter)
    _sort_model(sorter)
    _sort_backward(sorter)
    _sort_old(sorter)
    _ask_the_line(sorter)
    return Categories(sorter.category, sorter.sureness)


def _sort_model(s: _Sorter) -> None:
    """Find the parameters: made while a module is built, moved or loaded, and kept after that."""
    makes = s.roles.makes_model[s.stack]
    outlives = (s.died > s.backward) | (s.is_alive & (s.died > s.born))
    early = s.made_in(TrainingPhase.SETUP) | s.made_in(TrainingPhase.FORWARD)
    s.put(makes & early & outlives, Category.PARAMETERS)
    s.put(makes & early & ~outlives, Category.TEMPORARIES)


def _sort_forward(s: _Sorter) -> None:
    made = s.made_in(TrainingPhase.FORWARD)
    n = s.n_passes
    inputs = made & s.roles.by_user[s.stack] & ~s.roles.in_module[s.stack]
    inputs &= s.start < s.passes.first_module[s.born]
    inputs &= s.passes.first_module[s.born] != NOT_REACHED
    s.put(made, Category.KEPT, POSSIBLE)
    s.put(made & (s.died < s.backward), Category.TEMPORARIES)
    s.put(made & (s.died == s.backward), Category.ACTIVATIONS)
    # A variable of the loop (logits, loss, batch) is overwritten in the next step.
    late = made & (s.died > s.backward) & (s.backward != NOT_REACHED) & ~s.is_alive
    following = np.append(s.passes.next_backward(), NOT_REACHED)
    third = following[np.minimum(s.second, s.n_passes)]
    s.put(late & (s.died < third), Category.ACTIVATIONS, POSSIBLE)
    s.put(late & (s.died < s.second), Category.ACTIVATIONS)
    # Several backward passes in a row may need the same results (two networks, retain_graph).
    ends_in = s.passes.label[np.minimum(s.died, s.n_passes - 1)]
    s.put(late & (ends_in == TrainingPhase.BACKWARD), Category.ACTIVATIONS)
    s.put(inputs & (s.died > s.born) & ~s.is_alive, Category.INPUTS)
    waits = made & s.is_alive & (s.second >= n)
    s.put(waits, Category.ACTIVATIONS, POSSIBLE)
    is_over = s.backward < n - (1 if s.passes.is_cut else 0)
    s.put(waits & is_over, Category.KEPT, POSSIBLE)
    s.put(inputs & waits, Category.INPUTS)
    s.is_open |= waits & ~is_over & ~inputs
    s.is_left |= waits & is_over & ~inputs


def _sort_forward_alone(s: _Sorter) -> None:
    """Sort the blocks that are live at the end of a trace without any backward pass.

    In training these are a line's results; in inference, its caches. If a failure cut the trace and
    a line of the model freed at most half of what it made, its blocks count as activations.
    """
    made = s.made_in(TrainingPhase.FORWARD) & s.roles.in_module[s.stack]
    n_stacks = len(s.roles.role)
    lasts = made & s.is_alive
    total = sum_by(s.stack[made], s.requested[made], n_stacks)
    alive = sum_by(s.stack[lasts], s.requested[lasts], n_stacks)
    waits = s.made_in(TrainingPhase.FORWARD) & s.is_alive & (s.category != Category.INPUTS)
    s.put(waits, Category.UNKNOWN, POSSIBLE)
    if s.passes.is_cut:
        s.put(waits & made & (2 * alive >= total)[s.stack], Category.ACTIVATIONS, POSSIBLE)
    # Freed blocks may have been results or caches too: no backward pass marks when they should go.
    s.sureness[s.made_in(TrainingPhase.FORWARD) & (s.category == Category.TEMPORARIES)] = POSSIBLE
    s.is_open &= ~s.made_in(TrainingPhase.FORWARD)


def _sort_optimizer(s: _Sorter) -> None:
    made = s.made_in(TrainingPhase.OPTIMIZER)
    in_step, makes_state = s.roles.in_step[s.stack], s.roles.makes_state[s.stack]
    s.put(made & (s.died == s.born), Category.TEMPORARIES)
    stays = made & (s.died > s.born)
    s.put(stays, Category.KEPT, POSSIBLE)
    s.put(stays & ~in_step & ~s.is_alive, Category.TEMPORARIES, POSSIBLE)
    s.put(stays & in_step, Category.OPTIMIZER_STATE)
    if s.passes.is_cut:
        cut = stays & s.is_alive & (s.born == s.n_passes - 1) & ~makes_state
        s.put(cut, Category.TEMPORARIES, POSSIBLE)
        s.is_open |= cut
    # Some optimizers step inside the backward pass.
    s.put(s.made_in(TrainingPhase.BACKWARD) & in_step & (s.died > s.born), Category.OPTIMIZER_STATE)


def _sort_backward(s: _Sorter) -> None:
    made = s.made_in(TrainingPhase.BACKWARD) & ~s.roles.in_step[s.stack]
    recomputed = made & s.roles.recomputes[s.stack]
    s.put(made & (s.died == s.born), Category.TEMPORARIES)
    s.put(recomputed & (s.died == s.born), Category.ACTIVATIONS)
    outlives = made & (s.died > s.born)
    persists = (s.died > s.backward) | (s.is_alive & (s.backward < s.n_passes - 1))
    is_parameter, sureness = s.category == Category.PARAMETERS, LIKELY
    if not is_parameter.any():  # made by hand: take whatever was made before the first step
        is_parameter, sureness = (
            s.made_in(TrainingPhase.SETUP) & (s.category == Category.KEPT) & s.is_alive,
            POSSIBLE,
        )
    known = bool(is_parameter.any())
    fits = _fitting(s, outlives, persists, is_parameter) if known else outlives
    s.put(outlives, Category.GRADIENTS, POSSIBLE)
    s.put(outlives & fits, Category.GRADIENTS, sureness if known else POSSIBLE)
    if known:
        sizes = distinct(s.requested[is_parameter])
        other_dtype = is_among(s.requested, np.concatenate([sizes * 2, sizes // 2]))
        s.put(outlives & ~fits & ~other_dtype, Category.TEMPORARIES, POSSIBLE)
        s.put(outlives & ~fits & (persists | s.is_alive), Category.KEPT, POSSIBLE)
    else:
        ends_in = s.passes.label[np.minimum(s.died, s.n_passes - 1)]
        freed_by_step = ~s.is_alive & (ends_in != TrainingPhase.BACKWARD)
        s.put(outlives & persists & ~freed_by_step, Category.UNKNOWN, POSSIBLE)
    if s.passes.is_cut and s.passes.label[-1] == TrainingPhase.BACKWARD:
        cut = outlives & s.is_alive & (s.born == s.n_passes - 1)
        s.put(cut & ~fits, Category.TEMPORARIES, POSSIBLE)
        s.put(cut & recomputed, Category.ACTIVATIONS, POSSIBLE)
        s.put(cut & fits & ~recomputed, Category.GRADIENTS, POSSIBLE)


def _fitting(s: _Sorter, outlives: Bools, persists: Bools, is_parameter: Bools) -> Bools:
    """Return the blocks as large as a parameter; per pass, at most one for each parameter.

    If there are more (a workspace may have the same size by chance), the ones that persist and were
    made first are left out: a library makes its workspace before the first result.
    """
    sizes, wanted = np.unique(s.requested[is_parameter], return_counts=True)
    result: Bools = outlives & is_among(s.requested, sizes)
    rows = np.flatnonzero(result)
    if not len(rows):
        return result
    at = np.searchsorted(sizes, s.requested[rows])
    group = s.born[rows] * len(sizes) + at
    order = np.lexsort((-s.start[rows], persists[rows], group))
    rank = occurrence(group[order])
    result[rows[order[rank >= wanted[at[order]]]]] = False
    return result


def _sort_old(s: _Sorter) -> None:
    """Sort the blocks from before the recording: by stack if that is known, else by size."""
    old, alive = s.is_before, s.is_before & s.is_alive
    roles, stack = s.roles, s.stack
    s.put(old, Category.UNKNOWN, POSSIBLE)
    first_backward = np.flatnonzero(s.passes.label == TrainingPhase.BACKWARD)
    if len(first_backward):
        dies_there = old & (s.died == first_backward[0])
        s.put(
            dies_there & (s.passes.label[0] != TrainingPhase.BACKWARD),
            Category.ACTIVATIONS,
            POSSIBLE,
        )
    s.put(alive & (roles.in_step[stack] | roles.makes_state[stack]), Category.OPTIMIZER_STATE)
    s.put(alive & roles.makes_model[stack], Category.PARAMETERS)
    _match_sizes(s, alive & (s.category == Category.UNKNOWN))


def _match_sizes(s: _Sorter, old: Bools) -> None:
    """Tell old parameters from old optimizer state: one block per gradient size is a parameter.

    If one or two more blocks per parameter have its size, they are optimizer state (momentum;
    Adam).
    """
    grads = (s.category == Category.GRADIENTS) & ~s.is_before
    if not grads.any() or not old.any() or (s.category == Category.PARAMETERS).any():
        return
    # The gradients of the pass that makes the most of them.
    passes, n_made = np.unique(s.born[grads], return_counts=True)
    of_pass = grads & (s.born == passes[n_made.argmax()])
    sizes, wanted = np.unique(s.requested[of_pass], return_counts=True)
    rows = np.flatnonzero(old & is_among(s.requested, sizes))
    rows = rows[np.argsort(s.requested[rows], kind="stable")]
    at = np.searchsorted(sizes, s.requested[rows])
    have = np.bincount(at, minlength=len(sizes))
    rank = np.arange(len(rows)) - np.append(0, np.cumsum(have))[at]
    is_parameter = rank < wanted[at]
    s.category[rows[is_parameter]] = Category.PARAMETERS
    is_state = (have == 2 * wanted) | (have == 3 * wanted)
    s.category[rows[~is_parameter & is_state[at]]] = Category.OPTIMIZER_STATE


def _ask_the_line(s: _Sorter) -> None:
    """Give blocks not freed in the trace the category with the most bytes of the same stack."""
    is_open = s.is_open | s.is_left
    # What the last pass freed at once says nothing about what it has not freed yet.
    is_seen = ~is_open & ~s.is_before & (s.born < s.n_passes - 1) & (s.category != Category.UNKNOWN)
    _follow(s, s.is_open, is_seen)
    _follow(s, s.is_left, is_seen & (s.died > s.backward))


def _follow(s: _Sorter, rows: Bools, examples: Bools) -> None:
    open_rows = np.flatnonzero(rows & (s.stack >= 0))
    known = np.flatnonzero(examples & (s.stack >= 0))
    wanted = distinct(s.stack[open_rows])
    known = known[np.isin(s.stack[known], wanted)]
    if not len(known):
        return
    table = np.zeros((len(wanted), len(Category)), np.int64)
    np.add.at(
        table, (np.searchsorted(wanted, s.stack[known]), s.category[known]), s.requested[known]
    )
    at = np.searchsorted(wanted, s.stack[open_rows])
    told = table[at].max(axis=1) > 0
    s.category[open_rows[told]] = table[at[told]].argmax(axis=1).astype(np.uint8)
    s.sureness[open_rows[told]] = LIKELY
