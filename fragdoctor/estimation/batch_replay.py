"""The requests of several recordings, fitted one by one and replayed at other batch sizes.

Programs that differ in the batch only ask for the same things in the same order, and each request
is a constant plus a multiple of the batch. So the requests of one recording, with sizes computed
for another batch, are what the program would ask for there; the allocator model then says what it
reserves, and whether everything is served.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from fragdoctor.errors import FragdoctorError
from fragdoctor.estimation.batch_curves import F64
from fragdoctor.estimation.counterparts import Requests, counterparts, requests_of
from fragdoctor.estimation.recordings import Recording
from fragdoctor.model.batch_fit import ReplayCheck
from fragdoctor.model.simulation import ReplayResult
from fragdoctor.model.snapshot import Bools
from fragdoctor.trace.edits import Edit, batch_scaled
from fragdoctor.trace.operations import Operations, OpKind
from fragdoctor.trace.replay import Reproduction
from fragdoctor.trace.simulate import reproduce
from fragdoctor.trace.whatif import WhatIf, replay_what_if

MAX_BATCH_STEPS: Final = 2**20
MAX_OPERATIONS: Final = 40_000_000
ENDLESS: Final = 2**50
# A request counts as straight if the line misses no recording by more than this.
STRAIGHT_SHARE: Final = 0.01
MAX_UNMATCHED_SHARE: Final = 0.05
# Relative batches are known to this part of the smallest.
RELATIVE_STEP: Final = 0.05


class BatchReplay:
    """Replays one recording's requests at any batch size.

    ``method`` and ``unmatched_share``: see ``model.batch_fit.ReplayCheck``.
    """

    def __init__(
        self,
        recordings: Sequence[Recording],
        lines: Sequence[Reproduction],
        batches: Sequence[float],
    ) -> None:
        """Fit the requests.

        Args:
            recordings: at two or more batch sizes, none of which ran out of memory.
            lines: the reproduction of each.
            batches: of each.
        """
        base = max(range(len(lines)), key=lambda i: (_n_requests(lines[i]), batches[i]))
        self.reproduction: Reproduction = lines[base]
        self.base_batch = batches[base]
        self.n_operations = len(Operations.of(self.reproduction.operations))
        tables = [requests_of(r, b) for r, b in zip(recordings, lines, strict=True)]
        sizes = _matched(tables, base, batches)
        known, coefficients = _fitted(np.array(batches), sizes)
        weight = tables[base].size
        total = float(weight.sum()) or 1.0
        self.unmatched_share = float(weight[~known].sum()) / total
        self._position = tables[base].position
        self._known, self._coefficients = known, coefficients
        self.method = "fitted" if self.unmatched_share <= MAX_UNMATCHED_SHARE else "scaled"

    def edit(self, batch: float) -> Edit:
        """Return the change of the recorded requests to another batch size."""
        if self.method == "scaled":
            return batch_scaled(batch / self.base_batch)

        def change(_: Reproduction, ops: Operations) -> Operations:
            bend, slope, fixed = self._coefficients
            wanted = np.rint(bend * batch**2 + slope * batch + fixed)
            size = ops.size.copy()
            at = self._position[self._known]
            size[at] = np.clip(wanted[self._known], 1, ENDLESS).astype(np.uint64)
            return ops.with_size(size)

        return Edit(f"batch of {batch:g}", change)

    def run(self, batch: float, capacity_bytes: int = ENDLESS) -> ReplayResult:
        """Return what the allocator does at a batch size.

        Raises:
            ConfigError, SimulationError: the requests can only be scaled, and the trace has no
                steps or the factor is absurd.
        """
        what_if = WhatIf(capacity_bytes=capacity_bytes)
        return replay_what_if(self.reproduction, what_if, self.edit(batch).apply(self.reproduction))


def check_by_replay(
    recordings: Sequence[Recording],
    batches: Sequence[float],
    capacity_bytes: int | None,
    guess: float,
    *,
    is_relative: bool,
) -> ReplayCheck | str:
    """Return the largest batch that a replay serves, or why nothing was replayed.

    Args:
        recordings: none of which ran out of memory.
        batches: of each.
        capacity_bytes: what PyTorch can have; None asks only how exact the replay is.
        guess: where to begin to look for the largest.
        is_relative: whether batches are multiples of the smallest.
    """
    if sum(r.analysis.n_events for r in recordings) > MAX_OPERATIONS // 8:
        return "the traces are too long to be replayed many times"
    try:
        lines = [reproduce(r.analysis.trace) for r in recordings]
        replayed = BatchReplay(recordings, lines, batches)
        errors = [
            abs(replayed.run(b).peak_allocated_bytes / r.peaks[0] - 1)
            for r, b in zip(recordings, batches, strict=True)
        ]
        found: tuple[float | None, float | None, float | None] = (None, None, None)
        if capacity_bytes is not None:
            step = RELATIVE_STEP if is_relative else 1.0
            found = _largest(replayed, capacity_bytes, guess, step)
        peak = (
            None
            if found[0] in (None, math.inf)
            else replayed.run(found[0] or 0.0).peak_allocated_bytes
        )
        top = max(batches)
        beyond = [replayed.run(f * top).peak_allocated_bytes for f in (1, 2, 4)]
        left_out = _left_out_error(recordings, lines, batches)
    except FragdoctorError as e:
        return e.message
    return ReplayCheck(
        method=replayed.method,
        largest=found[0],
        largest_without_flush=found[1],
        ceiling=found[2],
        worst_error=max(errors),
        left_out_error=left_out,
        peak_bytes=peak,
        slopes_beyond=((beyond[1] - beyond[0]) / top, (beyond[2] - beyond[1]) / (2 * top)),
        unmatched_share=replayed.unmatched_share,
    )


def _left_out_error(
    recordings: Sequence[Recording], lines: Sequence[Reproduction], batches: Sequence[float]
) -> float | None:
    """Return how far the replay of the others misses the peak of the largest recording."""
    top = max(batches)
    kept = [i for i, b in enumerate(batches) if b < top]
    if len({batches[i] for i in kept}) < 2:
        return None
    others = BatchReplay(
        [recordings[i] for i in kept], [lines[i] for i in kept], [batches[i] for i in kept]
    )
    true = max(r.peaks[0] for r, b in zip(recordings, batches, strict=True) if b == top)
    return others.run(top).peak_allocated_bytes / true - 1


def _largest(
    replayed: BatchReplay, capacity: int, guess: float, step: float
) -> tuple[float | None, float | None, float | None]:
    results: dict[int, ReplayResult] = {}

    def at(n: int) -> ReplayResult:
        if n not in results:
            results[n] = replayed.run(n * step, capacity)
        return results[n]

    start = max(1, round(guess / step))
    return (
        _last(lambda n: at(n).fits, start, step),
        _last(lambda n: at(n).fits and at(n).retries == 0, start, step),
        _last(lambda n: replayed.run(n * step).peak_active_bytes <= capacity, start, step),
    )


def _last(holds: Callable[[int], bool], start: int, step: float) -> float | None:
    """Return the last number that a test holds for, by doubling and halving; inf = no end."""
    low, high = 0, start
    while holds(high):
        low, high = high, high * 2
        if high > MAX_BATCH_STEPS:
            return math.inf
    if low == 0:
        reach = start
        while reach > 1 and not holds(reach // 2):
            reach //= 2
        if reach <= 1:
            return None
        low, high = reach // 2, reach
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low * step


def _n_requests(reproduction: Reproduction) -> int:
    return int((Operations.of(reproduction.operations).kind == OpKind.MALLOC).sum())


def _matched(tables: Sequence[Requests], base: int, batches: Sequence[float]) -> F64:
    """Return the size of each request of the base in every recording; NaN where it has none."""
    own = tables[base]
    sizes = np.full((len(tables), len(own.key)), np.nan)
    for i, other in enumerate(tables):
        at = (
            np.arange(len(own.key))
            if i == base
            else counterparts(own, other, batches[base], batches[i])
        )
        found = at >= 0
        sizes[i, found] = other.size[at[found]]
    return sizes


def _fitted(batches: F64, sizes: F64) -> tuple[Bools, F64]:
    """Return which requests could be fitted, and bend, slope and constant of each (3 rows)."""
    known = ~np.isnan(sizes)
    b = np.where(known, batches[:, None], np.nan)
    n = known.sum(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        filled_b, filled_s = np.where(known, b, 0.0), np.where(known, sizes, 0.0)
        mean_b, mean_s = filled_b.sum(axis=0) / n, filled_s.sum(axis=0) / n
        away = np.where(known, b - mean_b, 0.0)
        spread = (away**2).sum(axis=0)
        slope = (away * np.where(known, sizes - mean_s, 0.0)).sum(axis=0) / spread
        fixed = mean_s - slope * mean_b
        residual = np.where(known, np.abs(sizes - fixed - slope * b), 0.0).max(axis=0)
    fits = spread > 0
    coefficients = np.stack([np.zeros_like(slope), slope, fixed])
    top = filled_s.max(axis=0)
    curved = fits & (residual > np.maximum(STRAIGHT_SHARE * top, 512.0)) & known.all(axis=0)
    if curved.any() and len(np.unique(batches)) > 2:
        parabola = np.polyfit(batches, sizes[:, curved], 2)
        bends_up = parabola[0] > 0
        chosen = np.flatnonzero(curved)[bends_up]
        coefficients[:, chosen] = parabola[:, bends_up]
    return fits, coefficients
