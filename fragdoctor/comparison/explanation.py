"""Finds the change that caused the difference, from lines, requests and settings together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from msgspec import Struct

from fragdoctor.comparison.compared_run import ComparedDevice
from fragdoctor.comparison.line_changes import FACTOR_SLACK, size_part
from fragdoctor.comparison.settings_proof import MIN_DIFFERENCE, SAME_REQUESTS
from fragdoctor.model.comparison import (
    CauseKind,
    LikelyCause,
    LineChange,
    LineKind,
    SettingChange,
    SettingsProof,
)
from fragdoctor.model.finding import Confidence, Location
from fragdoctor.units import MIB, format_count, format_size, plural, signed_size

ENOUGH_STEPS: Final = 8
"""Steps that a run without growth must show before it counts as evidence that it does not grow."""

MIN_SHARE: Final = 0.1
"""Share of all that moved; smaller parts appear in the table of lines but are not causes."""

MIN_BYTES: Final = 1 * MIB
LIKELY_SHARE: Final = 0.5


class ComparisonEvidence(Struct, frozen=True):
    """What is known about two runs beyond their lines.

    Attributes:
        last: name of the newer run.
        is_series: whether one program is seen again and again; that it continued explains nothing.
    """

    before: ComparedDevice
    after: ComparedDevice
    changes: Sequence[LineChange]
    delta_bytes: int
    settings: Sequence[SettingChange] | None
    proof: SettingsProof | None
    requests_equal: float | None
    last: str = "B"
    is_series: bool = False

    @property
    def moved_bytes(self) -> int:
        """Bytes that lines gained or lost, regardless of the sum."""
        return sum(abs(c.delta_bytes) for c in self.changes)


def counts_enough(e: ComparisonEvidence, part: int) -> bool:
    """Return whether a part is large enough among all that moved to be called a cause."""
    return abs(part) >= max(MIN_BYTES, MIN_SHARE * e.moved_bytes)


def confidence_of(e: ComparisonEvidence, part: int, is_plain: bool) -> Confidence:
    """Return "likely" for a part that makes up most of the difference, in its direction."""
    if not e.delta_bytes or (part > 0) != (e.delta_bytes > 0) or not is_plain:
        return Confidence.POSSIBLE
    is_most = abs(part) >= LIKELY_SHARE * abs(e.delta_bytes)
    return Confidence.LIKELY if is_most else Confidence.POSSIBLE


MIN_UNCHANGED: Final = 0.05
"""Smallest share of the older run's bytes that lines of unchanged size must hold to be evidence."""

Cluster = tuple[float, list[LineChange]]


