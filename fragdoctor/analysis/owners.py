"""Which blocks of a trace the names in a census hold, matched by address, and which names grow.

A block that a census names has that owner for its whole life. So at any other moment of the trace,
names are known for the blocks that were live both then and at the census.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from operator import itemgetter
from typing import Final

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from fragdoctor.analysis.modules import UNTOLD, ModulePaths, module_table
from fragdoctor.analysis.result import DeviceAnalysis
from fragdoctor.model.arrays import distinct, largest_groups, sum_by
from fragdoctor.model.census import Census, HoldingKind, Owner
from fragdoctor.model.modules import ModuleMemory
from fragdoctor.model.phases import Category
from fragdoctor.model.snapshot import I32, I64
from fragdoctor.trace.trace import Trace

_Alike = tuple[str, HoldingKind, str]
_INDEX: Final = re.compile(r"\[\d+\]|(?<=\.)\d+(?=\.|$)")
_SAME_SHARE: Final = 0.9
_KEEPS: Final = (HoldingKind.CONTAINER, HoldingKind.CYCLE)
_WEIGHTS: Final = (HoldingKind.PARAMETERS, HoldingKind.CONTAINER)
_HELD: Final = {
    HoldingKind.PARAMETERS: Category.PARAMETERS,
    HoldingKind.GRADIENTS: Category.GRADIENTS,
    HoldingKind.OPTIMIZER: Category.OPTIMIZER_STATE,
}
_MOST_COMPARED: Final = 50
_LEAST_SAMPLE: Final = 20
"""Fewest blocks of a stack that a census must have seen: nine tenths of fewer say little."""


class NamedBlocks(Struct, frozen=True, eq=False):
    """Who holds the blocks of one device.

    Attributes:
        owners: the owners in all censuses; similar ones are merged into ``layers[*].cache``.
        of_row: ``int32[n]``, index into ``owners`` for each row of ``Lives``; -1 without a name.
    """

    owners: Sequence[Owner]
    of_row: I32


class OwnerGrowth(Struct, frozen=True):
    """How much more a name holds in the last census than in the first."""

    n_bytes: int
    n_items_before: int


def general(name: str) -> str:
    """Return a name with ``*`` for its numbers, so that equal layers share one name."""
    return _INDEX.sub(lambda m: "[*]" if m[0][0] == "[" else "*", name)


def named_blocks(trace: Trace, censuses: Sequence[Census]) -> NamedBlocks | None:
    """Return who holds the blocks of a device, or None if no census covers the device."""
    lives = trace.lives
    of_row = np.full(len(lives), -1, np.int32)
    owners: list[Owner] = []
    places: dict[_Alike, int] = {}
    for i, census in enumerate(censuses):
        mine = np.flatnonzero((census.device == trace.device) & (census.holder >= 0))
        if not len(mine):
            continue
        is_last = i == len(censuses) - 1
        rows = lives.allocated_at(len(trace.events) if is_last else _state_at(trace, census))
        held = _blocks_at(trace, rows, census.address[mine])
        merged = _merged(census, is_last, owners, places)
        found = held >= 0
        of_row[held[found]] = merged[census.holder[mine[found]]]
        if is_last and not census.is_complete:
            _fill_up(trace, rows, of_row)
    return NamedBlocks(tuple(owners), of_row) if owners else None


def _fill_up(trace: Trace, rows: I64, of_row: I32) -> None:
    """Give blocks that a cut census missed the owner of nearly all seen blocks of their stack.

    A census that ran out of time has looked at an even sample of the tensors.
    """
    stack, place = trace.lives.stack[rows], of_row[rows]
    seen = place >= 0
    for one in distinct(stack[seen & (stack >= 0)]).tolist():
        known = place[seen & (stack == one)]
        sums = largest_groups(known, np.ones(len(known), np.int64))
        n_seen = int(sums.n_bytes.sum())
        if n_seen >= _LEAST_SAMPLE and sums.n_bytes[0] >= _SAME_SHARE * n_seen:
            of_row[rows[(stack == one) & ~seen]] = int(sums.group[0])


def _state_at(trace: Trace, census: Census) -> int:
    """Return the number of the device's events before a census."""
    return int(np.searchsorted(trace.events.time_us, census.time_us, "right"))


def _blocks_at(
    trace: Trace, rows: I64, address: np.ndarray[tuple[int], np.dtype[np.uint64]]
) -> I64:
    """Return which of these rows has the block that contains each address; -1 if none does."""
    if not len(rows):
        return np.full(len(address), -1, np.int64)
    order = np.argsort(trace.lives.address[rows], kind="stable")
    begin = trace.lives.address[rows][order]
    at = np.searchsorted(begin, address, "right") - 1
    inside = np.maximum(at, 0)
    offset = address - begin[inside]
    size = trace.lives.size_bytes[rows][order][inside].astype(np.uint64)
    return np.where((at >= 0) & (offset < size), rows[order][inside], -1)


def _merged(
    census: Census, is_last: bool, owners: list[Owner], places: dict[_Alike, int]
) -> I32:  # fmt: skip
    """Return the index of each owner of a census in ``owners``; the last census's figures win."""
    alike: dict[_Alike, list[Owner]] = {}
    for owner in census.owners:
        alike.setdefault((general(owner.name), owner.kind, owner.scope), []).append(owner)
    for key, same in alike.items():
        one = same[0]
        if len({o.name for o in same}) > 1:
            n_items, most = sum(o.n_items for o in same), sum(o.max_items for o in same)
            one = replace(one, name=key[0], n_items=n_items, max_items=most)
        if key not in places:
            places[key] = len(owners)
            owners.append(one)
        elif is_last:
            owners[places[key]] = one
    keys = ((general(o.name), o.kind, o.scope) for o in census.owners)
    return np.array([places[key] for key in keys], np.int32)


