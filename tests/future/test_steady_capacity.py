"""The capacity from which on a run fits: on less it may fit too, by luck."""

from __future__ import annotations

import random

import pytest
from builders import BASE, MIB, alloc, block, columns, free, segment, segment_alloc, snapshot

from fragdoctor.future.edits import without_noted
from fragdoctor.future.simulator import simulate
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


@pytest.mark.parametrize("seed", range(12))
def test_a_steady_capacity_fits_and_so_does_every_larger_one(seed: int) -> None:
    run = requests_of(seed)

    def fits(capacity: int) -> bool:
        return simulate(run, capacity_bytes=capacity).results[0].fits

    steady = simulate(run, smallest_capacity=True, is_steady=True, steps=0).results[0]
    least = simulate(run, smallest_capacity=True, steps=0).results[0].smallest_capacity_bytes or 0
    at = steady.smallest_capacity_bytes or 0
    highest = simulate(run, capacity_bytes=2**40).results[0].peak_reserved_bytes

    assert least <= at <= highest
    assert all(fits(capacity) for capacity in range(at, highest + PAGE, PAGE))
    assert not fits(at - PAGE)


def test_some_run_fits_on_less_by_luck() -> None:
    def both(seed: int) -> tuple[int | None, ...]:
        run = requests_of(seed)
        return tuple(
            simulate(run, smallest_capacity=True, is_steady=how, steps=0)
            .results[0]
            .smallest_capacity_bytes
            for how in (False, True)
        )

    assert any(least != steady for least, steady in map(both, range(12)))


def test_noted_requests_are_left_out_and_no_others() -> None:
    events = []
    for i, (mib, note) in enumerate(((40, ""), (30, "of a library"), (12, ""), (20, "other"))):
        at = BASE + i * 64 * MIB
        events += [segment_alloc(at, mib * MIB), alloc(at, mib * MIB, user_metadata=note)]
    held = [
        segment(BASE + i * 64 * MIB, block(mib * MIB, "active_allocated"))
        for i, mib in enumerate((40, 30, 12, 20))
    ]

    run = columns(snapshot(*held, traces=[events]))
    found = simulate(run, edits=[without_noted("of a library")]).results[0]

    assert found.peak_active_bytes == (40 + 12 + 20) * MIB
