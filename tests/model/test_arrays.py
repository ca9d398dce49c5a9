"""Sets of numbers as arrays, against numpy's own."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fragdoctor.model.arrays import distinct, is_among, largest_groups, percentile, sum_by

numbers = st.lists(st.integers(-3, 2**40) | st.integers(0, 3)).map(lambda x: np.array(x, np.int64))


@given(numbers, numbers)
def test_is_as_numpy_says(values, wanted):
    assert distinct(values).tolist() == np.unique(values).tolist()
    assert is_among(values, wanted).tolist() == np.isin(values, wanted).tolist()
    if len(values):
        assert percentile(values, 5) == pytest.approx(np.percentile(values, 5))


def test_loads_no_masked_arrays():
    code = (
        "import sys, numpy as np; from fragdoctor.model.arrays import *; x = np.arange(9); "
        "distinct(x), is_among(x, x), percentile(x, 5); sys.exit('numpy.ma' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@given(st.lists(st.tuples(st.integers(-1, 4), st.integers(-5, 9))))
def test_sums_groups_exactly_and_the_largest_first(pairs):
    group, n_bytes = np.array(pairs, np.int64).reshape(-1, 2).T
    sums = largest_groups(group, n_bytes)
    expected = sorted(
        (
            -abs(sum(n for g, n in pairs if g == key)),
            key,
            sum(n for g, n in pairs if g == key),
            sum(-1 if n < 0 else 1 for g, n in pairs if g == key),
        )
        for key in {g for g, _ in pairs}
    )
    assert list(zip(*(column.tolist() for column in sums), strict=True)) == [
        row[1:] for row in expected
    ]
    dense = sum_by(group + 1, n_bytes, 6).tolist()
    assert dense == [sum(n for g, n in pairs if g == key) for key in range(-1, 5)]


def test_sums_beyond_what_a_float_holds():
    large = np.array([2**53, 1], np.int64)
    assert largest_groups(np.zeros(2, np.int64), large).n_bytes.tolist() == [2**53 + 1]
    assert sum_by(np.zeros(2, np.int64), large, 1).tolist() == [2**53 + 1]
