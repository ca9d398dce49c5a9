"""Finds the change that caused the difference, from lines, requests and settings together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fragdoctor.comparison.compared_run import ComparedDevice
from fragdoctor.comparison.lines import FACTOR_SLACK, size_part
from fragdoctor.comparison.settings_proof import MIN_DIFFERENCE, SAME_REQUESTS
from fragdoctor.model.comparison import (
    CauseKind,
    Comparison,
    LikelyCause,
    LineChange,
    LineKind,
    SizeChange,
)
from fragdoctor.model.finding import Confidence, Location
from fragdoctor.units import MIB, format_count, format_size, plural, signed_size

ENOUGH_STEPS: Final = 8
"""Steps that a run without growth must show before it counts as evidence that it does not grow."""

MIN_SHARE: Final = 0.1
"""Share of all that moved; smaller parts appear in the table of lines but are not causes."""

MIN_BYTES: Final = 1 * MIB
LIKELY_SHARE: Final = 0.5


def _counts_enough(pair: Comparison, part: int) -> bool:
    """Return whether a part is large enough among all that moved to be called a cause."""
    moved_bytes = sum(abs(c.delta_bytes) for c in pair.lines)
    return abs(part) >= max(MIN_BYTES, MIN_SHARE * moved_bytes)


def _confidence(pair: Comparison, part: int) -> Confidence:
    """Return "likely" for a part that makes up most of the difference, in its direction."""
    delta = pair.delta_bytes or 0
    is_most = part * delta >= LIKELY_SHARE * delta**2 > 0
    return Confidence.LIKELY if is_most else Confidence.POSSIBLE


MIN_UNCHANGED: Final = 0.05
"""Smallest share of the older run's bytes that lines of unchanged size must hold to be evidence."""


def _scaled(pair: Comparison) -> list[LikelyCause]:
    """Return the factors by which sizes changed, each with its lines."""
    clusters: list[tuple[float, list[tuple[LineChange, SizeChange]]]] = []
    for change in pair.lines:
        sizes = change.sizes
        if sizes is None or sizes.factor is None or change.place is None:
            continue
        near = (group for f, group in clusters if abs(sizes.factor / f - 1) <= FACTOR_SLACK)
        group = next(near, None)
        if group is None:
            clusters.append((sizes.factor, group := []))
        group.append((change, sizes))
    causes = []
    for factor, group in clusters:
        part = sum(size_part(c) for c, _ in group)
        if not _counts_enough(pair, part):
            continue
        top, sizes = max(group, key=lambda one: abs(size_part(one[0])))
        before, after = format_size(sizes.before_bytes), format_size(sizes.after_bytes)
        is_one = len(group) == 1
        text = (
            f"{plural(len(group), 'line asks', 'lines ask')} {factor:.3g} times as much "
            f"({top.where}: {before} -> {after}): "
            f"{'another shape' if is_one else _meaning(pair, factor)}."
        )
        sure = Confidence.POSSIBLE if is_one else _confidence(pair, part)
        causes.append(LikelyCause(CauseKind.SCALE, sure, text, part))
    return causes


def _meaning(pair: Comparison, factor: float) -> str:
    """Return what a factor that several lines have in common may come from."""
    same = [
        c
        for c in pair.lines
        if c.sizes is None and c.before is not None and c.after is not None and c.before_bytes
    ]
    kept = sum(c.before_bytes for c in same)
    whole = sum(c.before_bytes for c in pair.lines)
    precision = factor in (0.25, 0.5, 2.0, 4.0)
    if same and kept >= MIN_UNCHANGED * whole:
        names = "a batch, sequence or precision" if precision else "a batch or sequence"
        return (
            f"what {names} of that factor does ({plural(len(same), 'line asks', 'lines ask')} "
            "the same as before)"
        )
    return f"a batch, sequence{', width or precision' if precision else ' or width'} of that factor"


MAX_NAMED: Final = 3
MIN_REQUESTS: Final = 100
"""With at least this many equal requests, one run is the beginning of the other, not an edit."""


