"""Which change did it: what the lines, the requests and the settings say together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from fragdoctor.comparison.lines import FACTOR_SLACK, size_part
from fragdoctor.comparison.reading import DeviceReading, GrowingLine
from fragdoctor.comparison.replay import MIN_DIFFERENCE, SAME_REQUESTS
from fragdoctor.model.comparison import (
    CauseKind,
    LikelyCause,
    LineChange,
    LineKind,
    SettingChange,
    SettingsProof,
)
from fragdoctor.model.finding import Confidence, Location
from fragdoctor.units import MIB, format_count, format_size, plural

MIN_SHARE: Final = 0.1
"""Of all that moved; smaller parts are in the table of lines and no cause."""

MIN_BYTES: Final = 1 * MIB
MAX_NAMED: Final = 3
LIKELY_SHARE: Final = 0.5


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known about two runs beyond their lines."""

    before: DeviceReading
    after: DeviceReading
    changes: Sequence[LineChange]
    delta_bytes: int
    settings: Sequence[SettingChange] | None
    proof: SettingsProof | None
    requests_equal: float | None

    @property
    def moved_bytes(self) -> int:
        """Bytes that lines gained or lost, whatever the sum."""
        return sum(abs(c.delta_bytes) for c in self.changes)


def likely_causes(evidence: Evidence) -> tuple[LikelyCause, ...]:
    """Return what did it, the surest and largest first; empty where nothing stands out."""
    found = [
        *_by_settings(evidence),
        *_by_length(evidence),
        *_leaks(evidence),
        *_features(evidence),
        *_scaled(evidence),
        *_new_and_gone(evidence),
        *_counts(evidence),
    ]
    if any(c.kind is CauseKind.LENGTH for c in found):
        # The lines differ because one run went further, not because the program did.
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


def place_text(place: Location | None) -> str:
    """Return ``train.py:88 in forward``: the file by its own name."""
    if place is None:
        return "requests without a Python stack"
    name = place.filename.replace("\\", "/").rsplit("/", 1)[-1] or "(unknown file)"
    line = f":{place.line}" if 0 < place.line < 2**31 else ""
    return f"{name}{line} in {place.function}" if place.function else f"{name}{line}"


def _by_settings(e: Evidence) -> list[LikelyCause]:
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
        if accounted < MIN_SHARE:
            return []
        if proof.is_exact and abs(proof.result_bytes - proof.recorded_bytes) < MIN_DIFFERENCE:
            sure = Confidence.PROVEN
    else:
        if abs(moved) < MIN_DIFFERENCE:
            return []
        text = f"The settings ({names}) do a part of it. {proof.text}"
    return [LikelyCause(CauseKind.SETTINGS, sure, text, moved)]


def _by_length(e: Evidence) -> list[LikelyCause]:
    """The same program, of which one run went further."""
    n_old, n_new = len(e.before.requests), len(e.after.requests)
    if (e.requests_equal or 0.0) < SAME_REQUESTS or n_old == n_new:
        return []
    short, long = (e.before, e.after) if n_old < n_new else (e.after, e.before)
    stopped, other = ("A", "B") if n_old < n_new else ("B", "A")
    why = ""
    if short.capacity_bytes is not None:
        why = f" out of memory, with a capacity of {format_size(short.capacity_bytes)}"
    n_more = format_count(len(long.requests) - len(short.requests))
    text = (
        f"Both runs made the same {format_count(len(short.requests))} requests; {stopped} stopped "
        f"there{why}, {other} went on with {n_more} more."
    )
    return [LikelyCause(CauseKind.LENGTH, Confidence.PROVEN, text, e.delta_bytes)]


def _leaks(e: Evidence) -> list[LikelyCause]:
    """Lines that keep memory step by step in one run and not in the other."""
    places = {(c.before, c.after): c for c in e.changes}
    old = _rates(e.before.growth)
    new = _rates(e.after.growth)
    found = []
    for (before, after), change in places.items():
        a, b = old.get(before), new.get(after)
        if (a is None) == (b is None) or (before is None and after is None):
            continue
        rate = b or a
        assert rate is not None  # noqa: S101 - one of them is there
        letter, other = ("B", "A") if a is None else ("A", "B")
        text = (
            f"{place_text(after or before)} keeps {format_size(rate.slope_bytes)} more each step "
            f"in {letter} ({plural(rate.n_steps, 'step')}), in {other} it does not."
        )
        place = after or before
        found.append(
            LikelyCause(
                CauseKind.LEAK,
                Confidence.LIKELY,
                text,
                change.delta_bytes,
                () if place is None else (place,),
            )
        )
    return found


def _rates(growth: Sequence[GrowingLine]) -> dict[Location | None, GrowingLine]:
    return {g.place: g for g in growth if g.place is not None}


def _features(e: Evidence) -> list[LikelyCause]:
    old, new = e.before.features, e.after.features
    found = []
    if ("checkpoint" in old) != ("checkpoint" in new):
        letter = "B" if "checkpoint" in new else "A"
        text = (
            f"{letter} recomputes activations (torch.utils.checkpoint is in its stacks), "
            f"{'A' if letter == 'B' else 'B'} keeps them."
        )
        moved = sum(c.delta_bytes for c in e.changes if c.place is not None)
        helps = (moved < 0) == (letter == "B")
        sure = Confidence.LIKELY if helps else Confidence.POSSIBLE
        found.append(LikelyCause(CauseKind.CHECKPOINTING, sure, text, moved if helps else None))
    a = sorted(f for f in old if f.startswith("optim."))
    b = sorted(f for f in new if f.startswith("optim."))
    if a != b and e.before.n_steps != 0 and a and b:
        text = f"The optimizer changed: {_listed(a)} in A, {_listed(b)} in B."
        found.append(LikelyCause(CauseKind.OPTIMIZER, Confidence.LIKELY, text))
    return found


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"torch.{name}" for name in names)


