"""The answer in a few sentences: how much, which line, which change, what remains open."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fragdoctor.comparison.compared_run import ComparedRun
from fragdoctor.comparison.settings_proof import SAME_REQUESTS
from fragdoctor.model.comparison import (
    Basis,
    CauseKind,
    ComparedFigure,
    Comparison,
    LineChange,
    LineKind,
)
from fragdoctor.model.finding import Confidence
from fragdoctor.units import format_count, format_share, format_size, listed, plural

_DECISIVE: Final = frozenset(
    {
        CauseKind.SCALE,
        CauseKind.LEAK,
        CauseKind.CHECKPOINTING,
        CauseKind.OPTIMIZER,
        CauseKind.MORE_BLOCKS,
        CauseKind.FEWER_BLOCKS,
    }
)
SAME_SHARE: Final = 0.001
"""Messages print figures to two decimals; smaller differences are not worth naming a line for."""

SECOND_SHARE: Final = 0.25
"""Share of the difference from which on a second cause is part of the answer."""

_CHANGES: Final = frozenset({CauseKind.SCALE, CauseKind.LEAK})
_VERBS: Final = {
    "peak_allocated": "peaks",
    "peak_active": "peaks (active memory)",
    "allocated": "holds",
    "peak_reserved": "reserves at most",
    "reserved": "reserves",
}
"""What a run does, by the figures that an answer may be about, the first of them first."""


def is_same(comparison: Comparison) -> bool:
    """Return whether all figures that both runs report are equal."""
    figures = [f for f in comparison.figures if len(set(f.values)) > 1]
    moved = any(
        c.delta_bytes or c.kind in (LineKind.NEW, LineKind.GONE) or c.sizes
        for c in comparison.lines
    )
    verdicts = {(r.verdict.cause, r.verdict.confidence) for r in comparison.runs}
    return not (figures or moved or comparison.settings or len(verdicts) > 1)


def summarised(comparison: Comparison) -> str:
    """Return the answer as text."""
    if comparison.trend is not None:
        return comparison.trend.text
    figure = main_figure(comparison)
    if comparison.is_same:
        if figure is None:
            return "No difference in anything that both runs report."
        return f"No difference: {_how_much(figure, comparison)}."
    top = next(iter(comparison.causes), None)
    if comparison.proof is not None and top is not None and top.kind is CauseKind.SETTINGS:
        is_same = (comparison.requests_equal or 0.0) >= SAME_REQUESTS
        if is_same and top.confidence is not Confidence.POSSIBLE:
            return f"{top.text}{_verdicts(comparison)}"
    if figure is None:
        return f"The runs have no figure in common.{_verdicts(comparison)}"
    how_much = _how_much(figure, comparison)
    lines, settings = _lines(comparison), _settings(comparison)
    # Equal settings explain nothing, so a colon never introduces them alone.
    join = ": " if lines or comparison.settings else "; the "
    why = f"{join}{'; '.join(p for p in (lines, settings) if p)}" if lines or settings else ""
    return f"{how_much}{why}.{_cause(comparison)}{_verdicts(comparison)}"


def main_figure(comparison: Comparison) -> ComparedFigure | None:
    """Return the figure that the answer is about: the first one that both runs know.

    If the requests were the same, or live memory is equal, reserved memory is what differs.
    """
    known = {f.id: f for f in comparison.figures if f.delta is not None}
    first = ["allocated"] if comparison.basis is Basis.NOW else []
    found = [known[name] for name in (*first, *_VERBS) if name in known]
    return next((f for f in found if f.delta), next(iter(found), None))


def _how_much(figure: ComparedFigure, comparison: Comparison) -> str:
    delta, first = figure.delta or 0, figure.values[0] or 0
    last = comparison.runs[-1].letter
    verb = _VERBS[figure.id]
    if not delta or abs(delta) < SAME_SHARE * first:
        within = " (within 0.1%)" if delta else ""
        return f"{last} {verb} {format_size(figure.values[-1])}, as A does{within}"
    share = f" ({'+' if delta > 0 else '-'}{format_share(abs(delta), first)})" if first else ""
    change = f"{format_size(abs(delta))}{share}"
    is_peak = figure.id in ("peak_allocated", "peak_active")
    ways = ("higher", "lower") if is_peak else ("more", "less")
    return f"{last} {verb} {change} {ways[delta < 0]}"


def _lines(comparison: Comparison) -> str:
    """Return a clause about the line that moved most in the direction of the total."""
    length = next((c for c in comparison.causes if c.kind is CauseKind.LENGTH), None)
    if length is not None:
        return length.text[0].lower() + length.text[1:].rstrip(".")
    delta = comparison.delta_bytes
    if not delta:
        asked = comparison.figure("requests")
        if asked is None or not asked.delta:
            return ""
        first, last = (format_count(asked.values[i] or 0) for i in (0, -1))
        return f"it makes {last} requests instead of {first}"
    same_way = [c for c in comparison.lines if c.delta_bytes * delta > 0]
    named = [c for c in same_way if c.place is not None]
    top = max(named or same_way, key=lambda c: abs(c.delta_bytes), default=None)
    return "" if top is None else _change_text(top)


def _change_text(change: LineChange) -> str:
    """Return what happened to a line, as a clause."""
    where, size = change.where, format_size(abs(change.delta_bytes))
    if change.kind is LineKind.NEW:
        return f"{where} is new and holds {size}"
    if change.kind is LineKind.GONE:
        return f"{where} is gone, which held {size}"
    return f"{where} {'grew' if change.delta_bytes > 0 else 'shrank'} by {size}"


def _cause(comparison: Comparison) -> str:
    """Return what caused the difference, if that says more than the line alone."""
    delta = comparison.delta_bytes or 0
    decisive = [c for c in comparison.causes if c.kind in _DECISIVE]
    sure = [c for c in decisive if c.confidence is not Confidence.POSSIBLE][:1]
    # If two things changed, the smaller one is mentioned only if it is a large part.
    parts = [c for c in decisive if (c.delta_bytes or 0) * delta >= SECOND_SHARE * delta**2]
    second = [c for c in parts if c not in sure and c.kind in _CHANGES][:1] if sure else []
    return "".join(f" {c.text}" for c in (*sure, *second))


def _settings(comparison: Comparison) -> str:
    if comparison.settings is None:
        return ""
    if not comparison.settings:
        return "settings are the same"
    changes = comparison.settings
    named = ", ".join(f"{s.key} {s.before} -> {s.after}" for s in changes[:2])
    named += " and more" if len(changes) > 2 else ""
    proof = comparison.proof
    same = (comparison.requests_equal or 0.0) >= SAME_REQUESTS
    if proof is not None and same and proof.accounted is None and not proof.decides:
        named += " makes no difference, a replay says"
    return named


def _verdicts(comparison: Comparison) -> str:
    first, last = comparison.runs[0], comparison.runs[-1]
    if first.verdict.cause == last.verdict.cause:
        return ""
    a, b = (run.verdict.cause.value.replace("_", " ") for run in (first, last))
    return f" The verdict changed from {a} to {b}."


MAX_LENGTH_DIFFERENCE: Final = 0.1
"""Share of the number of steps; a smaller difference is how a run begins and ends."""


def find_notes(comparison: Comparison, compared: Sequence[ComparedRun]) -> list[str]:
    """Return one sentence for each thing that readers must know to trust the comparison."""
    runs = comparison.runs
    notes = []
    without = [r.letter for r in runs if not r.has_snapshot]
    no_trace = [r.letter for r in runs if r.has_snapshot and not r.has_trace]
    texts = {
        "no snapshot with memory in it: figures are compared, source lines cannot be.": without,
        "no trace: lines are compared by what is live now, not at the peak.": (
            no_trace if comparison.basis is Basis.NOW else []
        ),
        "no stacks: it is unknown which line holds what.": [
            r.letter for r in runs if r.has_snapshot and not r.has_stacks
        ],
        "lost the beginning of the trace: a higher peak before it is not seen, and requests are "
        "not compared one by one.": [r.letter for r in runs if r.is_cut],
    }
    for what, letters in texts.items():
        if letters:
            notes.append(f"{listed(letters)} {_has(letters)} {what}")
    if comparison.settings is None and not without:
        silent = [r.letter for r, own in zip(runs, compared, strict=True) if own.settings is None]
        notes.append(f"{listed(silent)} {_has(silent)} no settings recorded: they may differ.")
    n_merged = max((d.n_lines_merged for r in compared for d in r.devices.values()), default=0)
    if n_merged:
        notes.append(
            f"The {plural(n_merged, 'smallest line')} of a run are summed up, without their places."
        )
    notes += _peak_notes(comparison)
    return notes


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
    kinds = {c.kind for c in comparison.lines if c.place is not None}
    if first.has_stacks and last.has_stacks and kinds == {LineKind.NEW, LineKind.GONE}:
        notes.append(
            "No source line of one run is in the other: these look like two different programs."
        )
    a, b = first.n_steps, last.n_steps
    is_pair = len(comparison.runs) == 2
    if is_pair and a and b and abs(a - b) > max(1, MAX_LENGTH_DIFFERENCE * max(a, b)):
        notes.append(
            f"The traces are of different length: {format_count(a)} and {format_count(b)} steps."
        )
    return notes


def _has(letters: Sequence[str]) -> str:
    return "has" if len(letters) == 1 else "have"
