"""Words that the formats of a comparison share. Raw text: a format escapes it for its sink."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fragdoctor.model.comparison import (
    Basis,
    Comparison,
    Figure,
    LineChange,
    LineKind,
    ReasonKind,
    RunSide,
    SizeChange,
)
from fragdoctor.model.finding import Location
from fragdoctor.report.phrases import CAUSE_TITLES
from fragdoctor.units import format_count, format_share, format_size, plural

NO_STACK: Final = "(no Python stack)"

REASON_TITLES: Final = {
    ReasonKind.NEW_LINES: "new lines",
    ReasonKind.GONE_LINES: "lines that are gone",
    ReasonKind.OTHER_SIZES: "blocks of other sizes",
    ReasonKind.OTHER_COUNTS: "more or fewer blocks",
    ReasonKind.NO_STACK: "requests without a Python stack",
    ReasonKind.UNEXPLAINED: "not explained",
}

BASIS_TITLES: Final = {
    Basis.PEAK: "live memory at each run's peak",
    Basis.NOW: "live memory when each snapshot was taken",
    Basis.NONE: "",
}


def run_title(side: RunSide) -> str:
    """Return the verdict of a run in a few words."""
    title = CAUSE_TITLES[side.cause]
    return title if side.cause.value == "unknown" else f"{title} ({side.confidence})"


def run_name(side: RunSide) -> str:
    """Return the name of a run for people."""
    return "standard input" if side.name == "-" else side.name


def run_facts(side: RunSide) -> str:
    """Return what else is known about a run, in one phrase."""
    parts = []
    if side.device is not None:
        parts.append(f"GPU {side.device}")
    if side.n_steps:
        parts.append(plural(side.n_steps, "step"))
    if side.n_events is not None:
        parts.append(plural(side.n_events, "event"))
    return ", ".join(parts)


def versions_text(comparison: Comparison) -> str:
    """Return which PyTorch wrote the runs, and whether their settings differ, in one sentence."""
    versions = [r.torch_version for r in comparison.runs]
    parts = []
    if len(set(versions)) == 1:
        if versions[0]:
            parts.append(f"all runs fit PyTorch {versions[0]}")
    else:
        told = [f"{r.letter} {r.torch_version or 'unknown'}" for r in comparison.runs]
        parts.append(f"PyTorch differs: {', '.join(told)}")
    if comparison.settings is not None and not comparison.settings:
        parts.append("the settings are the same")
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}." if text else ""


def distinct_figures(comparison: Comparison) -> list[Figure]:
    """Return the figures without active memory where it is allocated memory: nothing waits."""
    values = {f.id: f.values for f in comparison.figures}
    twins = {"peak_active": "peak_allocated", "active": "allocated"}
    return [f for f in comparison.figures if values.get(twins.get(f.id, "")) != f.values]


def value_text(figure: Figure, value: int | None) -> str:
    """Return one value of a figure; a dash where it is unknown."""
    if value is None:
        return "-"
    return format_size(value) if figure.unit == "bytes" else format_count(value)


def change_text(figure: Figure) -> str:
    """Return how a figure changed from the first run to the last: ``+1.00 GiB (+12 %)``."""
    delta, first = figure.delta, figure.values[0]
    if delta is None:
        return ""
    if delta == 0:
        return "="
    shown = signed(delta) if figure.unit == "bytes" else f"{'+' if delta > 0 else ''}{delta:,}"
    share = share_text(delta, first or 0)
    return f"{shown} ({share})" if share else shown


def share_text(delta: int, first: int) -> str:
    """Return a change in per cent with its sign, "" where there was nothing."""
    if first <= 0:
        return ""
    return f"{'+' if delta > 0 else '-'}{format_share(abs(delta), first)}"


def signed(n_bytes: float) -> str:
    """Return a size with its sign."""
    return f"{'+' if n_bytes > 0 else ''}{format_size(n_bytes)}"


def file_name(place: Location) -> str:
    """Return the last part of a path."""
    return place.filename.replace("\\", "/").rsplit("/", 1)[-1] or "(unknown file)"


def line_place(change: LineChange, *, short: bool = False) -> str:
    """Return where a line is, and where it was: ``train.py:88 -> :93 in forward``."""
    before, after = change.before, change.after
    place = after or before
    if place is None:
        return NO_STACK
    old = before or place
    name_old = file_name(old) if short else old.filename or "(unknown file)"
    name_new = file_name(place) if short else place.filename or "(unknown file)"
    function = f" in {place.function}" if place.function else ""
    if file_name(old) != file_name(place):
        return f"{name_old}{_number(old)} -> {name_new}{_number(place)}{function}"
    if old.line != place.line:
        return f"{name_new}{_number(old)} -> {_number(place)}{function}"
    return f"{name_new}{_number(place)}{function}"


def _number(place: Location) -> str:
    return f":{place.line}" if 0 < place.line < 2**31 else ""


def blocks_text(change: LineChange) -> str:
    """Return how many blocks a line holds, before and after."""
    a, b = change.before_blocks, change.after_blocks
    return format_count(a) if a == b else f"{format_count(a)} -> {format_count(b)}"


def sizes_text(change: SizeChange) -> str:
    """Return how the sizes that a line asks for changed, in one clause."""
    if change.factor is not None:
        before, after = format_size(change.before_bytes), format_size(change.after_bytes)
        return f"asks {change.factor:.3g}x: {before} -> {after}"
    parts = []
    if change.new:
        parts.append(f"new sizes {_sizes(change.new, change.n_new)}")
    if change.gone:
        parts.append(f"gone {_sizes(change.gone, change.n_gone)}")
    return "; ".join(parts)


def _sizes(sizes: Sequence[int], total: int) -> str:
    shown = [format_size(s) for s in sizes[:3]]
    more = f" and {format_count(total - len(shown))} more" if total > len(shown) else ""
    return ", ".join(shown) + more


def is_shown(change: LineChange) -> bool:
    """Return whether a line matters at the compared moment: other bytes, or other sizes."""
    holds = change.before_bytes or change.after_bytes
    return bool(change.delta_bytes or (change.sizes is not None and holds))


def unseen_text(comparison: Comparison) -> str:
    """Return how many new and gone lines hold nothing at the compared moment."""
    idle = [c for c in comparison.lines if not is_shown(c)]
    n_new = sum(c.kind is LineKind.NEW for c in idle)
    n_gone = sum(c.kind is LineKind.GONE for c in idle)
    parts = [f"{n} {word}" for n, word in ((n_new, "new"), (n_gone, "gone")) if n]
    lines = "line holds" if n_new + n_gone == 1 else "lines hold"
    return f"Besides, {' and '.join(parts)} {lines} nothing at that moment." if parts else ""


def explained_text(comparison: Comparison) -> str:
    """Return how much of the difference the lines add up to."""
    delta, told = comparison.delta_bytes, comparison.explained_bytes
    if delta is None or told is None or delta == 0:
        return ""
    named = f"Lines with a stack add up to {signed(told)} of {signed(delta)}"
    if told == delta:
        return f"{named}: all of it."
    share = told / delta
    if 0 <= share <= 1:
        return f"{named} ({format_share(share, 1)}); the rest has no Python stack."
    return f"{named}; what has no Python stack went the other way."
