"""Peak memory against batch size, from traces of a program whose truth is known."""

from __future__ import annotations

import pytest
from training_runs import BACKWARD, FORWARD, MIB, OPTIMIZER, recorded, true_peak

from fragdoctor.errors import ConfigError
from fragdoctor.estimation.peak_fit import BatchQuestion, fit_batches
from fragdoctor.model.batch_fit import BatchSource, Scaling


def fitted(batches, capacity=None, **more):
    snapshots = [(f"b{b}.pickle", recorded(b, **more)) for b in batches]
    return fit_batches(snapshots, BatchQuestion(capacity_bytes=capacity))


def test_linear_program_gives_its_slope_and_fixed_part():
    fit = fitted((2, 4, 8))

    assert fit.batch_source is BatchSource.NAME
    assert fit.allocated.scaling is Scaling.LINEAR
    assert fit.allocated.per_sample_bytes == pytest.approx(14 * MIB, rel=0.03)
    assert fit.allocated.fixed_bytes == pytest.approx(96 * MIB, rel=0.05)
    assert [p.peak_allocated_bytes for p in fit.points] == [true_peak(b) for b in (2, 4, 8)]


@pytest.mark.parametrize("capacity", [400 * MIB, 512 * MIB, 1000 * MIB])
def test_largest_batch_is_the_one_that_runs(capacity):
    prediction = fitted((2, 4, 8), capacity).prediction

    largest = int(prediction.largest)
    assert prediction.method == "replay"
    assert true_peak(largest) <= capacity
    assert prediction.low <= largest <= prediction.high
    assert true_peak(int(prediction.high) + 1) > capacity


def test_replay_foretells_a_recording_that_it_has_not_seen():
    fit = fitted((2, 4, 8))

    assert fit.replay.method == "fitted"
    assert fit.replay.worst_error < 0.001
    assert abs(fit.replay.left_out_error) < 0.02


def test_two_recordings_are_not_judged_straight():
    fit = fitted((2, 4), 512 * MIB)

    assert fit.allocated.scaling is Scaling.UNTESTED
    assert fit.allocated.r_squared is None
    assert fit.prediction.confidence != "high"


def test_peak_of_two_lines_is_predicted_by_the_one_that_holds_it_there():
    spike = 160 * MIB

    fit = fitted((2, 4, 8, 16, 32), 1200 * MIB, spike=spike)

    assert [m.line.line for m in fit.moments] == [OPTIMIZER, BACKWARD]
    assert any("Up to a batch of about" in why for why in fit.why)
    largest = int(fit.prediction.largest)
    assert true_peak(largest, spike=spike) <= 1200 * MIB < true_peak(largest + 4, spike=spike)


def test_peak_held_by_the_optimizer_alone_still_finds_the_largest_batch():
    spike = 300 * MIB

    fit = fitted((1, 2, 4), 800 * MIB, spike=spike)

    assert fit.allocated.scaling is Scaling.FIXED
    largest = int(fit.prediction.largest)
    assert true_peak(largest, spike=spike) <= 800 * MIB < true_peak(largest + 4, spike=spike)


def test_activations_that_grow_with_the_square_are_named():
    fit = fitted((2, 4, 8), 8000 * MIB, power=2)

    assert fit.allocated.scaling is Scaling.FASTER
    rows = {row.line.line: row.curve.scaling for row in fit.lines}
    assert rows[FORWARD] is Scaling.FASTER
    assert rows[BACKWARD] is Scaling.FIXED
    largest = int(fit.prediction.largest)
    assert true_peak(largest, power=2) <= 8000 * MIB < true_peak(largest + 2, power=2)


def test_bend_of_a_takeover_is_told_from_growth_that_goes_on():
    takeover = fitted((1, 2, 4, 8, 16), spike=100 * MIB)
    square = fitted((2, 4, 8), power=2)

    near, far = takeover.replay.slopes_beyond
    assert near == pytest.approx(14 * MIB, rel=0.05)
    assert far == pytest.approx(14 * MIB, rel=0.05)
    near, far = square.replay.slopes_beyond
    assert far > 1.5 * near
    assert any("still bends" in why for why in square.why)


def test_batches_told_by_requests_are_relative():
    names = [(f"run{i}.pickle", recorded(b)) for i, b in enumerate((3, 6, 12))]

    fit = fit_batches(names, BatchQuestion())

    assert fit.batch_source is BatchSource.TRACE
    assert [p.batch for p in fit.points] == pytest.approx([1, 2, 4])


def test_same_run_twice_without_batches_is_refused():
    runs = [("x.pickle", recorded(4)), ("y.pickle", recorded(4))]

    with pytest.raises(ConfigError, match="the same"):
        fit_batches(runs, BatchQuestion())


def test_leak_and_different_numbers_of_steps_are_warned_about():
    runs = [("b2.pickle", recorded(2, n_steps=3)), ("b4.pickle", recorded(4, n_steps=9, leak=MIB))]

    fit = fit_batches(runs, BatchQuestion())

    assert any("number" in w and "steps" in w for w in fit.warnings)


def test_one_recording_is_no_trend():
    with pytest.raises(ConfigError, match="2 to"):
        fit_batches([("b2.pickle", recorded(2))], BatchQuestion())


def test_batches_of_another_number_are_refused():
    runs = [("b2.pickle", recorded(2)), ("b4.pickle", recorded(4))]

    with pytest.raises(ConfigError, match="2 recordings and 3 batch sizes"):
        fit_batches(runs, BatchQuestion(batches=(1.0, 2.0, 3.0)))


def test_capacity_below_the_fixed_part_fits_nothing():
    assert fitted((2, 4, 8), 50 * MIB).prediction.largest is None


@pytest.mark.shared
def test_recordings_of_different_programs_are_warned_about(shared):
    from stock import load_stock

    runs = [
        (f"b{i}.pickle", load_stock(shared / "snapshots" / name / "snapshot.pickle"))
        for i, name in ((1, "healthy_gpt"), (2, "convnet_varsize"))
    ]

    fit = fit_batches(runs, BatchQuestion())

    assert any("not the same code" in w for w in fit.warnings)
