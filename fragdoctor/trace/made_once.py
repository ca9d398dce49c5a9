"""What each parameter gets once, where layers come to train one after the other.

That is the optimizer's state of it, and an averaged copy. It is kept, but ends with the parameters.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from fragdoctor.frozen import frozen
from fragdoctor.model.arrays import distinct
from fragdoctor.model.snapshot import I64
from fragdoctor.trace import stacks as roles_of
from fragdoctor.trace.lives import NEVER
from fragdoctor.trace.trace import Trace

MAX_STATES: Final = 2
"""Tensors that an optimizer keeps of a parameter: the moments of Adam."""

MIN_SIZES: Final = 2
"""Sizes that the copies of weights have: one tensor a step may be anything."""

MIN_STEPS: Final = 3
"""Complete steps that must show what they keep."""

MOSTLY: Final = 0.9
"""Share of what steps keep that must be made once for the rest not to count."""


def is_made_once(trace: Trace, rows: I64) -> bool:
    """Return whether survivors belong to parameters, so that they end with these."""
    return _are_first_states(trace, rows) or _are_first_copies(trace, rows)


@frozen
class KeptOnce:
    """What steps keep of that kind.

    Attributes:
        bytes_per_step: by how much live memory rose in each recorded step.
        left_bytes: what may come yet; no more than that, as parameters may stay without.
    """

    bytes_per_step: int
    left_bytes: int

    def ends_within(self, n_steps: int, least_bytes: int) -> bool:
        """Return whether so many steps would keep more than may come, and more than so much."""
        return n_steps * self.bytes_per_step > max(self.left_bytes, least_bytes)

    @classmethod
    def of(cls, trace: Trace, steps: I64) -> KeptOnce | None:
        """Return what steps keep; None where that is anything else.

        Of the first step, which makes most of it, and of the last complete one, of which some is
        replaced, nothing is asked.

        Args:
            trace: of the device.
            steps: rows at which complete steps began, and the one under way.
        """
        if len(steps) < MIN_STEPS + 1:
            return None
        lives, roles = trace.lives, trace.stacks.roles
        low, high = int(steps[1]), int(steps[-2])
        kept = np.flatnonzero((lives.start >= low) & (lives.start < high) & (lives.free == NEVER))
        kept = kept[~np.isin(roles.role[lives.stack[kept]], (roles_of.BACKWARD, roles_of.SILENT))]
        is_state = roles.in_step[lives.stack[kept]]
        n_bytes, left = 0, 0
        for rows, most in ((kept[is_state], MAX_STATES), (kept[~is_state], 1)):
            if not len(rows) or not is_made_once(trace, rows):
                continue
            n_bytes += int(lives.size_bytes[rows].sum())
            weights, n_weights = np.unique(_weights(trace, rows), return_counts=True)
            is_layer = weights <= lives.requested_bytes[rows].max()  # no embedding, as a rule
            weights, n_weights = weights[is_layer], n_weights[is_layer]
            live = np.flatnonzero((lives.free == NEVER) & roles.in_step[lives.stack])
            there = lives.requested_bytes[live if most == MAX_STATES else rows]
            missing = np.maximum(most * n_weights - _n_of(there, weights), 0)
            left += int((missing * weights).sum())
        total = int(lives.size_bytes[kept].sum())
        if not total or n_bytes < MOSTLY * total:
            return None
        before, now = trace.totals.at([low, int(steps[-1])])[:, 0].astype(np.int64).tolist()
        return cls((now - before) // (len(steps) - 2), left)


def _are_first_states(trace: Trace, rows: I64) -> bool:
    """Return whether survivors are the optimizer's state of parameters that came to train late.

    There are at most ``MAX_STATES`` tensors for each live block of their size that no optimizer
    made, or of half their size: states may have twice the precision. Optimizers that are made anew
    while the old ones are kept leave more.
    """
    lives = trace.lives
    in_step = trace.stacks.roles.in_step
    if not in_step[lives.stack[rows]].all():
        return False
    live = np.flatnonzero(lives.free == NEVER)
    size, is_state = lives.requested_bytes[live], in_step[lives.stack[live]]
    sizes, n_states = np.unique(size[is_state], return_counts=True)
    others = size[~is_state]
    fits = n_states <= MAX_STATES * (_n_of(others, sizes) + _n_of(others, sizes // 2))
    return bool(fits[np.searchsorted(sizes, distinct(lives.requested_bytes[rows]))].all())


def are_copies_of_weights(trace: Trace, rows: I64) -> bool:
    """Return whether survivors have sizes of weights that were there before, and several of them.

    The state of a model may hold a weight twice, so that their number says nothing.
    """
    sizes = distinct(trace.lives.requested_bytes[rows])
    return len(sizes) >= MIN_SIZES and bool((_n_of(_weights(trace, rows), sizes) > 0).all())


def _are_first_copies(trace: Trace, rows: I64) -> bool:
    """Return whether survivors are copies of weights, at most one of each that was there before."""
    sizes, n_copies = np.unique(trace.lives.requested_bytes[rows], return_counts=True)
    fits = n_copies <= _n_of(_weights(trace, rows), sizes)
    return len(sizes) >= MIN_SIZES and bool(fits.all())


def _weights(trace: Trace, rows: I64) -> I64:
    """Return the sizes of what was live before some survivors, states and gradients apart."""
    lives, roles = trace.lives, trace.stacks.roles
    older = np.flatnonzero((lives.free == NEVER) & (lives.start < lives.start[rows].min()))
    stack = lives.stack[older]
    is_weight = ~roles.in_step[stack] & ~np.isin(stack, lives.stack[rows])
    is_weight &= ~np.isin(roles.role[stack], (roles_of.BACKWARD, roles_of.SILENT))
    return lives.requested_bytes[older[is_weight]]


def _n_of(among: I64, sizes: I64) -> I64:
    """Return how many blocks there are of each size."""
    ordered = np.sort(among)
    left = np.searchsorted(ordered, sizes, side="left")
    return np.searchsorted(ordered, sizes, side="right") - left
