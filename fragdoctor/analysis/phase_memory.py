"""The phases of training on one device: their peaks, and what is held then and between steps."""

from __future__ import annotations

from typing import Final

import numpy as np
from msgspec.structs import replace

from fragdoctor.analysis.categories import LIKELY, Categories, sort_blocks
from fragdoctor.analysis.modules import UNTOLD, ModulePaths
from fragdoctor.analysis.result import PhaseAnalysis
from fragdoctor.future.passes import Passes, RoleRuns, find_passes, last_phase
from fragdoctor.future.steps import Steps
from fragdoctor.model.arrays import largest_groups, median, sum_by
from fragdoctor.model.finding import Confidence
from fragdoctor.model.phases import (
    Category,
    CategoryShare,
    LineBytes,
    PhaseFigures,
    PhaseReport,
    TrainingPhase,
)
from fragdoctor.model.snapshot import I64, Action
from fragdoctor.trace.lives import NEVER, Lives
from fragdoctor.trace.trace import Trace

MAX_LINES: Final = 5
MIN_LIKELY: Final = 0.9
"""Share of a category's bytes that must be likely for the whole category to be called likely."""

_ORDER: Final = (
    TrainingPhase.SETUP,
    TrainingPhase.FORWARD,
    TrainingPhase.BACKWARD,
    TrainingPhase.OPTIMIZER,
)
NO_STACKS: Final = "no stacks were recorded, so nothing tells the phases apart"
NO_TRAINING: Final = "no stack shows a backward pass or an optimizer step"


def find_phases(trace: Trace) -> PhaseAnalysis:
    """Return the phases of a device's trace and the categories of its memory."""
    runs = RoleRuns.of(trace)
    if runs is None:
        reason = NO_TRAINING if trace.stacks.roles.has_python else NO_STACKS
        return PhaseAnalysis(PhaseReport(trace.device, "none", reason))
    passes = find_passes(trace, runs, int(Steps.of(trace).rows[:1].sum()))
    end = end_of_work(trace, passes)
    lives = trace.lives.until(end)
    found = sort_blocks(lives, trace.stacks.roles, passes)
    # The parameters, gradients and optimizer state of modules are known where those were recorded.
    paths = ModulePaths.of(trace)
    sureness = np.where(paths.category == UNTOLD, found.sureness, LIKELY).astype(np.uint8)
    categories = Categories(paths.told(found.category), sureness)
    result = _summary(trace, passes, _Table(categories, lives, trace), end)
    if result.is_training.any():
        return result
    # The forward passes of a program that shows no training are not counted.
    phases = tuple(
        replace(p, n_passes=None) if p.phase == TrainingPhase.FORWARD else p
        for p in result.report.phases
    )
    return replace(result, report=replace(result.report, phases=phases, reason=NO_TRAINING))


class _Table:
    """What is allocated at a moment, by category."""

    def __init__(self, categories: Categories, lives: Lives, trace: Trace) -> None:
        self.categories, self.lives, self.snapshot = categories, lives, trace.snapshot
        self.frame = trace.stacks.lines_of(lives.stack)

    def at(self, k: int) -> tuple[CategoryShare, ...]:
        """Return the sums after k events, most bytes first."""
        rows = self.lives.allocated_at(k)
        kind, size = self.categories.category[rows], self.lives.size_bytes[rows]
        is_likely = self.categories.sureness[rows] == LIKELY
        likely = sum_by(kind[is_likely], size[is_likely], len(Category))
        sums = (column.tolist() for column in largest_groups(kind, size))
        return tuple(
            CategoryShare(
                category=Category(c),
                n_bytes=n_bytes,
                n_blocks=n_blocks,
                confidence=Confidence.LIKELY
                if likely[c] >= MIN_LIKELY * n_bytes
                else Confidence.POSSIBLE,
                lines=self._lines(rows[kind == c]),
            )
            for c, n_bytes, n_blocks in zip(*sums, strict=True)
        )

    def _lines(self, rows: I64) -> tuple[LineBytes, ...]:
        frames, n_bytes, _ = largest_groups(self.frame[rows], self.lives.size_bytes[rows])
        best = zip(frames[:MAX_LINES].tolist(), n_bytes[:MAX_LINES].tolist(), strict=True)
        return tuple(LineBytes(self.snapshot.location(frame), n) for frame, n in best)


