"""Matches the source lines of two runs, although the program was edited in between."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from itertools import islice
from typing import Final

import numpy as np

from fragdoctor.comparison.line_uses import LineUse
from fragdoctor.future.alignment import NEVER, cheapest_pairs
from fragdoctor.model.finding import Location, n_shared, path_parts

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
