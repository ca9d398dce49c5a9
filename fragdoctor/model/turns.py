"""Turns of optimizers: after how many runs a training step is over.

A step of training lasts from one run of the optimizer to the next, micro-batches inside. Where
optimizers take turns, as in a GAN, it lasts until they come round again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Final

TURNS: Final = 0.7
"""Share of the optimizer's runs that must be like the run one period before.

Between 4/6, what a WGAN with five updates of its critic has at a period of one (Gulrajani et al.,
2017), and 14/16, what lazy regularization in every sixteenth step has (Karras et al., 2020).
"""


def period_of(turns: Sequence[Hashable]) -> int:
    """Return after how many runs of the optimizer they come round again.

    The runs are taken as a ring, so that two whole rounds say what many do. Where none came round
    twice, the least that nothing contradicts; all of them, if the last one had not come before.

    Args:
        turns: what tells runs of different optimizers apart, one a run, in order.
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
    """Return the turns (one at least) up to the last one of the rarest: it ends a whole round."""
    n_of = Counter(turns)
    last = {turn: i for i, turn in enumerate(turns)}
    rarest = min(n_of, key=lambda turn: (n_of[turn], -last[turn]))
    return turns[: last[rarest] + 1]
