"""What a first step needs at least, of recordings that were cut off in it.

The recordings: a residual network of five blocks (``first_forward_norms``), a transformer of four
layers that asks for its logits (``first_loss``), and one of six layers in mixed precision
(``first_layers``), all trained by AdamW. What they need was measured without a limit.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import fragdoctor
from fragdoctor.inputs.snapshot_reader import read_snapshot
from fragdoctor.model.simulation import Outlook, OutlookBasis, OutlookState
from fragdoctor.trace.first_step import LowerBound, _layers_to_come, lower_bound_of
from fragdoctor.trace.norm_layers import ModelLayers, _called, _outputs_to_come
from fragdoctor.trace.simulator import reproduce
from fragdoctor.trace.trace import Trace
from fragdoctor.trace.whatif import FairReplay, WhatIf
from fragdoctor.units import MIB

RECORDINGS = Path(__file__).parent / "recordings"


def trace_of(name: str) -> Trace:
    return Trace.of(read_snapshot(RECORDINGS / f"{name}.pickle.gz"), 0)


def bound_of(name: str) -> LowerBound:
    bound = lower_bound_of(trace_of(name))
    assert bound is not None
    return bound


def outlook_of(name: str, capacity_mb: int) -> Outlook:
    result = FairReplay(reproduce(trace_of(name))).replay(WhatIf(capacity_bytes=capacity_mb * MIB))
    assert result.fits
    assert result.outlook is not None
    return result.outlook


@pytest.mark.parametrize(("capacity_mb", "fails"), [(200, True), (218, True), (296, False)])
def test_norms_that_were_not_called_yet_tell_what_the_pass_will_keep(
    capacity_mb: int, fails: bool
) -> None:
    """132.1 MiB were live; at the end of the pass 240.1 are; the program passes from 296 on."""
    outlook = outlook_of("first_forward_norms", capacity_mb)
    assert (outlook.state is OutlookState.FAILS) == fails
    assert outlook.basis is OutlookBasis.LOWER_BOUND
    assert 215 * MIB < bound_of("first_forward_norms").needed_bytes < 240.1 * MIB


def test_logits_are_followed_by_a_cross_entropy_and_its_gradients() -> None:
    """418.3 MiB are live at once, of which 62.5 are the logits, if the program keeps them."""
    bound = bound_of("first_loss")
    assert bound.needed_bytes / MIB == pytest.approx(418.33 - 62.5, abs=0.1)
    assert "a cross entropy and its gradients" in bound.text
    outlook = outlook_of("first_loss", 350)
    assert (outlook.state, outlook.fails_after_steps) == (OutlookState.FAILS, 0)


def test_state_of_an_optimizer_ends_the_step_after() -> None:
    """The program passes from 620 MiB on."""
    first, second = outlook_of("first_loss", 360), outlook_of("first_loss", 382)
    assert (first.state, first.fails_after_steps) == (OutlookState.FAILS, 1)
    assert (second.state, second.fails_after_steps) == (OutlookState.FAILS, 1)
    assert second.needs_bytes == bound_of("first_loss").next_bytes
    assert outlook_of("first_loss", 620).state is OutlookState.OPEN


def test_state_counts_for_no_more_than_programs_need_whatever_their_optimizer() -> None:
    bound = bound_of("first_layers")
    assert bound.state_bytes > 0.15 * bound.live_bytes
    assert bound.next_bytes <= 1.1 * (bound.live_bytes + bound.expected_bytes)


def test_rest_of_the_layer_under_way_is_to_come_as_well() -> None:
    """136.8 MiB are live, behind the last of six layers it is 171.2."""
    trace = trace_of("first_layers")
    failed = int(trace.oom_rows[-1])
    start = int(trace.module_rows[0])
    kept, n_left, n_layers = _layers_to_come(trace, start, failed)
    assert (n_left, n_layers) == (2, 6)
    live = int(trace.totals.at([failed])[0, 0])
    assert 165 * MIB < live + kept < 171.2 * MIB


def arrays(*values: list[int]) -> list[np.ndarray]:
    return [np.array(one, np.int64) for one in values]


def test_outputs_are_laid_beside_norms_in_order() -> None:
    widths, outputs = arrays([64, 64, 128, 128, 256, 256], [6400, 6400, 3200 * 2, 6400, 3072])
    called = _called(widths, outputs)
    assert called is not None
    assert called[0].tolist() == called[1].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "outputs",
    [
        [6400, 6400, 6400],  # too few to tell
        [640, 650, 660, 670, 680],  # no rows of these norms
        [4096 * 2, 4096 * 2, 64 * 5, 64 * 5, 64 * 5],  # the last ones are of the first norms
    ],
)
def test_outputs_that_do_not_belong_to_the_norms_tell_nothing(outputs: list[int]) -> None:
    widths, made = arrays([64, 64, 128, 128, 256, 256], outputs)
    assert _called(widths, made) is None


@pytest.mark.parametrize(
    ("to_come", "rows"),
    [
        ([64, 64], [100, 100]),
        ([128, 128], [25, 25]),  # channels double where rows become a quarter
        ([32, 64], [100, 100]),  # the narrow part of a block
    ],
)
def test_rows_of_outputs_to_come(to_come: list[int], rows: list[int]) -> None:
    widths, outputs, rest = arrays([64, 64, 64], [6400, 6400, 6400], to_come)
    expected = sum(width * n for width, n in zip(to_come, rows, strict=True))
    assert _outputs_to_come(widths, outputs, rest) == expected


def test_logits_are_told_from_other_outputs_by_the_vocabulary() -> None:
    width, words, rows = 4 * 256, 8000, 2048
    empty = np.zeros(2, np.int64)
    model = ModelLayers(np.full(2, width), empty, np.array([4 * 256 * width, words * width]), 0)
    hidden = np.array([rows * width, 512])
    assert model.makes_logits(hidden, rows * words * 4)
    assert model.makes_logits(hidden, rows * words * 2)
    assert not model.makes_logits(hidden, 4 * rows * width)
    assert not model.makes_logits(hidden, rows * words * 4 + 512)


def test_logits_to_come_are_counted_where_the_model_ends_with_its_vocabulary(
    samples: Path,
) -> None:
    # Played on without a limit, the program has 9,775 MiB live at its peak.
    bound = lower_bound_of(Trace.of(read_snapshot(samples / "capacity_oom.pickle"), 0))

    assert bound is not None
    assert 8_000 * MIB < bound.needed_bytes < 9_775 * MIB


@pytest.mark.parametrize(("capacity_mb", "finishes"), [(250, False), (260, True)])
def test_an_optimizer_may_fail_before_it_has_made_anything(
    capacity_mb: int, finishes: bool
) -> None:
    """Plain SGD failed at the first of its decayed gradients; rerun, it finished from 260 MiB on.

    The model: four of ``Linear(2048, 2048)``, under 196 MiB.
    """
    assert (outlook_of("first_decay", capacity_mb).state is OutlookState.HOLDS) == finishes


def test_an_edit_may_do_without_the_request_that_failed() -> None:
    """With ``fused=True`` the program passes under the same 196 MiB."""
    found = fragdoctor.diagnose(RECORDINGS / "first_decay.pickle.gz").recommendations
    outlook = next(r for r in found if r.code == "fused-optimizer").predicted.outlook

    assert outlook is not None
    assert outlook.state is not OutlookState.FAILS
