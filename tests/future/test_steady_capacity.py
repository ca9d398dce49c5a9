"""The capacity from which on a run fits: on less it may fit too, by luck."""

from __future__ import annotations

import random

import pytest
from builders import BASE, MIB, alloc, block, columns, free, segment, segment_alloc, snapshot
from programs import reproduced

from fragdoctor.future.edits import without_noted
from fragdoctor.future.search import with_smallest_capacity
from fragdoctor.future.simulator import simulate
from fragdoctor.future.whatif import WhatIf, replay_what_if
from fragdoctor.model.snapshot import Snapshot

PAGE = 2 * MIB


def requests_of(seed: int, n: int = 60) -> Snapshot:
    """Return a run with requests of many sizes that live for a while, each in its own segment."""
    chance = random.Random(seed)
    events, segments, live, at = [], [], [], BASE
    for _ in range(n):
        size = chance.choice((12, 14, 20, 22, 26, 34, 46)) * MIB
        events += [segment_alloc(at, size), alloc(at, size)]
        live.append((at, size))
        at += 64 * MIB
        while len(live) > chance.randrange(3, 9):
            address, length = live.pop(chance.randrange(len(live)))
            events += free(address, length)
            segments.append(segment(address, block(length, "inactive")))
    segments += [segment(address, block(length, "active_allocated")) for address, length in live]
    segments.sort(key=lambda one: one["address"])
    return columns(snapshot(*segments, traces=[events]))


def smallest(run: Snapshot, *, is_steady: bool) -> int:
    """Return the smallest capacity at which a run fits."""
    recorded = reproduced(run)
    result = replay_what_if(recorded, WhatIf())
    found = with_smallest_capacity(recorded, WhatIf(), result, is_steady=is_steady)
    return found.smallest_capacity_bytes or 0


@pytest.mark.parametrize("seed", range(12))
def test_a_steady_capacity_fits_and_so_does_every_larger_one(seed: int) -> None:
    run = requests_of(seed)

    def fits(capacity: int) -> bool:
        return simulate(run, capacity_bytes=capacity).results[0].fits

    least, at = smallest(run, is_steady=False), smallest(run, is_steady=True)
    highest = simulate(run, capacity_bytes=2**40).results[0].peak_reserved_bytes

    assert least <= at <= highest
    assert all(fits(capacity) for capacity in range(at, highest + PAGE, PAGE))
    assert not fits(at - PAGE)


def test_some_run_fits_on_less_by_luck() -> None:
    runs = map(requests_of, range(12))

    assert any(smallest(run, is_steady=False) != smallest(run, is_steady=True) for run in runs)


def test_noted_requests_are_left_out_and_no_others() -> None:
    events = []
    for i, (mib, note) in enumerate(((40, ""), (30, "of a library"), (12, ""), (20, "other"))):
        at = BASE + i * 64 * MIB
        events += [segment_alloc(at, mib * MIB), alloc(at, mib * MIB, user_metadata=note)]
    held = [
        segment(BASE + i * 64 * MIB, block(mib * MIB, "active_allocated"))
        for i, mib in enumerate((40, 30, 12, 20))
    ]

    run = reproduced(columns(snapshot(*held, traces=[events])))
    found = replay_what_if(run, WhatIf(), without_noted("of a library").apply(run))

    assert found.peak_active_bytes == (40 + 12 + 20) * MIB
