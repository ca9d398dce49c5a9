from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fragdoctor.analysis.ordering import stable_order


@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 512, 2**20]), st.integers(1, 2**40))
def test_stable_order_many_values_equals_argsort(seed, unit, span):
    rng = np.random.default_rng(seed)
    values = 2**40 + rng.integers(0, span, 5000) * unit

    assert np.array_equal(np.argsort(values, kind="stable"), stable_order(values))


def test_stable_order_equal_values_keep_their_order():
    assert np.array_equal(np.arange(6000), stable_order(np.full(6000, 7)))
