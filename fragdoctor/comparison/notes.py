"""What could not be compared, and why: said once, plainly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fragdoctor.comparison.reading import Reading
from fragdoctor.model.comparison import Basis, Comparison, LineKind
from fragdoctor.units import format_count, format_size, plural

MAX_LENGTH_DIFFERENCE: Final = 0.1
"""Of the number of steps; less is how a run begins and ends."""


def find_notes(comparison: Comparison, readings: Sequence[Reading]) -> list[str]:
    """Return one sentence for each thing that a reader must know to trust the comparison."""
    runs = comparison.runs
    notes = []
    without = [r.letter for r in runs if not r.has_snapshot]
    if without:
        notes.append(
            f"{_names(without)} {_has(without)} no snapshot with memory in it: figures are "
            "compared, source lines cannot be."
        )
    no_trace = [r.letter for r in runs if r.has_snapshot and not r.has_trace]
    if no_trace and comparison.basis is Basis.NOW:
        notes.append(
            f"{_names(no_trace)} {_has(no_trace)} no trace: lines are compared by what is live "
            "now, not at the peak."
        )
    no_stacks = [r.letter for r in runs if r.has_snapshot and not r.has_stacks]
    if no_stacks:
        notes.append(
            f"{_names(no_stacks)} {_has(no_stacks)} no stacks: which line holds what is not known."
        )
    cut = [r.letter for r in runs if r.is_cut]
    if cut:
        notes.append(
            f"{_names(cut)} {_has(cut)} lost the beginning of the trace: a higher peak before it "
            "is not seen, and requests are not compared one by one."
        )
    if comparison.settings is None and not without:
        silent = [r.letter for r, own in zip(runs, readings, strict=True) if own.settings is None]
        notes.append(f"{_names(silent)} {_has(silent)} no settings recorded: they may differ.")
    n_merged = max((d.n_lines_merged for r in readings for d in r.devices.values()), default=0)
    if n_merged:
        notes.append(
            f"The {plural(n_merged, 'smallest line')} of a run are summed up, without a place."
        )
    notes += _order_notes(comparison)
    notes += _peak_notes(comparison)
    return notes


def _order_notes(comparison: Comparison) -> list[str]:
    """Return a warning where traces of one program seem not to be in time order."""
    trend = comparison.trend
    if trend is None or trend.unit == "step":
        return []
    counts = [r.n_steps or 0 for r in comparison.runs if not r.is_cut]
    if len(set(counts)) < len(comparison.runs) or 0 in counts or counts == sorted(counts):
        return []
    told = ", ".join(format_count(n) for n in counts[:10])
    text = f"The traces' step counts do not ascend ({told}): if it is one program, give the runs"
    return [f"{text} in time order, or --sort."]


def _peak_notes(comparison: Comparison) -> list[str]:
    figure = comparison.figure("peak_allocated")
    first, last = comparison.runs[0], comparison.runs[-1]
    notes = []
    if comparison.basis is Basis.PEAK and figure is not None and comparison.delta_bytes is not None:
        counted = figure.delta
        if counted is not None and counted != comparison.delta_bytes:
            notes.append(
                "memory_stats() counted a higher peak than a trace holds: lines explain the "
                f"traces' difference of {format_size(comparison.delta_bytes)}."
            )
    if first.has_stacks and last.has_stacks and _nothing_in_common(comparison):
        notes.append(
            "No source line of one run is in the other: these look like two different programs."
        )
    steps = (first.n_steps, last.n_steps)
    a, b = steps
    is_pair = len(comparison.runs) == 2
    if is_pair and a and b and abs(a - b) > max(1, MAX_LENGTH_DIFFERENCE * max(a, b)):
        notes.append(
            f"The traces are of different length: {format_count(a)} and {format_count(b)} steps."
        )
    return notes


def _nothing_in_common(comparison: Comparison) -> bool:
    placed = [c for c in comparison.lines if c.place is not None]
    kinds = {c.kind for c in placed}
    return kinds == {LineKind.NEW, LineKind.GONE}


def _names(letters: Sequence[str]) -> str:
    return letters[0] if len(letters) == 1 else f"{', '.join(letters[:-1])} and {letters[-1]}"


def _has(letters: Sequence[str]) -> str:
    return "has" if len(letters) == 1 else "have"