def likely_causes(
    comparison: Comparison, before: ComparedDevice, after: ComparedDevice
) -> tuple[LikelyCause, ...]:
    """Return the likely causes, the surest and largest first; empty if nothing stands out.

    The comparison has all lines; ``before`` and ``after`` are the compared devices.
    """
    leaking = {*before.growth, *after.growth}  # causes of their own
    found = [
        *_by_settings(comparison),
        *_by_length(comparison, before, after),
        *_leaks(comparison, before, after),
        *_features(comparison, before, after),
        *_scaled(comparison),
        *_by_lines(comparison, leaking),
    ]
    if any(c.kind is CauseKind.LENGTH for c in found):
        # The lines differ because one run went further, not because the program changed.
        found = [c for c in found if c.kind in (CauseKind.LENGTH, CauseKind.SETTINGS)]
    order = {Confidence.PROVEN: 0, Confidence.LIKELY: 1, Confidence.POSSIBLE: 2}
    found.sort(
        key=lambda c: (
            order[c.confidence],
            c.kind is not CauseKind.SETTINGS,
            -abs(c.delta_bytes or 0),
        )
    )
    return tuple(found)


def _by_settings(pair: Comparison) -> list[LikelyCause]:
    if not pair.settings:
        return []
    names = ", ".join(f"{s.key} {s.before} -> {s.after}" for s in pair.settings)
    same = (pair.requests_equal or 0.0) >= SAME_REQUESTS
    proof = pair.proof
    if proof is None:
        text = f"Both runs made the same requests; only settings differ ({names})."
        return [LikelyCause(CauseKind.SETTINGS, Confidence.LIKELY, text)] if same else []
    moved = proof.result_bytes - proof.own_bytes
    text = f"The settings did it ({names}). {proof.text}"
    sure = Confidence.LIKELY if proof.is_exact else Confidence.POSSIBLE
    if same:
        accounted = proof.accounted or 0.0
        if accounted < MIN_SHARE and not proof.decides:
            return []
        is_equal = abs(proof.result_bytes - proof.recorded_bytes) < MIN_DIFFERENCE
        if proof.is_exact and (is_equal or proof.decides):
            sure = Confidence.PROVEN
    else:
        if abs(moved) < MIN_DIFFERENCE:
            return []
        text = f"The settings alone ({names}) change peak reserved memory. {proof.text}"
    return [LikelyCause(CauseKind.SETTINGS, sure, text, moved)]


def _by_length(
    pair: Comparison, before: ComparedDevice, after: ComparedDevice
) -> list[LikelyCause]:
    """Return the cause that the program is the same, but one run went further."""
    n_old, n_new = len(before.requests), len(after.requests)
    is_same = (pair.requests_equal or 0.0) >= SAME_REQUESTS
    if len(pair.runs) > 2 or not is_same or n_old == n_new:
        return []
    short, long = (before, after) if n_old < n_new else (after, before)
    alone = LineKind.NEW if n_old < n_new else LineKind.GONE
    has_own_lines = any(c.kind is alone and c.delta_bytes for c in pair.lines)
    if short.capacity_bytes is None and (has_own_lines or len(short.requests) < MIN_REQUESTS):
        return []  # the end of the program may have been edited
    stopped, other = "A", pair.runs[-1].letter
    if n_new < n_old:
        stopped, other = other, stopped
    why = ""
    if short.capacity_bytes is not None:
        why = f" out of memory, with a capacity of {format_size(short.capacity_bytes)}"
    n_more = format_count(len(long.requests) - len(short.requests))
    text = (
        f"Both runs made the same {format_count(len(short.requests))} requests; {stopped} stopped "
        f"there{why}, {other} went on with {n_more} more."
    )
    return [LikelyCause(CauseKind.LENGTH, Confidence.PROVEN, text, pair.delta_bytes)]


def _leaks(pair: Comparison, before: ComparedDevice, after: ComparedDevice) -> list[LikelyCause]:
    """Return one cause per run for lines that keep memory step by step only in that run."""
    grown: dict[bool, list[tuple[int, LineChange]]] = {}
    for change in pair.lines:
        old, new = _slope(before, change.before), _slope(after, change.after)
        if (old is None) != (new is None):
            grown.setdefault(old is None, []).append((new or old or 0, change))
    found, last = [], pair.runs[-1].letter
    for is_new, lines in grown.items():
        lines.sort(key=lambda line: -line[0])
        letter, other, quiet = (last, "A", before) if is_new else ("A", last, after)
        # Without that many steps, a run cannot show that a line keeps nothing.
        is_known = (quiet.n_steps or 0) >= ENOUGH_STEPS
        contrast = f", in {other} not" if is_known else f"; {other} has too few steps to tell"
        more = len(lines) - 1
        fastest = lines[0][1]
        who = fastest.where
        who += f" and {plural(more, 'more line')} keep" if more else " keeps"
        slope = sum(rate for rate, _ in lines)
        text = f"{who} {format_size(slope)} more each step in {letter}{contrast}."
        moved = sum(change.delta_bytes for _, change in lines)
        found.append(LikelyCause(CauseKind.LEAK, Confidence.LIKELY, text, moved))
    return found


