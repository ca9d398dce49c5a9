"""Curves through memory against batch size."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fragdoctor.estimation.batch_curves import fit_curve
from fragdoctor.model.batch_fit import Scaling

MIB = 2**20
GIB = 2**30
BATCHES = np.array([2.0, 4.0, 8.0, 16.0, 32.0])


@given(
    fixed=st.integers(0, 20 * GIB),
    slope=st.integers(MIB, GIB),
    batches=st.lists(st.integers(1, 512), min_size=2, max_size=6, unique=True),
)
def test_points_on_a_line_give_that_line(fixed, slope, batches):
    b = np.array(batches, np.float64)

    curve = fit_curve(b, fixed + slope * b)

    if curve.scaling is not Scaling.FIXED:
        assert curve.scaling in (Scaling.LINEAR, Scaling.UNTESTED)
        assert curve.per_sample_bytes == pytest.approx(slope, rel=1e-6)
    # What lies within the rounding of a small segment counts as the same.
    assert curve.at(b.max()) == pytest.approx(fixed + slope * b.max(), rel=0.03, abs=MIB)


def test_one_odd_recording_does_not_move_the_line():
    n = GIB + 100 * MIB * BATCHES
    n[2] += GIB

    curve = fit_curve(BATCHES, n)

    assert curve.per_sample_bytes == pytest.approx(100 * MIB, rel=0.2)
    assert curve.worst_residual_bytes > 0.8 * GIB
    assert curve.scaling is Scaling.IRREGULAR


@pytest.mark.parametrize(
    ("n_bytes", "expected"),
    [
        (GIB + 10 * MIB * BATCHES**2, Scaling.FASTER),
        (GIB * np.sqrt(BATCHES), Scaling.SLOWER),
        (np.array([1, 1, 2, 2, 3]) * GIB * 1.0, Scaling.STEPS),
        (np.full(5, 3.0 * GIB), Scaling.FIXED),
        (np.array([1, 3, 2, 4, 1]) * GIB * 1.0, Scaling.IRREGULAR),
    ],
)
def test_bend_is_told(n_bytes, expected):
    assert fit_curve(BATCHES, n_bytes).scaling is expected


def test_curve_that_bends_up_is_extrapolated_both_ways():
    curve = fit_curve(BATCHES, GIB + 10 * MIB * BATCHES**2)

    assert curve.at(64.0) == pytest.approx(GIB + 10 * MIB * 64**2, rel=0.01)
    assert curve.at_least(64.0) < curve.at(64.0)
    assert curve.at_least(64.0) > curve.at(32.0)
