"""The public entry: what is asked is what is answered, in order."""

from __future__ import annotations

import gzip
import pickle
from pathlib import Path

import pytest
from builders import columns
from programs import program, record
from stock import from_python
from toy_allocator import ToyAllocator

import fragdoctor
from fragdoctor.analysis.growth import StepEnds, find_growth
from fragdoctor.analysis.kept import survivors
from fragdoctor.errors import ConfigError, SimulationError
from fragdoctor.future.repetition import BoundedContainer
from fragdoctor.future.simulator import choose_device, simulate, trace_of
from fragdoctor.future.whatif import FairReplay, WhatIf
from fragdoctor.inputs.snapshot_reader import read_snapshot
from fragdoctor.model.simulation import OutlookState
from fragdoctor.trace.reproduction import reproduce
from fragdoctor.units import MIB


def test_simulate_answers_confs_in_order() -> None:
    confs = ["expandable_segments:True", ""]
    simulation = simulate(record(program(30 * MIB, -1, 20 * MIB)), confs=confs)

    assert [r.conf for r in simulation.results] == confs
    assert simulation.method == "replay"
    assert simulation.lower_bound_bytes == 30 * MIB


def test_simulate_without_question_gives_the_baseline() -> None:
    simulation = simulate(record(program(30 * MIB)))

    assert simulation.results == ()
    assert simulation.baseline.fits
    assert simulation.baseline.n_replayed == 1


def test_simulate_capacity_alone_replays_the_recorded_settings() -> None:
    snapshot = record(program(30 * MIB, 30 * MIB), "max_split_size_mb:32")

    simulation = simulate(snapshot, capacity_bytes=40 * MIB)

    assert [r.conf for r in simulation.results] == ["max_split_size_mb:32"]
    assert not simulation.results[0].fits
    assert simulation.results[0].margin_bytes == 10 * MIB


def test_simulate_smallest_capacity_is_found_per_setting() -> None:
    simulation = simulate(
        record(program(30 * MIB, 15 * MIB)),
        confs=["", "expandable_segments:True"],
        smallest_capacity=True,
    )

    assert [r.smallest_capacity_bytes for r in simulation.results] == [46 * MIB, 60 * MIB]


def test_simulate_refuses_what_it_cannot_answer() -> None:
    snapshot = record(program(30 * MIB))

    with pytest.raises(SimulationError, match="no device 7"):
        simulate(snapshot, device=7)
    with pytest.raises(ConfigError):
        simulate(snapshot, confs=["max_split_size_mb"])
    with pytest.raises(ConfigError):
        simulate(snapshot, torch_version="new")
    with pytest.raises(SimulationError, match="no trace"):
        simulate(from_python({"segments": [], "device_traces": []}))


@pytest.mark.shared
def test_simulate_chooses_the_device_that_ran_out(shared: Path) -> None:
    path = shared / "snapshots" / "two_devices_oom_on_1" / "snapshot.pickle"
    snapshot = read_snapshot(path)

    assert choose_device(snapshot) == 1
    assert not simulate(snapshot).baseline.fits


def test_step_is_like_the_latest_one_where_no_stack_tells_requests_apart() -> None:
    """A transformer on batches of 100 to 700 tokens, recorded with ``context=None``, torch 2.12.1.

    Its first step makes more than the others, so that none of its requests has a mate there. Under
    expandable segments the whole program passes at the capacity at which it failed.
    """
    path = Path(__file__).parent / "recordings" / "varlen_without_stacks.pickle.gz"

    simulation = simulate(read_snapshot(path), confs=["expandable_segments:True"])

    outlook = simulation.results[0].outlook
    assert outlook is not None
    assert OutlookState.FAILS not in (outlook.state, outlook.likely)


