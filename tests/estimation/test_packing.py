"""How many processes fit on a GPU, from a number and a snapshot."""

from __future__ import annotations

import pytest
from builders import columns, small
from hypothesis import given
from hypothesis import strategies as st

from fragdoctor.errors import ConfigError
from fragdoctor.estimation.packing import PackRequest, processes_on_gpu
from fragdoctor.model.case import Case
from fragdoctor.model.gpu_sharing import (
    HEADROOM_SHARE,
    ProcessDemand,
    Sharing,
)
from fragdoctor.model.gpus import TYPICAL_CONTEXT_BYTES, gpu_of
from fragdoctor.units import GIB, MIB


def shared_by(per_process, total, **more):
    return Sharing(ProcessDemand(per_process, 0, "", ""), gpu="", total_bytes=total, **more)


def test_four_trials_of_six_gib_do_not_fit_on_24_with_their_contexts():
    question = PackRequest(per_process_bytes=6 * GIB, gpu=gpu_of("24GiB"), n_processes=4)

    sharing = processes_on_gpu(question)

    assert sharing.demand.context_bytes == 450 * MIB
    assert (sharing.n_fit, sharing.n_asked) == (3, 4)
    rows = {row.n: row for row in sharing.rows}
    assert not rows[4].fits
    assert rows[3].fits
    usable = 24 * GIB - sharing.headroom_bytes
    assert rows[3].each_bytes == usable // 3 - 450 * MIB


def test_context_can_be_given():
    question = PackRequest(
        per_process_bytes=6 * GIB,
        gpu=gpu_of("24GiB"),
        context_bytes=0,
    )

    sharing = processes_on_gpu(question)
    assert (sharing.n_fit, sharing.n_fit_tight) == (3, 4)


def test_snapshot_without_a_trace_says_so():
    snapshot = columns({**small(), "device_traces": []})
    sharing = processes_on_gpu(PackRequest(gpu=gpu_of("24GiB")), Case(snapshot=snapshot))

    assert sharing.demand.pytorch_source == "reserved in the snapshot"
    assert any("Without a trace" in note for note in sharing.notes)


@pytest.mark.shared
def test_failed_run_needs_more_than_its_peak(shared):
    from fragdoctor.inputs.snapshot_reader import read_snapshot

    snapshot = read_snapshot(shared / "snapshots" / "capacity_oom" / "snapshot.pickle")
    sharing = processes_on_gpu(PackRequest(gpu=gpu_of("24GiB")), Case(snapshot=snapshot))

    assert "replay of the failed run" in sharing.demand.pytorch_source


@pytest.mark.parametrize(
    "question", [PackRequest(), PackRequest(n_processes=4), PackRequest(per_process_bytes=GIB)]
)
def test_incomplete_question_says_what_is_missing(question):
    with pytest.raises(ConfigError) as caught:
        processes_on_gpu(question)

    assert caught.value.hint


@given(st.integers(1, 2**45), st.integers(0, 2**45), st.integers(0, 64))
def test_as_many_fit_as_said_and_not_one_more(per_process, total, n_asked):
    sharing = shared_by(per_process, total, n_asked=n_asked or None)

    usable = max(0, total - round(HEADROOM_SHARE * total))
    assert sharing.n_fit * per_process <= usable
    assert sharing.n_fit == 1000 or (sharing.n_fit + 1) * per_process > usable
    assert sharing.n_fit_tight >= sharing.n_fit
    assert all(
        row.fits == (row.n <= sharing.n_fit) or sharing.n_fit == 1000 for row in sharing.rows
    )


def test_typical_context_is_that_of_an_unknown_gpu():
    assert gpu_of("24GiB").context_bytes == TYPICAL_CONTEXT_BYTES
