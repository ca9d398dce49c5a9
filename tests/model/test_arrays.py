"""Sets of numbers as arrays, against numpy's own."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fragdoctor.model.arrays import distinct, is_among, percentile

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