def _summary(trace: Trace, passes: Passes, table: _Table, end: int | None) -> PhaseAnalysis:
    totals = trace.totals
    states = totals.allocated_bytes
    # A pass begins in the state that the pass before it left.
    peaks = np.maximum(
        np.maximum.reduceat(states[1:], passes.first[:-1]), states[passes.first[:-1]]
    )
    peak = totals.peak_allocated_state
    led_to_peak = TrainingPhase.UNKNOWN
    if peak:
        at = int(np.searchsorted(passes.first, peak - 1, side="right")) - 1
        led_to_peak = TrainingPhase(int(passes.label[at]))
    rest = _rest_state(passes, trace.n_events, end)
    report = PhaseReport(
        device=trace.device,
        method="stacks",
        phases=tuple(
            found
            for label in _ORDER
            if (found := _phase(label, passes, peaks, states, table)) is not None
        ),
        peak_phase=led_to_peak,
        peak_bytes=totals.peak_allocated_bytes,
        at_peak=table.at(peak),
        at_rest=() if rest is None else table.at(rest),
        rest_bytes=None if rest is None else int(states[rest]),
    )
    return PhaseAnalysis(report, passes.label, passes.first, table.categories.category)


def _phase(
    label: TrainingPhase, passes: Passes, peaks: I64, states: I64, table: _Table
) -> PhaseFigures | None:
    mine = np.flatnonzero(passes.label == label)
    if not len(mine):
        return None
    worst = int(mine[peaks[mine].argmax()])
    low, high = int(passes.first[worst]), int(passes.first[worst + 1])
    state = low + int(states[low : high + 1].argmax())
    return PhaseFigures(
        phase=label,
        n_passes=len(mine),
        median_peak_bytes=int(median(peaks[mine])),
        worst_peak_bytes=int(peaks[worst]),
        held=table.at(state),
    )


def _rest_state(passes: Passes, n_events: int, end: int | None) -> int | None:
    """Return the last moment between two steps, or None if the trace shows none.

    ``end`` is the state after which the program only frees memory.
    """
    label = passes.label
    ends = last_phase(label)
    if label[-1] == ends and not passes.is_cut:
        return n_events if end is None else end
    begins = np.flatnonzero((label[1:] == TrainingPhase.FORWARD) & (label[:-1] == ends)) + 1
    return int(passes.first[begins[-1]]) if len(begins) else None


# ---- where the work ends -------------------------------------------------------------------------


def end_of_work(trace: Trace, passes: Passes) -> int | None:
    """Return how many events come before the program only frees memory, or None.

    The program only frees after a failure that no allocation follows. It also does so if, after the
    last allocation, it frees a block from before the first step: that is the model, and the
    optimizer's state goes with it, maybe earlier.
    """
    lives = trace.lives
    if trace.n_until_unwound is not None:
        return trace.n_until_unwound
    rows = np.flatnonzero(trace.events.action == Action.ALLOC)
    last_allocation = int(rows[-1]) if len(rows) else -1
    forward = np.flatnonzero(passes.label == TrainingPhase.FORWARD)
    if last_allocation == -1 or not len(forward) or passes.label[0] != TrainingPhase.SETUP:
        return None
    first_step, last_step = (int(passes.first[at]) for at in (forward[0], forward[-1]))
    goes_late = (lives.free > last_allocation) & (lives.free != NEVER)
    goes_late &= lives.start >= 0
    if not (goes_late & (lives.start < first_step)).any():
        return None
    made_in = passes.label[passes.of_rows()[np.maximum(lives.start, 0)]]
    stays = (lives.start < first_step) | (made_in == TrainingPhase.OPTIMIZER)
    return int(lives.free[goes_late & stays & (lives.start < last_step)].min())
