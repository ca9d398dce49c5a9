"""What each block is for, by the pass it was made in, the pass it was freed in, and its stack.

Neither alone decides: a block made by a backward pass is a gradient only if it outlives that pass,
and one made by a forward pass is an activation only if a backward pass frees it. Where the trace
ends too early to see it, what the same line made before decides; else the answer is marked as less
sure, or unknown.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from msgspec import Struct

from fragdoctor.future.passes import NOT_REACHED, Passes
from fragdoctor.model.arrays import distinct, is_among, occurrence, sum_by
from fragdoctor.model.phases import Category, TrainingPhase
from fragdoctor.model.snapshot import I64, U8, Bools
from fragdoctor.trace.lives import BEFORE, NEVER, Lives
from fragdoctor.trace.stacks import StackRoles

POSSIBLE, LIKELY = 0, 1
# Share of the bytes of gradients that older blocks must match to count as their parameters.
MIN_MATCH: Final = 0.9


class Categories(Struct, frozen=True):
    """Category and sureness (``POSSIBLE``, ``LIKELY``) of each block of ``Lives``."""

    category: U8
    sureness: U8


class _Sorter:
    """The blocks with the passes of their birth and death; rules fill in the categories."""

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
        following = np.append(passes.next_of(TrainingPhase.BACKWARD), NOT_REACHED)
        self.backward = following[np.minimum(self.born, self.n_passes)]
        self.second = following[np.minimum(self.backward, self.n_passes)]
        self.category = np.full(len(lives), Category.UNKNOWN, np.uint8)
        self.sureness = np.zeros(len(lives), np.uint8)
        # Blocks whose end is not seen: they wait for a backward pass, or for what follows it.
        self.is_open = np.zeros(len(lives), np.bool_)
        self.is_left = np.zeros(len(lives), np.bool_)

    def put(self, rows: Bools, category: int, sureness: int = LIKELY) -> None:
        """Set the category of blocks."""
        self.category[rows] = category
        self.sureness[rows] = sureness

    def made_in(self, label: int) -> Bools:
        """Return which blocks a kind of pass made."""
        result: Bools = (self.label == label) & ~self.is_before
        return result


def sort_blocks(lives: Lives, roles: StackRoles, passes: Passes) -> Categories:
    """Return the category of every block of a device with known passes."""
    sorter = _Sorter(lives, roles, passes)
    _sort_setup(sorter)
    _sort_forward(sorter)
    if not (passes.label == TrainingPhase.BACKWARD).any():
        _sort_forward_alone(sorter)
    _sort_optimizer(sorter)
    _sort_model(sorter)
    _sort_backward(sorter)
    _sort_old(sorter)
    _ask_the_line(sorter)
    return Categories(sorter.category, sorter.sureness)


def _sort_setup(s: _Sorter) -> None:
    made = s.made_in(TrainingPhase.SETUP)
    s.put(made & (s.died == s.born), Category.TEMPORARIES)
    s.put(made & (s.died > s.born), Category.KEPT, POSSIBLE)


def _sort_model(s: _Sorter) -> None:
    """Find the parameters: made while a module is built, moved or loaded, and there to stay."""
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
    # A variable of the loop (logits, loss, batch) is overwritten by the next step.
    late = made & (s.died > s.backward) & (s.backward != NOT_REACHED) & ~s.is_alive
    following = np.append(s.passes.next_of(TrainingPhase.BACKWARD), NOT_REACHED)
    third = following[np.minimum(s.second, s.n_passes)]
    s.put(late & (s.died < third), Category.ACTIVATIONS, POSSIBLE)
    s.put(late & (s.died < s.second), Category.ACTIVATIONS)
    # One loss after another may need the same results (two networks, retain_graph).
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
    """Sort what waits at the end of a trace without any backward pass.

    In training a line's results wait, in inference its caches do. Where a failure cut the trace
    and a line of the model freed little of what it made, they are likely to be activations.
    """
    made = s.made_in(TrainingPhase.FORWARD) & s.roles.in_module[s.stack]
    n_stacks = len(s.roles.role)
    total, alive = np.zeros(n_stacks, np.int64), np.zeros(n_stacks, np.int64)
    np.add.at(total, s.stack[made], s.requested[made])
    np.add.at(alive, s.stack[made & s.is_alive], s.requested[made & s.is_alive])
    waits = s.made_in(TrainingPhase.FORWARD) & s.is_alive & (s.category != Category.INPUTS)
    s.put(waits, Category.UNKNOWN, POSSIBLE)
    if s.passes.is_cut:
        s.put(waits & made & (2 * alive >= total)[s.stack], Category.ACTIVATIONS, POSSIBLE)
    # What is freed in the end may as well have been a result or a cache: no pass marks its time.
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
    # An optimizer that steps inside the backward pass.
    s.put(s.made_in(TrainingPhase.BACKWARD) & in_step & (s.died > s.born), Category.OPTIMIZER_STATE)


def _sort_backward(s: _Sorter) -> None:
    made = s.made_in(TrainingPhase.BACKWARD) & ~s.roles.in_step[s.stack]
    recomputed = made & s.roles.recomputes[s.stack]
    s.put(made & (s.died == s.born), Category.TEMPORARIES)
    s.put(recomputed & (s.died == s.born), Category.ACTIVATIONS)
    outlives = made & (s.died > s.born)
    persists = (s.died > s.backward) | (s.is_alive & (s.backward < s.n_passes - 1))
    is_parameter, sureness = s.category == Category.PARAMETERS, LIKELY
    if not is_parameter.any():  # made by hand: whatever is there from before the first step
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
    """Return which blocks are as large as a parameter, no more of a size than there are parameters.

    Of more (a workspace of the same size by chance) those that persist and were made first are not
    gradients: a library makes its workspace before the first result.
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
    """Sort what was there before the recording: by its stack if that is known, else by size."""
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
    """Tell old parameters from old optimizer state: one block of a gradient's size is a parameter.

    Only where all gradients of a backward pass have their match; of the others with these sizes a
    multiple of one or two per parameter is state (momentum; Adam).
    """
    grads = (s.category == Category.GRADIENTS) & ~s.is_before
    if not grads.any() or not old.any() or (s.category == Category.PARAMETERS).any():
        return
    sizes, wanted = sizes_of_pass(s.requested[grads], s.born[grads])
    rows = np.flatnonzero(old & is_among(s.requested, sizes))
    rows = rows[np.argsort(s.requested[rows], kind="stable")]
    at = np.searchsorted(sizes, s.requested[rows])
    have = np.bincount(at, minlength=len(sizes))
    is_matched = have >= wanted
    total = int((sizes * wanted).sum())
    if int((sizes * wanted)[is_matched].sum()) < MIN_MATCH * total:
        return
    rank = np.arange(len(rows)) - np.append(0, np.cumsum(have))[at]
    is_parameter = rank < wanted[at]
    s.category[rows[is_parameter]] = Category.PARAMETERS
    spare = have - wanted
    times = spare / np.maximum(wanted, 1)
    agrees = (times == 1) | (times == 2)
    if int((sizes * wanted)[agrees].sum()) >= MIN_MATCH * total:
        s.category[rows[~is_parameter & agrees[at]]] = Category.OPTIMIZER_STATE


def sizes_of_pass(size: I64, born: I64) -> tuple[I64, I64]:
    """Return the sizes of gradients, and how many the pass that makes most of them has of each.

    ``size`` and ``born`` have the size of each gradient and the pass that makes it.
    """
    passes, n_made = np.unique(born, return_counts=True)
    return np.unique(size[born == passes[n_made.argmax()]], return_counts=True)


def _ask_the_line(s: _Sorter) -> None:
    """Give blocks whose end is not seen what most bytes of the same stack turned out to be."""
    is_open = s.is_open | s.is_left
    # What the last pass freed at once says nothing of what it has not freed yet.
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


def sums_at(categories: Categories, size: I64, rows: I64) -> tuple[I64, I64, I64]:
    """Return (bytes, number of blocks, bytes that are likely) of each category among rows."""
    kind = categories.category[rows]
    likely = rows[categories.sureness[rows] == LIKELY]
    n_bytes = sum_by(kind, size[rows], len(Category))
    sure = sum_by(categories.category[likely], size[likely], len(Category))
    return n_bytes, np.bincount(kind, minlength=len(Category)), sure
