"""Lines that ask for a common factor more or less: a batch, a sequence, a width, a precision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fragdoctor.comparison.evidence import Evidence, confidence_of, counts_enough, place_text
from fragdoctor.comparison.lines import FACTOR_SLACK, size_part
from fragdoctor.model.comparison import CauseKind, LikelyCause, LineChange
from fragdoctor.units import format_size, plural

MAX_NAMED: Final = 3
MIN_UNCHANGED: Final = 0.05
"""Share of the older run's bytes in lines of the same sizes from which on these mean something."""

Cluster = tuple[float, list[LineChange]]


def scaled(e: Evidence) -> list[LikelyCause]:
    """Return the factors by which sizes changed, each with its lines."""
    clusters = _clusters(e.changes)
    squared = _squared(clusters)
    if squared is not None:
        return [_width(e, *squared)] if counts_enough(e, _part(squared[0], squared[1])) else []
    return [
        _one_factor(e, factor, group)
        for factor, group in clusters
        if counts_enough(e, sum(size_part(c) for c in group))
    ]


def _clusters(changes: Sequence[LineChange]) -> list[Cluster]:
    clusters: list[Cluster] = []
    for change in changes:
        factor = None if change.sizes is None else change.sizes.factor
        if factor is None or change.place is None:
            continue
        near = next((c for f, c in clusters if abs(factor / f - 1) <= FACTOR_SLACK), None)
        if near is None:
            clusters.append((factor, [change]))
        else:
            near.append(change)
    return clusters


def _squared(clusters: Sequence[Cluster]) -> tuple[Cluster, Cluster] | None:
    """Return the clusters of a factor and of its square: activations and weights of a width."""
    for once in clusters:
        for twice in clusters:
            factor = once[0]
            if once is not twice and abs(twice[0] / factor**2 - 1) <= FACTOR_SLACK:
                return once, twice
    return None


def _part(*clusters: Cluster) -> int:
    return sum(size_part(c) for _, group in clusters for c in group)


def _width(e: Evidence, once: Cluster, twice: Cluster) -> LikelyCause:
    factor, part = once[0], _part(once, twice)
    text = (
        f"{plural(len(once[1]), 'line asks', 'lines ask')} {_times(factor)} as much and "
        f"{plural(len(twice[1]), 'line', 'lines')} {_times(twice[0])}, its square "
        f"({_example(once[1])}; {_example(twice[1])}): what a width of that factor does."
    )
    places = tuple(c.place for c in (*once[1], *twice[1]) if c.place is not None)[:MAX_NAMED]
    return LikelyCause(CauseKind.SCALE, confidence_of(e, part, True), text, part, places)


def _one_factor(e: Evidence, factor: float, group: Sequence[LineChange]) -> LikelyCause:
    part = sum(size_part(c) for c in group)
    text = (
        f"{plural(len(group), 'line asks', 'lines ask')} {_times(factor)} as much "
        f"({_example(group)}): {_meaning(e, factor, group)}."
    )
    is_plain = len(group) > 1
    sure = confidence_of(e, part, is_plain)
    places = tuple(c.place for c in group if c.place is not None)[:MAX_NAMED]
    return LikelyCause(CauseKind.SCALE, sure, text, part, places)


def _meaning(e: Evidence, factor: float, group: Sequence[LineChange]) -> str:
    """Return what a common factor can come from."""
    if len(group) == 1:
        return "another shape"
    same = [
        c
        for c in e.changes
        if c.sizes is None and c.before is not None and c.after is not None and c.before_bytes
    ]
    kept = sum(c.before_bytes for c in same)
    whole = sum(c.before_bytes for c in e.changes)
    precision = factor in (0.25, 0.5, 2.0, 4.0)
    if same and kept >= MIN_UNCHANGED * whole:
        names = "a batch, sequence or precision" if precision else "a batch or sequence"
        return (
            f"what {names} of that factor does ({plural(len(same), 'line asks', 'lines ask')} "
            "the same as before)"
        )
    return f"a batch, sequence{', width or precision' if precision else ' or width'} of that factor"


def _example(group: Sequence[LineChange]) -> str:
    top = max(group, key=lambda c: abs(size_part(c)))
    sizes = top.sizes
    if sizes is None:
        return place_text(top.place)
    before, after = format_size(sizes.before_bytes), format_size(sizes.after_bytes)
    return f"{place_text(top.place)}: {before} -> {after}"


def _times(factor: float) -> str:
    return f"{factor:.3g} times"
