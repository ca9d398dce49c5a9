"""The source lines of two runs: what each asked for and holds, which are the same, what changed."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from itertools import islice
from typing import Final

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from fragdoctor.future.alignment import NEVER, cheapest_pairs
from fragdoctor.model.arrays import sum_by
from fragdoctor.model.comparison import LineChange, LineKind, SizeChange
from fragdoctor.model.finding import Location, n_shared, path_parts
from fragdoctor.model.snapshot import I64, Snapshot
from fragdoctor.trace.trace import Trace

MAX_LINES: Final = 2000
"""The most lines to treat one by one; the smaller ones are summed up."""

MAX_SIZES: Final = 64
MAX_STACKS: Final = 32
MAX_DEPTH: Final = 4096


class LineUse(Struct, frozen=True):
    """Everything that one source line asked for.

    Attributes:
        place: the line; None for blocks without a stack, and for the sum of the smallest lines.
        peak_bytes, n_peak, now_bytes, n_now: live blocks at the two moments.
        n_requests: total number of blocks.
        sizes: (requested size, number of requests), those with most bytes first.
        n_sizes: total number of distinct sizes.
        callees: functions between the line and the allocation: what the line calls.
    """

    place: Location | None
    peak_bytes: int
    n_peak: int
    now_bytes: int
    n_now: int
    n_requests: int
    sizes: tuple[tuple[int, int], ...] = ()
    n_sizes: int = 0
    callees: frozenset[str] = frozenset()

    def bytes_at(self, *, peak: bool) -> int:
        """Return the live bytes at the peak, or now."""
        return self.peak_bytes if peak else self.now_bytes

    def blocks_at(self, *, peak: bool) -> int:
        """Return the live blocks at the peak, or now."""
        return self.n_peak if peak else self.n_now


def line_uses(trace: Trace, peak: int | None) -> tuple[tuple[LineUse, ...], int]:
    """Return the memory of every source line, largest first, and how many were merged into one."""
    snapshot, lives = trace.snapshot, trace.lives
    frame = trace.stacks.lines_of(lives.stack).astype(np.int64)
    groups, member = np.unique(frame, return_inverse=True)
    member = member.reshape(-1)
    n = len(groups)
    now = np.flatnonzero(lives.survives)
    at_peak = now if peak is None else lives.allocated_at(peak)
    columns = np.stack(
        [
            sum_by(member[at_peak], lives.size_bytes[at_peak], n),
            np.bincount(member[at_peak], minlength=n),
            sum_by(member[now], lives.size_bytes[now], n),
            np.bincount(member[now], minlength=n),
            np.bincount(member, minlength=n),
        ],
        axis=1,
    )
    asked = sum_by(member, lives.requested_bytes, n)
    order = np.lexsort((-asked, -np.maximum(columns[:, 0], columns[:, 2])))
    sizes = _sizes(member, lives.requested_bytes, n)
    stacks_of: dict[int, list[int]] = defaultdict(list)
    stacks, first = np.unique(lives.stack, return_index=True)
    for stack, group in zip(stacks.tolist(), member[first].tolist(), strict=True):
        if stack >= 0:
            stacks_of[group].append(stack)
    kept = [
        replace(
            LineUse(snapshot.location(int(groups[g])), *columns[g].tolist()),
            sizes=sizes[g][0],
            n_sizes=sizes[g][1],
            callees=_callees(snapshot, stacks_of[g], int(groups[g])),
        )
        for g in order[:MAX_LINES].tolist()
    ]
    rest = order[MAX_LINES:]
    if len(rest):
        kept.append(LineUse(None, *columns[rest].sum(axis=0).tolist()))
    return tuple(kept), len(rest)


def merged(lines: Sequence[LineUse]) -> LineUse:
    """Return all lines as one without a place: all that remains if a run has no stacks."""
    sizes: Counter[int] = Counter()
    for use in lines:
        sizes.update(dict(use.sizes))
    ranked = sorted(sizes.items(), key=lambda sn: -sn[0] * sn[1])
    sums = ("peak_bytes", "n_peak", "now_bytes", "n_now", "n_requests")
    whole = LineUse(None, *(sum(getattr(use, name) for use in lines) for name in sums))
    return replace(whole, sizes=tuple(ranked[:MAX_SIZES]) or ((0, 0),), n_sizes=len(ranked))


def _sizes(member: I64, requested: I64, n: int) -> list[tuple[tuple[tuple[int, int], ...], int]]:
    """Return for each group its sizes with their counts, and how many sizes there are."""
    values, rank = np.unique(requested, return_inverse=True)
    width = max(1, len(values))
    keys, count = np.unique(member * width + rank.reshape(-1), return_counts=True)
    group, size = keys // width, values[keys % width] if len(values) else keys
    order = np.lexsort((-size * count, group))
    group, size, count = group[order], size[order], count[order]
    start = np.searchsorted(group, np.arange(n + 1))
    result = []
    for g in range(n):
        low, high = int(start[g]), int(start[g + 1])
        top = slice(low, min(high, low + MAX_SIZES))
        pairs = zip(size[top].tolist(), count[top].tolist(), strict=True)
        result.append((tuple(pairs), high - low))
    return result


def _callees(snapshot: Snapshot, stacks: Sequence[int], frame: int) -> frozenset[str]:
    """Return the names of the functions between a line and its allocations."""
    found: set[str] = set()
    table = snapshot.stacks
    for stack in stacks[:MAX_STACKS]:
        low, high = int(table.offsets[stack]), int(table.offsets[stack + 1])
        ids = table.frames[low : min(high, low + MAX_DEPTH)].tolist()  # a stack may be endless
        inner = ids[: ids.index(frame)] if frame in ids else []
        found |= {snapshot.strings[int(snapshot.frames.name[i])][:200] for i in inner[:64]}
    return frozenset(found)


MIN_SCORE: Final = 1.0
"""Two lines of a function with a lower score are not the same line."""

PARTS: Final = 100_000
"""Parts of a score of 1 that are told apart; prices are whole numbers."""

MAX_CELLS: Final = 10_000
"""The most pairs of lines to compare in one function; larger ones are matched by line number."""

MAX_ALL_CELLS: Final = 40_000
"""The most pairs to compare in all functions: a second or two, far more than programs have."""

MIN_FILE_LIKENESS: Final = 0.5
MAX_NAMESAKES: Final = 64
"""Most files of one name that a file is compared with; packages have that many ``__init__.py``."""

MAX_RENAMED: Final = 64

Pair = tuple[int | None, int | None]


def match_lines(before: Sequence[LineUse], after: Sequence[LineUse]) -> list[Pair]:
    """Return pairs of indices into both lists; None for a line without a counterpart.

    Lines without a place (no stack) are matched with each other.
    """
    files = match_files(before, after)
    groups_a, groups_b = _by_function(before), _by_function(after)
    pairs: list[Pair] = []
    budget = MAX_ALL_CELLS
    for (filename, function), rows in groups_a.items():
        partner = files.get(filename)
        others = [] if partner is None else groups_b.get((partner, function), [])
        ours, theirs = [before[i] for i in rows], [after[j] for j in others]
        if len(ours) * len(theirs) <= min(MAX_CELLS, budget):
            budget -= len(ours) * len(theirs)
            matched = align(ours, theirs)
        else:  # by line number
            numbers = {_line(b): j for j, b in enumerate(theirs)}
            matched = [(i, numbers[_line(a)]) for i, a in enumerate(ours) if _line(a) in numbers]
        pairs += [(rows[i], others[j]) for i, j in matched]
    pairs += _without_place(before, after)
    taken_a, taken_b = ({pair[side] for pair in pairs} for side in (0, 1))
    gone: list[Pair] = [(i, None) for i in range(len(before)) if i not in taken_a]
    new: list[Pair] = [(None, j) for j in range(len(after)) if j not in taken_b]
    return [*pairs, *gone, *new]


def match_files(before: Sequence[LineUse], after: Sequence[LineUse]) -> dict[str, str]:
    """Return for each file of one run the same file of the other run."""
    own_a, own_b = _profiles(before), _profiles(after)
    parts_a = {f: path_parts(f) for f in own_a}
    parts_b = {f: path_parts(f) for f in own_b}
    by_name: dict[str, list[str]] = defaultdict(list)
    for f, parts in parts_b.items():
        if parts:
            by_name[parts[0]].append(f)

    result = {f: f for f in own_a if f in own_b}
    candidates = (
        (n_shared(pa, parts_b[g]), likeness(own_a[f], own_b[g]), f, g)
        for f, pa in parts_a.items()
        if pa and f not in result
        for g in by_name.get(pa[0], [])[:MAX_NAMESAKES]
        if g not in result
    )
    result |= _best_pairs(list(islice(candidates, MAX_CELLS)))
    # A copy under another name, or a notebook cell: recognized by its content.
    left_a = [f for f in own_a if f not in result][:MAX_RENAMED]
    taken = set(result.values())
    left_b = [g for g in own_b if g not in taken][:MAX_RENAMED]
    renamed = [
        (0, score, f, g)
        for f in left_a
        for g in left_b
        if (score := likeness(own_a[f], own_b[g])) >= MIN_FILE_LIKENESS
    ]
    return result | _best_pairs(renamed)


def likeness(a: dict[str, set[int]], b: dict[str, set[int]]) -> float:
    """Return how alike two files are, 0..1: shared functions, and the sizes requested in them."""
    shared = a.keys() & b.keys()
    if not shared:
        return 0.0
    functions = len(shared) / len(a.keys() | b.keys())
    sizes = sum(_jaccard(a[name], b[name]) for name in shared) / len(shared)
    only_top_level = shared == {"<module>"}
    return sizes if only_top_level else max(functions, (functions + sizes) / 2)


def align(before: Sequence[LineUse], after: Sequence[LineUse]) -> list[tuple[int, int]]:
    """Return the pairs of two functions' lines, in order; the other lines stay unpaired.

    Both are in the order of their line numbers.
    """
    if not before or not after:
        return []
    sizes_a = [frozenset(s for s, _ in a.sizes) for a in before]
    sizes_b = [frozenset(s for s, _ in b.sizes) for b in after]
    scores = np.array(
        [
            [
                _score(a, b, _jaccard(sizes_a[i], sizes_b[j])) + 0.5 * (_line(a) == _line(b))
                for j, b in enumerate(after)
            ]
            for i, a in enumerate(before)
        ]
    )
    return cheapest_pairs(np.where(scores < MIN_SCORE, NEVER, -PARTS * scores), 0)


def _score(a: LineUse, b: LineUse, sizes: float) -> float:
    """Return how likely two lines of one function are the same line."""
    calls = _jaccard(a.callees, b.callees)
    often = min(a.n_requests, b.n_requests) / max(a.n_requests, b.n_requests, 1)
    kinds = min(a.n_sizes, b.n_sizes) / max(a.n_sizes, b.n_sizes, 1)
    return 1.2 * calls + sizes + 0.3 * often + 0.3 * kinds


def _jaccard(
    a: AbstractSet[int] | AbstractSet[str], b: AbstractSet[int] | AbstractSet[str]
) -> float:
    if not a and not b:
        return 1.0
    n_both = len(a & b)
    return n_both / (len(a) + len(b) - n_both)


def _line(use: LineUse) -> int:
    return 0 if use.place is None else min(use.place.line, 2**40)


def _by_function(lines: Sequence[LineUse]) -> dict[tuple[str, str], list[int]]:
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for i, use in enumerate(lines):
        if use.place is not None:
            groups[use.place.filename, use.place.function].append(i)
    for rows in groups.values():
        rows.sort(key=lambda i: _line(lines[i]))
    return groups


def _profiles(lines: Sequence[LineUse]) -> dict[str, dict[str, set[int]]]:
    """Return the functions of each file, with the sizes that they ask for."""
    files: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for use in lines:
        if use.place is not None:
            files[use.place.filename][use.place.function] |= {s for s, _ in use.sizes}
    return files


def _best_pairs(candidates: Sequence[tuple[int, float, str, str]]) -> dict[str, str]:
    """Return pairs, the best first, using each file only once."""
    result: dict[str, str] = {}
    taken: set[str] = set()
    for _, _, f, g in sorted(candidates, key=lambda c: (-c[0], -c[1], c[2], c[3])):
        if f not in result and g not in taken:
            result[f] = g
            taken.add(g)
    return result


def _without_place(before: Sequence[LineUse], after: Sequence[LineUse]) -> list[Pair]:
    """Return the pairs of requests without a stack, and of merged lines (no sizes)."""
    pairs: list[Pair] = []
    for merged in (False, True):
        rows = [i for i, u in enumerate(before) if u.place is None and (not u.sizes) == merged]
        others = [j for j, u in enumerate(after) if u.place is None and (not u.sizes) == merged]
        pairs += zip(rows, others, strict=False)
    return pairs


def line_tracks(
    runs: Sequence[Sequence[LineUse]], *, peak: bool
) -> list[tuple[Location | None, list[int]]]:
    """Return each line's newest place and its bytes in every run, 0 if the run lacks the line."""
    tracks: list[tuple[Location | None, list[int]]] = []
    current: dict[int, int] = {}  # row of the current run -> track
    for run, lines in enumerate(runs):
        before, current = current, {}
        pairs = match_lines(runs[run - 1], lines) if run else [(None, j) for j in range(len(lines))]
        for i, j in pairs:
            if j is None:
                continue
            track = None if i is None else before.get(i)
            values = [0] * len(runs) if track is None else tracks[track][1]
            values[run] = lines[j].bytes_at(peak=peak)
            current[j] = len(tracks) if track is None else track
            tracks[current[j] : current[j] + 1] = [(lines[j].place, values)]
    return tracks


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