def _scaled(e: Evidence) -> list[LikelyCause]:
    """Lines that ask for the same factor more: a batch, a sequence, a width, a precision."""
    scaled = [c for c in e.changes if c.sizes is not None and c.sizes.factor is not None]
    clusters: list[tuple[float, list[LineChange]]] = []
    for change in scaled:
        assert change.sizes is not None  # noqa: S101 - chosen above
        factor = change.sizes.factor or 1.0
        near = next((c for f, c in clusters if abs(factor / f - 1) <= FACTOR_SLACK), None)
        if near is None:
            clusters.append((factor, [change]))
        else:
            near.append(change)
    found = []
    for factor, group in clusters:
        part = sum(size_part(c) for c in group)
        if not _counts_enough(e, part):
            continue
        top = max(group, key=lambda c: abs(size_part(c)))
        assert top.sizes is not None  # noqa: S101 - chosen above
        sizes = f"{format_size(top.sizes.before_bytes)} -> {format_size(top.sizes.after_bytes)}"
        text = (
            f"{plural(len(group), 'line asks', 'lines ask')} {_times(factor)} as much "
            f"({place_text(top.place)}: {sizes})"
        )
        text += (
            ": a batch, sequence, width or precision of that factor."
            if len(group) > 1
            else ": another shape."
        )
        sure = _confidence(e, part, len(group) > 1)
        places = tuple(c.place for c in group if c.place is not None)[:MAX_NAMED]
        found.append(LikelyCause(CauseKind.SCALE, sure, text, part, places))
    return found


def _times(factor: float) -> str:
    return f"{factor:.3g} times"


def _new_and_gone(e: Evidence) -> list[LikelyCause]:
    found = []
    for kind, cause, word in (
        (LineKind.NEW, CauseKind.NEW_CODE, "only in B"),
        (LineKind.GONE, CauseKind.GONE_CODE, "only in A"),
    ):
        group = [c for c in e.changes if c.kind is kind and c.place is not None and c.delta_bytes]
        part = sum(c.delta_bytes for c in group)
        if not group or not _counts_enough(e, part):
            continue
        named = ", ".join(
            f"{place_text(c.place)} {_signed(c.delta_bytes)}" for c in group[:MAX_NAMED]
        )
        more = f" and {format_count(len(group) - MAX_NAMED)} more" if len(group) > MAX_NAMED else ""
        text = f"{plural(len(group), 'line is', 'lines are')} {word}: {named}{more}."
        places = tuple(c.place for c in group if c.place is not None)[:MAX_NAMED]
        found.append(LikelyCause(cause, _confidence(e, part, True), text, part, places))
    return found


def _counts(e: Evidence) -> list[LikelyCause]:
    """Lines that hold more (or fewer) blocks of the sizes that they held before."""
    leaking = {g.place for g in (*e.before.growth, *e.after.growth)}
    found = []
    for sign, cause, word in (
        (1, CauseKind.MORE_BLOCKS, "more blocks"),
        (-1, CauseKind.FEWER_BLOCKS, "fewer blocks"),
    ):
        group = []
        for c in e.changes:
            is_shared = c.before is not None and c.after is not None
            part = c.delta_bytes - size_part(c)
            if is_shared and part * sign > 0 and not {c.before, c.after} & leaking:
                group.append((part, c))
        group.sort(key=lambda pc: -abs(pc[0]))
        whole = sum(part for part, _ in group)
        if not group or not _counts_enough(e, whole):
            continue
        named = ", ".join(
            f"{place_text(c.place)} {format_count(c.before_blocks)} -> "
            f"{format_count(c.after_blocks)}"
            for _, c in group[:MAX_NAMED]
        )
        more = f" and {format_count(len(group) - MAX_NAMED)} more" if len(group) > MAX_NAMED else ""
        lines = plural(len(group), "line holds", "lines hold")
        text = f"{lines} {word} at that moment: {named}{more}."
        places = tuple(c.place for _, c in group if c.place is not None)[:MAX_NAMED]
        found.append(LikelyCause(cause, _confidence(e, whole, True), text, whole, places))
    return found


def _signed(n_bytes: int) -> str:
    return f"{'+' if n_bytes > 0 else ''}{format_size(n_bytes)}"


def _counts_enough(e: Evidence, part: int) -> bool:
    return abs(part) >= max(MIN_BYTES, MIN_SHARE * e.moved_bytes)


def _confidence(e: Evidence, part: int, is_plain: bool) -> Confidence:
    """Likely is what makes up most of the difference, in its direction."""
    if not e.delta_bytes or (part > 0) != (e.delta_bytes > 0) or not is_plain:
        return Confidence.POSSIBLE
    is_most = abs(part) >= LIKELY_SHARE * abs(e.delta_bytes)
    return Confidence.LIKELY if is_most else Confidence.POSSIBLE
