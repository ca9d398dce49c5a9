"""Turns of optimizers: after how many runs of optimizers a training step is over.

A training step lasts from one run of the optimizer to the next and includes its micro-batches. If
optimizers take turns, as in a GAN, a step lasts until the same turn comes around again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Final

TURNS: Final = 0.7
"""Share of the optimizer's runs that must be like the run one period before.

It lies between 4/6, for a WGAN with five updates of its critic at a period of one (Gulrajani et
al., 2017), and 14/16, for lazy regularization in every sixteenth step (Karras et al., 2020).
"""


def period_of(turns: Sequence[Hashable]) -> int:
    """Return after how many runs of optimizers the turns come around again.

    The runs are treated as a ring, so two whole rounds say as much as many. If no round came twice,
    return the shortest period that nothing contradicts. If there is none, return all runs if the
    last run's turn is new, otherwise 1.

    Args:
        turns: for each run, in order, what distinguishes the optimizers.
    """
    n = len(turns)
    for period in range(1, n // 2 + 1):
        n_alike = sum(turns[i] == turns[i - period] for i in range(n))
        if n_alike >= TURNS * n:
            return period
    for period in range(1, n):
        if all(turns[i] == turns[i - period] for i in range(period, n)):
            return period
    return max(n, 1) if n and turns.index(turns[-1]) == n - 1 else 1


def whole_rounds(turns: Sequence[Hashable]) -> Sequence[Hashable]:
    """Return the turns, at least one, up to the last of the rarest turn: it ends a whole round."""
    n_of = Counter(turns)
    last = {turn: i for i, turn in enumerate(turns)}
    rarest = min(n_of, key=lambda turn: (n_of[turn], -last[turn]))
    return turns[: last[rarest] + 1]
