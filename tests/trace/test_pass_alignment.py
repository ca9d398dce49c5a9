"""Passes of two steps whose requests have no stacks of their own."""

from __future__ import annotations

import numpy as np

from fragdoctor.trace.pass_alignment import align_by_size

MIB = 2**20
NAMED = 512


def aligned(mine: list[int], other: list[int]) -> list[tuple[int, int]]:
    """Return the pairs of two steps, in which requests of ``NAMED`` bytes have a stack."""
    sizes = np.array(mine), np.array(other)
    named = [np.flatnonzero(size == NAMED) for size in sizes]
    n = min(map(len, named))
    found = align_by_size(
        sizes, (sizes[0] != NAMED, sizes[1] != NAMED), (named[0][:n], named[1][:n])
    )
    assert found is not None
    return list(zip(found[0].tolist(), found[1].tolist(), strict=True))


def test_a_workspace_that_is_made_once_is_left_out() -> None:
    mine = [NAMED, 65536, 32 * MIB, 2048, 4, 31 * MIB, 64 * MIB, 2 * MIB, 2048, 64 * MIB]
    other = [*mine[:3], 16 * MIB, *mine[3:], 16, 12 * MIB]

    expected = [(i, i if i < 3 else i + 1) for i in range(1, len(mine))]
    assert aligned(mine, other) == expected


def test_each_pass_without_stacks_is_aligned_by_itself() -> None:
    first, second = [3 * MIB, 5 * MIB, 7 * MIB], [9 * MIB, 11 * MIB]
    mine = [NAMED, *first, NAMED, *second]
    other = [NAMED, first[0], 16 * MIB, *first[1:], NAMED, *second, 13 * MIB]

    assert aligned(mine, other) == [(1, 1), (2, 3), (3, 4), (5, 6), (6, 7)]
