"""The reproduction reproduces what was recorded, and says why where it does not."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import (
    ERAS,
    Program,
    operations_of,
    program,
    programs,
    record,
    recorded,
    reproduced,
    without_oldest,
)

from fragdoctor.errors import SimulationError
from fragdoctor.inputs.snapshot_reader import read_snapshot
from fragdoctor.model.settings import Era
from fragdoctor.trace.edits import empty_cache_every
from fragdoctor.trace.fidelity import report
from fragdoctor.trace.reproduction import find_reproduction
from fragdoctor.trace.simulate import reproduce, simulate, trace_of
from fragdoctor.trace.trace import Trace
from fragdoctor.units import MIB

# What their names say is missing: nothing recorded, or the oldest events lost.
INCOMPLETE = {"empty", "no_history", "state_only"}
LOST_EVENTS = {"frag_gpt_long_truncated", "leak_features", "leak_losses", "ring_overflow"}


@given(programs(), ERAS)
@settings(max_examples=25, deadline=None)
def test_baseline_with_calls_of_empty_cache_infers_them(made: Program, era: Era) -> None:
    plain = record(made, era=era)
    called = empty_cache_every(3).apply(reproduced(plain))

    reproduction = find_reproduction(Trace.of(recorded(called, era=era), 0))

    assert reproduction.is_exact, reproduction.comparison


@given(programs(), st.sampled_from(["", "garbage_collection_threshold:0.5"]))
@settings(max_examples=25, deadline=None)
def test_baseline_under_memory_fraction_loses_no_request(made: Program, conf: str) -> None:
    """The limit is found where the trace shows it: the failing requests fail in the model too."""
    snapshot = record(made, conf, capacity_bytes=400 * MIB, allowed_fraction=0.3)

    reproduction = find_reproduction(Trace.of(snapshot, 0), device_total_bytes=400 * MIB)

    assert reproduction.comparison["n_failed_equal"] == reproduction.comparison["n_failed"]
    assert reproduction.is_exact


def test_era_that_recorded_is_found() -> None:
    """Two equal free segments, the older at the higher address: see the spec of tie-breaks."""
    low_is_newer = program(12 * MIB, 14 * MIB, 14 * MIB, -2, -3, 14 * MIB, -1)
    found = set()
    for era in Era:
        reproduction = find_reproduction(Trace.of(record(low_is_newer, era=era), 0))
        assert reproduction.is_exact
        found.add(reproduction.conditions.era)

    assert found <= set(Era)


def test_capacity_is_read_off_a_failed_request() -> None:
    snapshot = record(program(30 * MIB, 30 * MIB), capacity_bytes=50 * MIB)

    simulation = simulate(snapshot)

    assert simulation.baseline.capacity_bytes == 50 * MIB
    assert not simulation.baseline.fits
    assert simulation.fidelity.share == 1.0
    assert simulation.fidelity.reason == ""


def test_capacity_is_bounded_by_a_flush() -> None:
    """No request failed, but 30 MiB went to make room for 50."""
    snapshot = record(program(30 * MIB, 20 * MIB, -1, 50 * MIB), capacity_bytes=80 * MIB)

    simulation = simulate(snapshot)

    assert simulation.baseline.retries == 1
    assert simulation.baseline.capacity_bytes == 70 * MIB
    assert any("flush" in note for note in simulation.notes)


def test_capacity_without_evidence_is_unlimited() -> None:
    simulation = simulate(record(program(30 * MIB, 20 * MIB)), confs=["expandable_segments:True"])

    assert simulation.baseline.capacity_bytes is None
    assert simulation.results[0].capacity_bytes is None


def test_lost_events_are_the_reason() -> None:
    made = [n * MIB for n in (3, 4, 5, 6, 7, 8, 30)]
    whole = record(program(*made, -2, -4, 3 * MIB, 5 * MIB, -1))

    fidelity = report(find_reproduction(Trace.of(without_oldest(whole, 0, 9), 0)))

    assert fidelity.share is not None
    assert fidelity.share > 0.5
    assert fidelity.share == 1.0 or "oldest events" in fidelity.reason


def test_foreign_trace_is_refused() -> None:
    """Sizes and addresses that this allocator would never have made."""
    rng = np.random.default_rng(3)
    whole = record(program(*[int(s) for s in rng.integers(1, 40 * MIB, 60)]))
    address = whole.events.address.copy()
    address[:] = rng.permutation(address)
    foreign = dataclasses.replace(whole, events=dataclasses.replace(whole.events, address=address))

    with pytest.raises(SimulationError, match="contradict"):
        simulate(foreign)


def test_settings_that_the_file_forgot_are_found() -> None:
    """Expandable segments and the large segment size show in the trace."""
    for conf in ("expandable_segments:True", "large_segment_size_mb:32"):
        snapshot = record(program(5 * MIB, 30 * MIB, -1, 2 * MIB, 8 * MIB), conf)
        bare = dataclasses.replace(
            snapshot, settings=dataclasses.replace(snapshot.settings.from_recorded({}), conf="")
        )

        reproduction = find_reproduction(Trace.of(bare, 0))

        assert reproduction.is_exact, conf


@pytest.mark.shared
def test_complete_recordings_are_reproduced_exactly(shared: Path) -> None:
    for path in sorted((shared / "snapshots").glob("*/snapshot.pickle")):
        name = path.parent.name
        if name in INCOMPLETE | LOST_EVENTS:
            continue
        snapshot = read_snapshot(path)
        for device in snapshot.devices:
            reproduction = reproduce(trace_of(snapshot, device))

            assert reproduction.is_exact, (name, device, reproduction.comparison)
            assert report(reproduction).share == 1.0
            assert report(reproduction).era == "block_counter"


@pytest.mark.shared
def test_truncated_recordings_tell_the_order_of_old_blocks(shared: Path) -> None:
    """What the ring lost about ties shows in the addresses that were handed out."""
    for name in sorted(LOST_EVENTS):
        reproduction = reproduced(read_snapshot(shared / "snapshots" / name / "snapshot.pickle"))

        assert report(reproduction).share == 1.0, name
        assert reproduction.order_is_learned
        conditions = reproduction.conditions.native()
        assert reproduction.operations.replay_recorded(conditions) == (
            reproduction.raw,
            reproduction.comparison,
        )


@pytest.mark.shared
def test_recordings_without_trace_are_refused(shared: Path) -> None:
    paths = [shared / "snapshots" / name / "snapshot.pickle" for name in sorted(INCOMPLETE)]
    paths.append(shared / "real" / "yiyi_oom_snapshot.pickle")
    for path in paths:
        with pytest.raises(SimulationError, match=r"no trace|no request|one event|no device"):
            simulate(read_snapshot(path))


@pytest.mark.shared
def test_retries_agree_with_the_statistics(shared: Path) -> None:
    """The snapshot does not hold num_alloc_retries; memory_stats beside it does."""
    import json

    checked = 0
    for path in sorted((shared / "snapshots").glob("*/snapshot.pickle")):
        if path.parent.name in INCOMPLETE | LOST_EVENTS | {"kvcache_cat", "kvcache_cat_expandable"}:
            continue
        stats = json.loads((path.parent / "stats.json").read_text())
        snapshot = read_snapshot(path)
        for device in snapshot.devices:
            of_device = stats[device] if isinstance(stats, list) else stats
            reproduction = reproduce(trace_of(snapshot, device))
            assert reproduction.raw["retries"] == of_device["num_alloc_retries"], path.parent.name
            assert reproduction.raw["ooms"] == of_device["num_ooms"], path.parent.name
            checked += 1
    assert checked > 40


def test_programs_run_forever_without_capacity() -> None:
    assert operations_of(program(MIB)).facts()["lowest_need_bytes"] is None


def test_details_name_bytes_only_what_is_a_number() -> None:
    details = dict(simulate(record(program(30 * MIB, 20 * MIB))).fidelity.details)

    assert details["peak_reserved"] == {"recorded_bytes": 50 * MIB, "model_bytes": 50 * MIB}
    assert not [name for name in details if name.endswith("_bytes")]
