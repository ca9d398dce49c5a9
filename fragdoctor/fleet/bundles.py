"""Bundles of ``fragdoctor run`` as ranks: a process may have left several of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fragdoctor.errors import InputError
from fragdoctor.intake.bundle import is_bundle, open_bundle
from fragdoctor.intake.collection import FoundBundle, telling_order

Process = tuple[str, int | None, int]


def one_of_each_process(paths: Sequence[str]) -> list[str]:
    """Return the paths without the bundles of processes that left a more telling one.

    What is no bundle, or does not say which process it is of, stays.
    """
    best: dict[Process, FoundBundle] = {}
    kept = []
    for path in paths:
        found = _read(path)
        if found is None or found.facts.pid is None:
            kept.append(path)
            continue
        process = (found.facts.host, found.facts.rank, found.facts.pid)
        known = best.get(process)
        if known is None or telling_order(found) < telling_order(known):
            best[process] = found
    chosen = {str(b.path) for b in best.values()} | set(kept)
    return [path for path in paths if str(Path(path)) in chosen or path in chosen]


def _read(path: str) -> FoundBundle | None:
    if "://" in path or not is_bundle(path):
        return None
    try:
        with open_bundle(path) as bundle:
            return FoundBundle(Path(path), bundle.facts)
    except InputError:
        return None  # it will be a row with its reason
