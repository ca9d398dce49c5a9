"""Which request of one recording is which of another."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fragdoctor.estimation.batch_replay import Requests, aligned, counterparts


def requests(sizes, keys=None):
    key = np.array(keys if keys is not None else [7] * len(sizes), np.int64)
    rank = np.array([int((key[:i] == k).sum()) for i, k in enumerate(key)], np.int64)
    size = np.array(sizes, np.float64)
    return Requests(np.arange(len(sizes)), key, rank, size, frozenset((7,)))


def test_extra_requests_of_another_kernel_are_stepped_around():
    mine = requests([800, 50_000, 800, 8, 8, 16_000, 2400])
    theirs = requests([400, 50_000, 400, 8_000, 1200])

    found = counterparts(mine, theirs, 8.0, 4.0)

    assert found.tolist() == [0, 1, 2, -1, -1, 3, 4]


def test_stacks_that_occur_equally_often_are_matched_whatever_their_size():
    mine, theirs = requests([100, 7, 100], [1, 2, 1]), requests([999, 3, 1], [1, 2, 1])

    assert counterparts(mine, theirs, 2.0, 1.0).tolist() == [0, 1, 2]


@given(
    a=st.lists(st.integers(0, 5), max_size=25),
    b=st.lists(st.integers(0, 5), max_size=25),
)
def test_alignment_pairs_equal_things_in_order(a, b):
    pairs = aligned(range(len(a)), range(len(b)), lambda i, j: int(a[i] == b[j]))

    assert all(a[i] == b[j] for i, j in pairs)
    assert all(i < k and j < m for (i, j), (k, m) in pairwise(pairs))
    assert len(pairs) == longest_common(a, b)


def longest_common(a, b):
    table = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            table[i + 1][j + 1] = (
                table[i][j] + 1 if x == y else max(table[i][j + 1], table[i + 1][j])
            )
    return table[-1][-1]