@pytest.mark.parametrize(
    ("recording", "likely"),
    [
        ("detection_variable@54", OutlookState.HOLDS),  # images of random sizes
        ("unfreeze_layers@75", None),  # trains more and more layers
    ],
)
def test_run_likely_holds_if_larger_steps_would_unless_its_steps_rise(recording, likely) -> None:
    """On 1.3 times the memory the first program passes, and the second one fails later."""
    snapshot = read_snapshot(Path(__file__).parents[1] / "truth" / f"{recording}.pickle.gz")
    capacity = simulate(snapshot).baseline.capacity_bytes
    assert capacity is not None

    outlook = simulate(snapshot, capacity_bytes=13 * capacity // 10).results[0].outlook

    assert outlook is not None
    assert outlook.state is OutlookState.OPEN
    assert outlook.likely is likely


@pytest.mark.parametrize(
    ("sizes_mib", "spare", "likely"),
    [
        ((12, 20, 16, 30, 24, 26), 1.2, OutlookState.HOLDS),  # may rise by chance
        ((12, 20, 16, 30, 24, 26), 1.02, None),  # a somewhat larger step would not fit
        ((12, 14, 17, 20, 26, 30), 1.2, None),  # certainly rises
    ],
)
def test_run_of_varying_steps_likely_holds_with_room_for_larger_ones(
    sizes_mib, spare, likely
) -> None:
    toy = ToyAllocator()
    for size in sizes_mib:
        blocks = [toy.malloc(size * MIB, line=20), toy.malloc(size * MIB, line=30)]
        toy.free(blocks[0])
        toy.free(blocks[1])
    capacity = round(spare * 2 * max(sizes_mib)) * MIB

    outlook = simulate(columns(toy.data()), capacity_bytes=capacity).results[0].outlook

    assert outlook is not None
    assert outlook.state is OutlookState.OPEN
    assert outlook.likely is likely


@pytest.mark.parametrize(
    ("sizes_mib", "state"),
    [
        ((20,) * 10 + (21,) * 10 + (22,) * 10, OutlookState.OPEN),  # the stages of a curriculum
        ((22,) * 10 + (21,) * 10 + (20,) * 10 + (22,), OutlookState.HOLDS),
    ],
)
def test_run_whose_steps_rise_is_not_certain_to_finish(sizes_mib, state) -> None:
    toy = ToyAllocator()
    for size in sizes_mib:
        blocks = [toy.malloc(size * MIB, line=20), toy.malloc(size * MIB, line=30)]
        toy.free(blocks[0])
        toy.free(blocks[1])

    outlook = simulate(columns(toy.data()), capacity_bytes=200 * MIB).results[0].outlook

    assert outlook is not None
    assert outlook.state is state
    assert OutlookState.HOLDS in (outlook.state, outlook.likely)


@pytest.mark.parametrize("recording", ["unfreeze_layers@45", "whisper_varlen@75"])
def test_smaller_logits_have_the_mates_of_the_recorded_ones(recording: str) -> None:
    """Chunks of the loss change sizes only, so they do not change which steps are alike."""
    path = Path(__file__).parents[1] / "truth" / f"{recording}.pickle.gz"

    first = fragdoctor.diagnose(path).recommendations[0]

    assert first.title == "Compute the loss in chunks"
    assert first.predicted.outlook is not None
    assert first.predicted.outlook.likely is OutlookState.HOLDS


@pytest.mark.parametrize(
    ("recording", "n_steps"),
    [
        ("dqn_replay@75", 7),  # a replay buffer, which would fill up
        ("leak_loss_history@99", 2),  # a list of losses, which goes on
    ],
)
def test_failure_that_growth_brings_about_later_is_only_likely(recording, n_steps) -> None:
    """While it lasts, the growth of a buffer that fills looks like that of a leak."""
    snapshot = read_snapshot(Path(__file__).parents[1] / "truth" / f"{recording}.pickle.gz")

    outlook = simulate(snapshot, confs=["expandable_segments:True"]).results[0].outlook

    assert outlook is not None
    assert (outlook.state, outlook.likely) == (OutlookState.OPEN, OutlookState.FAILS)
    assert outlook.fails_after_steps == n_steps
    assert "if memory keeps growing" in outlook.reason


def test_container_with_a_limit_ends_its_growth() -> None:
    """Once it is full, each new item takes the place of the oldest one."""
    path = Path(__file__).parents[1] / "truth" / "dqn_replay@75.pickle.gz"
    trace = trace_of(read_snapshot(path), None)
    items = survivors(trace, find_growth(trace, StepEnds.of(trace)))
    full = BoundedContainer(items, len(items) + 20)

    outlook = (
        FairReplay(reproduce(trace), container=full)
        .replay(WhatIf(conf="expandable_segments:True"))
        .outlook
    )

    assert outlook is not None
    assert outlook.state is OutlookState.HOLDS
    assert outlook.growth_bytes_per_step == 0


@pytest.mark.parametrize(
    ("is_freed", "expected"),
    [(False, (OutlookState.HOLDS, None)), (True, (OutlookState.OPEN, OutlookState.HOLDS))],
)
def test_nothing_is_certain_if_the_recording_began_in_the_middle(is_freed, expected) -> None:
    """A model that is older stays; what is older and goes shows that the beginning is missing."""
    toy = ToyAllocator()
    older = toy.malloc(4 * MIB, line=10)
    n_before = len(toy.events)
    for i in range(6):
        blocks = [toy.malloc(8 * MIB, line=20), toy.malloc(8 * MIB, line=30)]
        toy.free(blocks[0])
        toy.free(blocks[1])
        if is_freed and not i:
            toy.free(older)
    data = toy.data()
    data["device_traces"] = [data["device_traces"][0][n_before:]]

    outlook = simulate(columns(data), capacity_bytes=60 * MIB).results[0].outlook

    assert outlook is not None
    assert (outlook.state, outlook.likely) == expected


def test_first_step_of_a_cut_recording_is_not_that_of_the_program() -> None:
    path = Path(__file__).parents[1] / "truth" / "video_clips@77.pickle.gz"
    data = pickle.loads(gzip.decompress(path.read_bytes()))
    (trace,) = data["device_traces"]
    data["device_traces"] = [trace[len(trace) // 2 :]]

    outlook = simulate(columns(data), confs=["expandable_segments:True"]).results[0].outlook

    assert outlook is not None
    assert (outlook.state, outlook.likely) == (OutlookState.OPEN, None)
    assert outlook.reason == "the recording holds no complete step"


def test_without_stacks_steps_of_unequal_sizes_show_nothing() -> None:
    """Images of random sizes: aligned by size alone, the steps would be said to fail."""
    path = Path(__file__).parents[1] / "truth" / "detection_variable@44.pickle.gz"
    data = pickle.loads(gzip.decompress(path.read_bytes()))
    blocks = [block for segment in data["segments"] for block in segment["blocks"]]
    for one in (*data["segments"], *blocks, *data["device_traces"][0]):
        one.pop("frames", None)
    snapshot = columns(data)
    capacity = simulate(snapshot).baseline.capacity_bytes
    assert capacity is not None

    outlook = simulate(snapshot, capacity_bytes=13 * capacity // 10).results[0].outlook

    assert outlook is not None
    assert (outlook.state, outlook.likely) == (OutlookState.OPEN, None)
    assert "without stacks" in outlook.reason
