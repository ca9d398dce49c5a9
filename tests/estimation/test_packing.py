"""How many processes fit on a GPU, from a number, a message and a snapshot."""

from __future__ import annotations

import pytest
from builders import columns, small
from hypothesis import given
from hypothesis import strategies as st
from story_logs import message

from fragdoctor.errors import ConfigError
from fragdoctor.estimation.packing import PackRequest, processes_on_gpu
from fragdoctor.inputs.messages import find_messages
from fragdoctor.model.case import Case
from fragdoctor.model.gpu_sharing import (
    HEADROOM_SHARE,
    ProcessDemand,
    share_gpu,
)
from fragdoctor.model.gpus import TYPICAL_CONTEXT_BYTES, gpu_of
from fragdoctor.units import GIB, MIB


def shared_by(per_process, total, **more):
    return share_gpu(ProcessDemand(per_process, 0, "", ""), gpu="", total_bytes=total, **more)


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


def test_headroom_and_context_can_be_given():
    question = PackRequest(
        per_process_bytes=6 * GIB,
        gpu=gpu_of("24GiB"),
        headroom_bytes=0,
        context_bytes=0,
    )

    assert processes_on_gpu(question).n_fit == 4


def log_case(text):
    return Case(oom=find_messages(text))


def test_message_tells_context_and_other_trials():
    others = "Process 11 has 6.10 GiB memory in use. Process 12 has 5.90 GiB memory in use. "
    sharing = processes_on_gpu(PackRequest(), log_case(message(5.0, 0.2, others=others)))

    assert sharing.demand.context_bytes == pytest.approx(0.45 * GIB, abs=16 * MIB)
    assert sharing.demand.pytorch_bytes == pytest.approx(5.5 * GIB, abs=16 * MIB)
    assert (sharing.n_asked, sharing.others_bytes) == (3, 0)
    assert sharing.n_fit == 3


def test_small_process_of_the_message_is_deducted_not_counted():
    others = "Process 11 has 0.90 GiB memory in use. "
    sharing = processes_on_gpu(PackRequest(), log_case(message(5.0, 0.2, others=others)))

    assert sharing.n_asked is None
    assert sharing.others_bytes == pytest.approx(0.9 * GIB, abs=MIB)


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
