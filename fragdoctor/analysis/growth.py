"""Lines whose memory grows from step to step: what a leak looks like in a trace.

For each line, only blocks that outlive the next step count: activations, batches and whatever every
step replaces are freed by then. Nothing says which line made the blocks from before the recording;
if one of them is freed later and is as large as a line's blocks, it counts as that line's. The
memory held at the end of each step goes through the one test of growth (``trend.py``), in bytes and
in blocks, from the first step in which it rises. So a full window or cache counts as level, and so
does what only the first step makes; what grew once does not go on. Blocks that are replaced by
larger ones, such as keys and values, are buffers (``growing_buffers.py``).
"""

from __future__ import annotations

from typing import Final

import numpy as np
from msgspec import Struct

from fragdoctor.analysis.result import Growth
from fragdoctor.future.steps import Steps
from fragdoctor.model.arrays import distinct, largest_groups, sum_by
from fragdoctor.model.hooks import report_progress
from fragdoctor.model.snapshot import I32, I64, Bools
from fragdoctor.model.trend import MIN_POINTS, trend_of
from fragdoctor.trace.lives import NEVER, Lives
from fragdoctor.trace.trace import Trace
from fragdoctor.units import KIB

MIN_RISE_BYTES: Final = 64 * KIB
"""A smaller total rise does not matter for memory; PyTorch's small segments have 2 MiB."""

ALL_AT_ONCE: Final = 0.9
"""A rise in one step by more than this share of the whole rise is no growth from step to step: an
evaluation made it, and beside it a library its workspace."""

MAX_CANDIDATES: Final = 2000


class StepEnds(Struct, frozen=True):
    """The complete steps of a program: n steps between ``int64[n + 1]`` rows.

    With ``in_evaluation``, they are the batches of one evaluation.
    """

    rows: I64
    in_evaluation: bool = False

    @classmethod
    def of(cls, trace: Trace) -> StepEnds:
        """Return the training steps, or the steps of a program that does not train."""
        steps = Steps.of(trace)
        rows = steps.main_rows
        if len(rows) and steps.is_last_complete:
            rows = np.append(rows, trace.n_events)
        return cls(rows)

    def __len__(self) -> int:
        return max(len(self.rows) - 1, 0)

    def of_rows(self, rows: I32 | I64) -> I64:
        """Return the step of each event: -1 before the first, n after the last."""
        return np.searchsorted(self.rows, rows, side="right").astype(np.int64) - 1

    def end_of(self, rows: I32 | I64) -> I64:
        """Return the row at which each event's step ends; ``NEVER`` for an unfinished step."""
        step = self.of_rows(rows)
        return np.append(self.rows, NEVER)[np.minimum(step + 1, len(self.rows))].astype(np.int64)


def find_growth(trace: Trace, steps: StepEnds) -> tuple[Growth, ...]:
    """Return the lines whose memory grows from step to step, most bytes first."""
    n, lives = len(steps), trace.lives_of_program
    if n < 2:
        return ()
    report_progress("Analyzing: growth")
    # One group of blocks for each user line, and one for blocks without a line.
    group = trace.stacks.lines_of(lives.stack).astype(np.int64) + 1
    size = lives.size_bytes
    born, freed = steps.of_rows(lives.start), steps.of_rows(lives.free)
    freed = np.where(lives.free == NEVER, n, np.minimum(freed, n))
    passes = (born >= 0) & (freed == born)
    if 2 * len(distinct(born[passes & (born < n)])) < n:
        return ()  # a loop that frees nothing builds something; a working program also frees
    lasting = np.flatnonzero((born >= 0) & (born < n - 1) & (freed > born + 1))
    older = np.flatnonzero((born < 0) & (freed > 0) & (freed < n))
    goes_last = lasting[np.argsort(freed[lasting] < n, kind="stable")]
    of_older = _groups_of_sizes(size[older], size[goes_last], group[goes_last])
    candidates = _candidates(lives, group, lasting, freed == n, int(group.max(initial=0)) + 1)
    found = []
    for g in candidates.tolist():
        rows = lasting[group[lasting] == g]
        ends = np.append(rows, older[of_older == g])
        held = np.zeros((n + 1, 2), np.int64)
        np.add.at(held, born[rows] + 1, np.stack((size[rows], np.ones_like(rows)), axis=1))
        np.add.at(held, freed[ends], -np.stack((size[ends], np.ones_like(ends)), axis=1))
        n_bytes, n_blocks = held[:n].cumsum(axis=0).T
        growth = _growth(n_bytes)
        if growth is None or not trend_of(n_blocks).goes_on:
            continue
        slope, since = growth
        kept = np.flatnonzero((group == g) & (born >= since) & (born < n) & (lives.free == NEVER))
        if len(distinct(born[kept])) > 1:  # otherwise what grew was freed in the end
            found.append(_described(trace, steps, g - 1, kept, slope))
    return tuple(sorted(found, key=lambda growth: -growth.survivor_bytes))


def _groups_of_sizes(older: I64, size: I64, group: I64) -> I64:
    """Return the last group that makes each older block's size; -1 if no group makes it."""
    sizes, at = np.unique(np.append(size, older), return_inverse=True)
    group_of = np.full(len(sizes), -1, np.int64)
    group_of[at[: len(size)]] = group
    result: I64 = group_of[at[len(size) :]]
    return result


def _candidates(lives: Lives, group: I64, lasting: I64, is_left: Bools, n_groups: int) -> I64:
    """Return the groups that keep enough at the end, most bytes first."""
    left = lasting[is_left[lasting]]
    kept = sum_by(group[left], lives.size_bytes[left], n_groups)
    chosen = np.flatnonzero(kept >= MIN_RISE_BYTES)
    return chosen[np.argsort(-kept[chosen], kind="stable")][:MAX_CANDIDATES]


def _growth(held: I64) -> tuple[int, int] | None:
    """Return how many bytes a line grows per step, and since which step; None if it does not grow.

    ``held`` is how many bytes the line holds at the end of each step.
    """
    rises = np.diff(held)
    since = int(np.argmax(rises > 0))
    if 2 * rises[since] > held[-1] - held[since]:
        since += 1  # larger than all later rises: it is made once, such as an optimizer's state
    if len(held) - since < MIN_POINTS:
        return None
    trend, rise = trend_of(held[since:]), held[-1] - held[since]
    if not trend.goes_on or rise < MIN_RISE_BYTES or rises[since:].max() > ALL_AT_ONCE * rise:
        return None
    return int(trend.slope), since


def _described(trace: Trace, steps: StepEnds, frame: int, rows: I64, slope: int) -> Growth:
    lives = trace.lives_of_program
    return Growth(
        frame=frame,
        stack=int(largest_groups(lives.stack[rows], lives.size_bytes[rows]).group[0]),
        slope_bytes=slope,
        n_steps=len(distinct(steps.of_rows(lives.start[rows]))),
        n_survivors=len(rows),
        survivor_bytes=int(lives.size_bytes[rows].sum()),
        first_event=int(lives.start[rows].min()),
        last_event=int(lives.start[rows].max()),
        in_evaluation=steps.in_evaluation,
    )