def _slope(device: ComparedDevice, place: Location | None) -> int | None:
    return None if place is None else device.growth.get(place)


def _features(pair: Comparison, before: ComparedDevice, after: ComparedDevice) -> list[LikelyCause]:
    """Return causes for library parts that only one of the runs goes through."""
    old, new = before.features, after.features
    found, last = [], pair.runs[-1].letter
    if ("checkpoint" in old) != ("checkpoint" in new):
        is_on = "checkpoint" in new
        letter, other = (last, "A") if is_on else ("A", last)
        text = (
            f"{letter} recomputes activations (torch.utils.checkpoint is in its stacks), {other} "
            "keeps them."
        )
        moved = sum(c.delta_bytes for c in pair.lines if c.place is not None)
        helps = (moved < 0) == is_on
        sure = Confidence.LIKELY if helps else Confidence.POSSIBLE
        found.append(LikelyCause(CauseKind.CHECKPOINTING, sure, text, moved if helps else None))
    a = sorted(f for f in old if f.startswith("optim."))
    b = sorted(f for f in new if f.startswith("optim."))
    # A run that stopped before its first optimizer step has not gone through an optimizer yet.
    ran_on = min(before.n_steps or 0, after.n_steps or 0) > 1
    if a != b and ((a and b) or ran_on):
        text = f"A different optimizer allocates: {_listed(a)} in A, {_listed(b)} in {last}."
        found.append(LikelyCause(CauseKind.OPTIMIZER, Confidence.LIKELY, text))
    return found


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"torch.{name}" for name in names) or "none"


_SAID: Final = {
    CauseKind.NEW_CODE: ("line is", "lines are", "only in {last}: {named}."),
    CauseKind.GONE_CODE: ("line is", "lines are", "only in A: {named}."),
    CauseKind.MORE_BLOCKS: (
        "line holds",
        "lines hold",
        "more blocks at that moment ({named}): more layers, or more is kept.",
    ),
    CauseKind.FEWER_BLOCKS: (
        "line holds",
        "lines hold",
        "fewer blocks at that moment ({named}): fewer layers, or less is kept.",
    ),
}


def _by_lines(pair: Comparison, leaking: set[Location]) -> list[LikelyCause]:
    """Return causes for lines that only one run has, or that hold other numbers of blocks."""
    groups: dict[CauseKind, list[tuple[int, str]]] = {kind: [] for kind in _SAID}
    for c in pair.lines:
        if c.place is None or {c.before, c.after} & leaking:
            continue
        if c.before is None or c.after is None:
            part, text = c.delta_bytes, signed_size(c.delta_bytes)
            kind = CauseKind.GONE_CODE if c.after is None else CauseKind.NEW_CODE
        else:
            part = c.delta_bytes - size_part(c) if c.before_blocks != c.after_blocks else 0
            kind = CauseKind.MORE_BLOCKS if part > 0 else CauseKind.FEWER_BLOCKS
            text = f"{c.before_blocks:,} -> {c.after_blocks:,}"
        if part:
            groups[kind].append((part, f"{c.where} {text}"))
    found = []
    for kind, group in groups.items():
        group.sort(key=lambda one: -abs(one[0]))
        whole, n_more = sum(part for part, _ in group), len(group) - MAX_NAMED
        if group and _counts_enough(pair, whole):
            named = ", ".join(text for _, text in group[:MAX_NAMED])
            named += f" and {format_count(n_more)} more" if n_more > 0 else ""
            one, many, rest = _SAID[kind]
            text = rest.format(named=named, last=pair.runs[-1].letter)
            text = f"{plural(len(group), one, many)} {text}"
            found.append(LikelyCause(kind, _confidence(pair, whole), text, whole))
    return found