def module_memory(
    analysis: DeviceAnalysis, censuses: Sequence[Census] = ()
) -> tuple[ModuleMemory, ...]:
    """Return the outermost modules with what they held at the peak of allocated bytes.

    The result is empty if no module is recorded.
    """
    trace, totals = analysis.trace, analysis.timeline
    state = analysis.n_events if totals is None else totals.peak_allocated_state
    paths = module_parts(trace, ModulePaths.of(trace), censuses)
    return module_table(trace, state, paths, analysis.category)


def module_parts(trace: Trace, paths: ModulePaths, censuses: Sequence[Census]) -> ModulePaths:
    """Return the modules of blocks, with the modules that the censuses name for blocks put in."""
    places = {path: at for at, path in enumerate(paths.paths)}
    of_row, category = paths.of_row.copy(), paths.category.copy()
    for i, census in enumerate(censuses):
        kind = np.array([_HELD.get(o.kind, UNTOLD) for o in census.owners] + [UNTOLD], np.uint8)
        held = kind[census.holder]
        mine = np.flatnonzero((census.device == trace.device) & (held != UNTOLD))
        mine = mine[census.part[mine] >= 0] if len(census.part) else mine[:0]
        is_last = i == len(censuses) - 1
        state = len(trace.events) if is_last else _state_at(trace, census)
        block = _blocks_at(trace, trace.lives.allocated_at(state), census.address[mine])
        found = block >= 0
        place = np.array([places.setdefault(p, len(places)) for p in census.paths], np.int32)
        of_row[block[found]] = place[census.part[mine[found]]]
        category[block[found]] = held[mine[found]]
    return ModulePaths(tuple(places), of_row, category)


def growth_of(owner: Owner, censuses: Sequence[Census]) -> OwnerGrowth | None:
    """Return how much a container or cycle grew since the first census, or None.

    A graph is that of the step under way: between steps, where the first census looks, it is gone.
    """
    if len(censuses) < 2 or owner.kind not in _KEEPS:
        return None
    before, n_items = _held_in(owner, censuses[0])
    after, _ = _held_in(owner, censuses[-1])
    return OwnerGrowth(after - before, n_items) if after > before else None


def _held_in(owner: Owner, census: Census) -> tuple[int, int]:
    """Return bytes and items of an owner; a container with one item goes by its item's name."""
    n_bytes = n_items = 0
    for other, held in zip(census.owners, census.bytes_by_owner, strict=True):
        name = general(other.name)
        is_it = name == general(owner.name) and other.kind is owner.kind
        if other.scope == owner.scope and (is_it or name.startswith(f"{general(owner.name)}[")):
            n_bytes += held
            n_items += other.n_items if is_it else 1
    return n_bytes, n_items


def main_owner(named: NamedBlocks, rows: I64, sizes: I64) -> Owner | None:
    """Return who holds most of some blocks, or None if no name holds half of their bytes.

    What ``trials[*].model`` and ``trials[*].optimizer.state`` hold, ``trials`` holds. If its items
    are small beside the graph behind them, it is the graph that holds.
    """
    place = named.of_row[rows]
    sums = sum_by(place[place >= 0], sizes[place >= 0], len(named.owners)).tolist()
    by_root: dict[tuple[str, str], list[tuple[int, Owner]]] = {}
    for n_bytes, owner in zip(sums, named.owners, strict=True):
        by_root.setdefault((owner.scope, _root(owner.name)), []).append((n_bytes, owner))
    (scope, name), mine = max(by_root.items(), key=lambda root: sum(n for n, _ in root[1]))
    total, graphs = sum(n for n, _ in mine), [o for o in mine if o[1].kind is HoldingKind.GRAPH]
    if not total or 2 * total < sizes.sum():
        return None
    if 2 * sum(n for n, _ in graphs) > total:
        mine = [max(graphs, key=itemgetter(0))]
    if len(mine) == 1:
        return mine[0][1]
    whole = next((o for _, o in mine if o.name == name), None)
    return whole or Owner(name, HoldingKind.CONTAINER, scope=scope)


def _root(name: str) -> str:
    """Return the name of the container that an item belongs to, or the name itself."""
    return name.partition("[")[0]


def held_twice(censuses: Sequence[Census], least_bytes: int) -> tuple[Owner, Owner, int] | None:
    """Return two owners of storages of the same sizes and the bytes that match, or None.

    At least one of the two holds parameters. Gradients and optimizer state do not count: they have
    the same sizes as parameters for a reason.
    """
    if not censuses:
        return None
    last = censuses[-1]
    known = [
        i
        for i, n in enumerate(last.bytes_by_owner)
        if n >= least_bytes and last.owners[i].kind in _WEIGHTS
    ]  # fmt: skip
    sizes = {i: Counter(last.size_bytes[last.holder == i].tolist()) for i in known[:_MOST_COMPARED]}
    for first, second in combinations(sizes, 2):
        if HoldingKind.PARAMETERS not in (last.owners[first].kind, last.owners[second].kind):
            continue
        both = sum(size * n for size, n in (sizes[first] & sizes[second]).items())
        larger = max(sum(s * n for s, n in sizes[i].items()) for i in (first, second))
        if both >= _SAME_SHARE * larger:
            return last.owners[first], last.owners[second], both
    return None
