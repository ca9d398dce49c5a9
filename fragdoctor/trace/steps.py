"""Steps of a program (training iterations), found by allocation stacks that come back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fragdoctor.model.snapshot import I64, Action
from fragdoctor.trace.trace import Trace

MIN_STEPS = 2
# A step has more to it than one repeated request.
MIN_STACKS = 3
# Stacks of steps come back through the whole trace; those of set-up (a loop over layers) do not.
MIN_SPREAD = 0.4
# A new step begins where the opening stack stayed away for this share of its longest absence.
MIN_GAP = 0.25


@dataclass(frozen=True, slots=True)
class Steps:
    """Consecutive steps of a trace.

    Attributes:
        starts: ``int64[k]``, the event row at which each step begins, ascending; what comes before
            the first is set-up.
    """

    starts: I64

    def __len__(self) -> int:
        return len(self.starts)

    def of_rows(self, rows: I64) -> I64:
        """Return the step of each event row; -1 before the first."""
        return np.searchsorted(self.starts, rows, side="right").astype(np.int64) - 1


def find_steps(trace: Trace) -> Steps | None:
    """Return the steps of a trace; None where its stacks do not repeat or were not recorded.

    Within an iteration some stacks occur once (the loss, the embedding) and others many times
    (one per layer), so the least number of occurrences that several stacks share is the number of
    iterations, and the first of these stacks begins one. The last iteration may be incomplete: a
    stack near its beginning then counts one more than one near its end.
    """
    stack = trace.events.stack
    requests = np.nonzero((trace.events.action == Action.ALLOC) & (stack >= 0))[0]
    if not len(requests):
        return None
    ids, first, counts = np.unique(stack[requests], return_index=True, return_counts=True)
    last = len(requests) - 1 - np.unique(stack[requests][::-1], return_index=True)[1]
    is_spread = (counts >= MIN_STEPS) & (last - first >= MIN_SPREAD * len(requests))
    if int(is_spread.sum()) < MIN_STACKS:
        return None
    votes = np.bincount(counts[is_spread])
    votes[1:] += votes[:-1]  # n - 1 occurrences may be n, cut short
    n_steps = int(np.argmax(votes >= MIN_STACKS))
    if votes[n_steps] < MIN_STACKS:
        return None
    of_steps = is_spread & ((counts == n_steps) | (counts == n_steps - 1))
    candidates = np.nonzero(of_steps)[0]
    opening = ids[candidates[first[candidates].argmin()]]
    found = requests[stack[requests] == opening].astype(np.int64)
    # The stack may occur several times at the beginning of one step (inputs, then targets).
    gaps = np.diff(found)
    starts = found[np.concatenate(([True], gaps > MIN_GAP * gaps.max()))]
    return Steps(starts) if len(starts) >= MIN_STEPS else None
