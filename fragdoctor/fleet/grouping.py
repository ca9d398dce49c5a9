"""Groups of alike ranks. A function of the set of ranks: their order does not matter.

Two ranks are alike if their verdict and settings are the same, their peaks are near, and every
line holds nearly the same. Groups are the connected components of that relation, so that a
continuum (batches of varying length) is one group, and a rank beyond a gap is another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence

from fragdoctor.fleet.neighbours import join_alike
from fragdoctor.fleet.spots import Spot, spots_of
from fragdoctor.model.fleet import RankSummary


def find_groups(ranks: Sequence[RankSummary]) -> list[tuple[str, ...]]:
    """Return the paths of alike ranks, sorted; the largest group first, then by its first path."""
    by_kind: dict[Hashable, list[Spot]] = defaultdict(list)
    for spot in sorted(spots_of(ranks), key=lambda s: (-1 if s.peak is None else s.peak, s.paths)):
        by_kind[spot.kind].append(spot)
    found: list[tuple[str, ...]] = []
    for spots in by_kind.values():
        groups: dict[int, list[str]] = defaultdict(list)
        for spot, group in zip(spots, join_alike(spots).tolist(), strict=True):
            groups[group] += spot.paths
        found += (tuple(sorted(paths)) for paths in groups.values())
    return sorted(found, key=lambda g: (-len(g), g))