def scaled(e: ComparisonEvidence) -> list[LikelyCause]:
    """Return the factors by which sizes changed, each with its lines."""
    return [
        _one_factor(e, factor, group)
        for factor, group in _clusters(e.changes)
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


def _one_factor(e: ComparisonEvidence, factor: float, group: Sequence[LineChange]) -> LikelyCause:
    part = sum(size_part(c) for c in group)
    text = (
        f"{plural(len(group), 'line asks', 'lines ask')} {factor:.3g} times as much "
        f"({_example(group)}): {_meaning(e, factor, group)}."
    )
    is_plain = len(group) > 1
    sure = confidence_of(e, part, is_plain)
    return LikelyCause(CauseKind.SCALE, sure, text, part)


def _meaning(e: ComparisonEvidence, factor: float, group: Sequence[LineChange]) -> str:
    """Return what a common factor may come from."""
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
        return top.where
    before, after = format_size(sizes.before_bytes), format_size(sizes.after_bytes)
    return f"{top.where}: {before} -> {after}"


MAX_NAMED: Final = 3
MIN_REQUESTS: Final = 100
"""With at least this many equal requests, one run is the beginning of the other, not an edit."""


def likely_causes(evidence: ComparisonEvidence) -> tuple[LikelyCause, ...]:
    """Return the likely causes, the surest and largest first; empty if nothing stands out."""
    found = [
        *_by_settings(evidence),
        *_by_length(evidence),
        *_leaks(evidence),
        *_features(evidence),
        *scaled(evidence),
        *_new_and_gone(evidence),
        *_counts(evidence),
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


def _by_settings(e: ComparisonEvidence) -> list[LikelyCause]:
    if not e.settings:
        return []
    names = ", ".join(f"{s.key} {s.before} -> {s.after}" for s in e.settings)
    same = (e.requests_equal or 0.0) >= SAME_REQUESTS
    proof = e.proof
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


def _by_length(e: ComparisonEvidence) -> list[LikelyCause]:
    """Return the cause that the program is the same, but one run went further."""
    n_old, n_new = len(e.before.requests), len(e.after.requests)
    is_same = (e.requests_equal or 0.0) >= SAME_REQUESTS
    if e.is_series or not is_same or n_old == n_new:
        return []
    short, long = (e.before, e.after) if n_old < n_new else (e.after, e.before)
    alone = LineKind.NEW if n_old < n_new else LineKind.GONE
    has_own_lines = any(c.kind is alone and c.delta_bytes for c in e.changes)
    if short.capacity_bytes is None and (has_own_lines or len(short.requests) < MIN_REQUESTS):
        return []  # the end of the program may have been edited
    stopped, other = ("A", e.last) if n_old < n_new else (e.last, "A")
    why = ""
    if short.capacity_bytes is not None:
        why = f" out of memory, with a capacity of {format_size(short.capacity_bytes)}"
    n_more = format_count(len(long.requests) - len(short.requests))
    text = (
        f"Both runs made the same {format_count(len(short.requests))} requests; {stopped} stopped "
        f"there{why}, {other} went on with {n_more} more."
    )
    return [LikelyCause(CauseKind.LENGTH, Confidence.PROVEN, text, e.delta_bytes)]


def _leaks(e: ComparisonEvidence) -> list[LikelyCause]:
    """Return one cause per run for lines that keep memory step by step only in that run."""
    grown: dict[bool, list[tuple[int, LineChange]]] = {}
    for change in e.changes:
        old, new = _slope(e.before, change.before), _slope(e.after, change.after)
        if (old is None) != (new is None):
            grown.setdefault(old is None, []).append((new or old or 0, change))
    found = []
    for is_new, lines in grown.items():
        lines.sort(key=lambda line: -line[0])
        letter, other, quiet = (e.last, "A", e.before) if is_new else ("A", e.last, e.after)
        # Without that many steps, a run cannot show that a line keeps nothing.
        is_known = (quiet.n_steps or 0) >= ENOUGH_STEPS
        contrast = f"in {other} not" if is_known else f"{other} has too few steps to say"
        more = len(lines) - 1
        fastest = lines[0][1]
        who = fastest.where
        who += f" and {plural(more, 'more line')} keep" if more else " keeps"
        slope = sum(rate for rate, _ in lines)
        text = f"{who} {format_size(slope)} more each step in {letter}, {contrast}."
        moved = sum(change.delta_bytes for _, change in lines)
        found.append(LikelyCause(CauseKind.LEAK, Confidence.LIKELY, text, moved))
    return found


def _slope(device: ComparedDevice, place: Location | None) -> int | None:
    return None if place is None else device.growth.get(place)


def _features(e: ComparisonEvidence) -> list[LikelyCause]:
    """Return causes for library parts that only one of the runs goes through."""
    old, new = e.before.features, e.after.features
    found = []
    if ("checkpoint" in old) != ("checkpoint" in new):
        is_on = "checkpoint" in new
        letter, other = (e.last, "A") if is_on else ("A", e.last)
        text = (
            f"{letter} recomputes activations (torch.utils.checkpoint is in its stacks), {other} "
            "keeps them."
        )
        moved = sum(c.delta_bytes for c in e.changes if c.place is not None)
        helps = (moved < 0) == is_on
        sure = Confidence.LIKELY if helps else Confidence.POSSIBLE
        found.append(LikelyCause(CauseKind.CHECKPOINTING, sure, text, moved if helps else None))
    a = sorted(f for f in old if f.startswith("optim."))
    b = sorted(f for f in new if f.startswith("optim."))
    # A run that stopped before its first optimizer step has not gone through an optimizer yet.
    ran_on = min(e.before.n_steps or 0, e.after.n_steps or 0) > 1
    if a != b and ((a and b) or ran_on):
        text = f"A different optimizer allocates: {_listed(a)} in A, {_listed(b)} in {e.last}."
        found.append(LikelyCause(CauseKind.OPTIMIZER, Confidence.LIKELY, text))
    return found


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"torch.{name}" for name in names) or "none"


def _new_and_gone(e: ComparisonEvidence) -> list[LikelyCause]:
    found = []
    for kind, cause, word in (
        (LineKind.NEW, CauseKind.NEW_CODE, f"only in {e.last}"),
        (LineKind.GONE, CauseKind.GONE_CODE, "only in A"),
    ):
        leaking = _leaking(e)
        group = [
            c
            for c in e.changes
            if c.kind is kind and c.place is not None and c.delta_bytes and c.place not in leaking
        ]
        part = sum(c.delta_bytes for c in group)
        if not group or not counts_enough(e, part):
            continue
        named = _named([f"{c.where} {signed_size(c.delta_bytes)}" for c in group])
        text = f"{plural(len(group), 'line is', 'lines are')} {word}: {named}."
        found.append(LikelyCause(cause, confidence_of(e, part, True), text, part))
    return found


def _counts(e: ComparisonEvidence) -> list[LikelyCause]:
    """Return causes for lines that hold more (or fewer) blocks of the same sizes as before."""
    leaking = _leaking(e)
    found = []
    for sign, cause, word, why in (
        (1, CauseKind.MORE_BLOCKS, "more blocks", "more layers, or more is kept"),
        (-1, CauseKind.FEWER_BLOCKS, "fewer blocks", "fewer layers, or less is kept"),
    ):
        group = []
        for c in e.changes:
            is_shared = c.before is not None and c.after is not None
            is_shared &= c.before_blocks != c.after_blocks
            part = c.delta_bytes - size_part(c)
            if is_shared and part * sign > 0 and not {c.before, c.after} & leaking:
                group.append((part, c))
        group.sort(key=lambda pc: -abs(pc[0]))
        whole = sum(part for part, _ in group)
        if not group or not counts_enough(e, whole):
            continue
        named = _named([f"{c.where} {c.before_blocks:,} -> {c.after_blocks:,}" for _, c in group])
        lines = plural(len(group), "line holds", "lines hold")
        text = f"{lines} {word} at that moment ({named}): {why}."
        found.append(LikelyCause(cause, confidence_of(e, whole, True), text, whole))
    return found


def _named(lines: Sequence[str]) -> str:
    """Return the first of some lines, and how many more there are."""
    n_more = len(lines) - MAX_NAMED
    return ", ".join(lines[:MAX_NAMED]) + (
        f" and {format_count(n_more)} more" if n_more > 0 else ""
    )


def _leaking(e: ComparisonEvidence) -> set[Location]:
    """Return the lines that keep memory step by step; they are causes of their own."""
    return {*e.before.growth, *e.after.growth}
