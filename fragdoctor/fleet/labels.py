"""What a rank is called in a report, and in which order ranks stand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from fragdoctor.model.fleet import RankSummary


def ordered(ranks: Sequence[RankSummary]) -> list[RankSummary]:
    """Return the ranks by number; those without one by host, local rank and path after them."""
    return sorted(
        ranks,
        key=lambda r: (
            r.rank is None,
            r.rank or 0,
            r.job,
            r.host,
            -1 if r.local_rank is None else r.local_rank,
            r.path,
        ),
    )


def labels_of(ranks: Sequence[RankSummary]) -> Mapping[str, str]:
    """Return a short label for each path; no two ranks have the same.

    ``rank 5``, ``host 1 rank 0`` or ``host 1 local rank 0``, and the path where that is not enough.
    """
    by_rank = {r.path: "" if r.rank is None else f"rank {r.rank}" for r in ranks}
    by_host = {r.path: _with_host(r) for r in ranks}
    n_rank, n_host = Counter(by_rank.values()), Counter(by_host.values())
    tails = _tails([r.path for r in ranks])
    labels: dict[str, str] = {}
    for r in ranks:
        short, longer = by_rank[r.path], by_host[r.path]
        if short and n_rank[short] == 1:
            labels[r.path] = short
        elif longer and n_host[longer] == 1:
            labels[r.path] = longer
        else:
            labels[r.path] = f"{short} ({tails[r.path]})" if short else tails[r.path]
    return labels


def _with_host(rank: RankSummary) -> str:
    if not rank.host:
        return ""
    if rank.rank is not None:
        return f"host {rank.host} rank {rank.rank}"
    return "" if rank.local_rank is None else f"host {rank.host} local rank {rank.local_rank}"


def _tails(paths: Sequence[str]) -> Mapping[str, str]:
    """Return the paths without the folders that all have in common."""
    parts = {p: p.replace("\\", "/").split("/") for p in paths}
    folders = [words[:-1] for words in parts.values()]
    common = 0
    while folders and all(len(f) > common and f[common] == folders[0][common] for f in folders):
        common += 1
    tails = {p: "/".join(words[common:]) for p, words in parts.items()}
    return tails if len(set(tails.values())) == len(tails) else {p: p for p in paths}
