"""What happened to each source line: grew, shrank, new, gone, or other sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fragdoctor.comparison.line_matching import match_lines
from fragdoctor.comparison.line_uses import LineUse
from fragdoctor.model.comparison import LineChange, LineKind, SizeChange

MAX_SHOWN_SIZES: Final = 8
FACTOR_SLACK: Final = 0.02
"""Sizes whose ratios differ by less than this changed by the same factor."""

MIN_FACTOR_SHARE: Final = 0.5
"""Share of a line's bytes that one factor must cover."""


def line_changes(
    before: Sequence[LineUse], after: Sequence[LineUse], *, peak: bool
) -> tuple[LineChange, ...]:
    """Return every line of either run, those that changed most first.

    With ``peak``, the peaks are compared; otherwise what is live now.
    """
    changes = [
        _change(None if i is None else before[i], None if j is None else after[j], peak=peak)
        for i, j in match_lines(before, after)
    ]
    changes.sort(key=lambda c: (-abs(c.delta_bytes), -max(c.before_bytes, c.after_bytes)))
    return tuple(changes)


_UNUSED: Final = LineUse(None, 0, 0, 0, 0, 0)


def _change(a: LineUse | None, b: LineUse | None, *, peak: bool) -> LineChange:
    before, after = a or _UNUSED, b or _UNUSED
    old, new = before.bytes_at(peak=peak), after.bytes_at(peak=peak)
    return LineChange(
        kind=_kind(a, b, old, new),
        before=before.place,
        after=after.place,
        before_bytes=old,
        after_bytes=new,
        before_blocks=before.blocks_at(peak=peak),
        after_blocks=after.blocks_at(peak=peak),
        sizes=None if a is None or b is None else size_change(a, b),
    )


def _kind(a: LineUse | None, b: LineUse | None, old: int, new: int) -> LineKind:
    if a is None:
        return LineKind.NEW
    if b is None:
        return LineKind.GONE
    if old == new:
        return LineKind.SAME
    return LineKind.GREW if new > old else LineKind.SHRANK


def size_change(a: LineUse, b: LineUse) -> SizeChange | None:
    """Return how the sizes that a line asks for changed, or None if they did not."""
    sizes_a, sizes_b = dict(a.sizes), dict(b.sizes)
    new = [s for s in sizes_b if s not in sizes_a]
    gone = [s for s in sizes_a if s not in sizes_b]
    if not new and not gone:
        return None
    return SizeChange(
        factor=_factor(a, b),
        before_bytes=a.sizes[0][0],
        after_bytes=b.sizes[0][0],
        new_bytes=tuple(new[:MAX_SHOWN_SIZES]),
        gone_bytes=tuple(gone[:MAX_SHOWN_SIZES]),
        n_new=len(new),
        n_gone=len(gone),
    )


def _factor(a: LineUse, b: LineUse) -> float | None:
    """Return the single factor by which sizes changed, or None if there is none.

    If both ask for equally many sizes, they are paired in order, and the factor must hold for those
    with most of the bytes. Otherwise, the sizes that make up most of either side's bytes are
    compared. Sizes that vary in both (a new length each step) have no factor.
    """
    is_whole = a.n_sizes <= len(a.sizes) and b.n_sizes <= len(b.sizes)
    if a.n_sizes != b.n_sizes or not is_whole:
        return _typical_factor(a, b)
    pairs = list(zip(sorted(a.sizes), sorted(b.sizes), strict=True))
    ratios = [(y / x, x * n) for (x, n), (y, _) in pairs if x > 0]
    whole = sum(weight for _, weight in ratios)
    changed = [(r, w) for r, w in ratios if abs(r - 1) > FACTOR_SLACK]
    if not changed or not whole:
        return None
    factor = max(changed, key=lambda rw: rw[1])[0]
    fits = sum(w for r, w in ratios if abs(r / factor - 1) <= FACTOR_SLACK)
    return factor if fits >= MIN_FACTOR_SHARE * whole else None


def _typical_factor(a: LineUse, b: LineUse) -> float | None:
    """Return the ratio of the sizes with most of the bytes, or None if no size has most."""
    ratios = []
    for use in (a, b):
        size, count = use.sizes[0]
        if size * count < MIN_FACTOR_SHARE * sum(s * n for s, n in use.sizes):
            return None
        ratios.append(size)
    factor = ratios[1] / max(ratios[0], 1)
    return factor if ratios[0] and abs(factor - 1) > FACTOR_SLACK else None


def size_part(change: LineChange) -> int:
    """Return the part of a line's change that comes from the size of its blocks."""
    n_old, n_new = change.before_blocks, change.after_blocks
    if not n_old or not n_new or change.sizes is None:
        return 0
    return round(change.after_bytes / n_new * n_old) - change.before_bytes
