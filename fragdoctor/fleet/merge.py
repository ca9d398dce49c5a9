"""Merging: fleets are sets of ranks, so that order, chunks and repeats do not matter.

``merge`` is associative, commutative and idempotent. Where both sides know a rank, the better
summary stays, by a total order: read before unread, replayed before not, then by its text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from fragdoctor.model.fleet import FleetSummary, RankSummary

EMPTY = FleetSummary()


def fleet_of(ranks: Iterable[RankSummary]) -> FleetSummary:
    """Return the fleet of some ranks; of several summaries of one path the best stays."""
    best: dict[str, RankSummary] = {}
    for summary in ranks:
        known = best.get(summary.path)
        best[summary.path] = summary if known is None else better(known, summary)
    return FleetSummary(tuple(best[path] for path in sorted(best)))


def merge(a: FleetSummary, b: FleetSummary) -> FleetSummary:
    """Return the ranks of both."""
    return fleet_of((*a.ranks, *b.ranks))


def merge_all(fleets: Iterable[FleetSummary]) -> FleetSummary:
    """Return the ranks of all."""
    return fleet_of(summary for fleet in fleets for summary in fleet.ranks)


def better(a: RankSummary, b: RankSummary) -> RankSummary:
    """Return the summary that says more; which one is first does not matter."""
    return a if a == b or _order(a) > _order(b) else b


def _order(summary: RankSummary) -> tuple[bool, bool, str]:
    text = json.dumps(summary.as_dict(), sort_keys=True)
    return summary.is_read, summary.is_replayed, text
