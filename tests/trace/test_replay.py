"""What a replay of any program must hold to."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from programs import (
    CONFS,
    ERAS,
    Program,
    operations_of,
    program,
    programs,
    record,
    recorded,
    reproduced,
    rows_of_requests,
    without_oldest,
)
from stock import from_python

from fragdoctor._native import _ext
from fragdoctor.errors import SimulationError
from fragdoctor.future.edits import empty_cache_at
from fragdoctor.future.simulator import simulate, trace_of
from fragdoctor.inputs.snapshot_reader import read_snapshot
from fragdoctor.model.hooks import watched_by
from fragdoctor.model.settings import AllocatorSettings, Era, parse_conf
from fragdoctor.model.snapshot import SegmentType, Snapshot
from fragdoctor.trace.allocator import native_config
from fragdoctor.trace.operations import OPERATION, Operations, OpKind
from fragdoctor.trace.replay import Conditions, allowed_by, report, result_of
from fragdoctor.trace.reproduction import reproduce
from fragdoctor.trace.trace import Trace
from fragdoctor.units import MIB

CAPACITIES = st.sampled_from([None, 64 * MIB, 200 * MIB, 401 * MIB, 1000 * MIB])


# One request maps pages of a reservation in vain, gives that back, and makes another one elsewhere.
MOVED = Program((
    ("alloc", 1, 1), ("free", 0, 0), ("alloc", 20 * MIB + 1, 0), ("alloc", 20 * MIB, 0),
    ("free", 2, 0), ("alloc", MIB + 1, 0), ("free", 1, 0), ("alloc", MIB + 1, 1), ("free", 3, 0),
    ("free", 4, 0), ("alloc", 40 * MIB + 1, 0),
))  # fmt: skip


# The last request prefers the larger hole to the end of a reservation on a device of unknown size.
ENDLESS = Program((
    ("alloc", 29 * MIB, 0), ("alloc", MIB + 1, 0), ("free", 0, 0), ("alloc", MIB + 1, 0),
))  # fmt: skip


@given(programs(), CONFS, ERAS, CAPACITIES)
@example(ENDLESS, "expandable_segments:True", Era.ADDRESS, None)
@example(MOVED, "expandable_segments:True", Era.ADDRESS, 64 * MIB)
@settings(max_examples=60, deadline=None)
def test_replay_of_recorded_program_reproduces_all_of_it(
    made: Program, conf: str, era: Era, capacity: int | None
) -> None:
    snapshot = record(made, conf, era=era, capacity_bytes=capacity)

    trace = Trace.of(snapshot, 0)
    reproduction = reproduce(trace, device_total_bytes=capacity)

    assert trace.contradictions == {}
    assert reproduction.is_exact, reproduction.comparison


@given(programs(), CONFS, ERAS, CAPACITIES)
@settings(max_examples=30, deadline=None)
def test_replay_totals_hang_together(
    made: Program, conf: str, era: Era, capacity: int | None
) -> None:
    conditions = Conditions(parse_conf(conf), era, capacity)

    first = operations_of(made).replay(conditions.native())
    again = operations_of(made).replay(conditions.native())

    assert first == again
    assert first["peak_reserved_bytes"] >= first["peak_active_bytes"]
    assert first["peak_active_bytes"] >= first["peak_allocated_bytes"]
    assert first["peak_reserved_bytes"] >= first["final_reserved_bytes"]
    assert first["retries"] >= first["ooms"]
    assert first["fits"] == (first["ooms"] == 0)
    if capacity is None:
        assert first["fits"]
    else:
        assert first["peak_reserved_bytes"] <= capacity


@given(programs(n_streams=1), st.integers(1, 200))
@settings(max_examples=30, deadline=None)
def test_replay_up_to_the_capacity_it_names_is_the_same(made: Program, pages: int) -> None:
    operations = operations_of(made)
    conditions = Conditions(AllocatorSettings(), Era.BLOCK_COUNTER, 2 * MIB * pages)
    run = operations.replay(conditions.native())
    change = run["same_below_bytes"]
    if change is None:
        return

    limit = (change - 1) // (2 * MIB) * 2 * MIB
    below = operations.replay(Conditions(AllocatorSettings(), Era.BLOCK_COUNTER, limit).native())

    assert below == run


@given(programs(), ERAS, st.lists(st.tuples(CONFS, CAPACITIES), min_size=2, max_size=6), st.data())
@settings(max_examples=40, deadline=None)
def test_replays_that_share_their_beginning_end_as_they_do_alone(
    made: Program, era: Era, tried: list[tuple[str, int | None]], data: st.DataObject
) -> None:
    shared = operations_of(made)
    table = Operations.of(shared).table.copy()
    at = data.draw(st.integers(0, len(table) - 1))
    table["size"][at] += 3 * MIB
    edited = Operations(table).native(shared)

    for conf, capacity in tried:
        config = Conditions(parse_conf(conf), era, capacity).native()
        alone = operations_of(made)
        assert shared.replay(config) == alone.replay(config)
        assert shared.play(config, at).recorded == operations_of(made).play(config, at).recorded
        edited_alone = Operations(table).native(operations_of(made))
        assert edited.replay(config) == edited_alone.replay(config)


def test_replay_stopped_at_failure_names_its_request() -> None:
    operations = operations_of(program(30 * MIB, 30 * MIB, 30 * MIB, -1))
    conditions = Conditions(AllocatorSettings(), Era.BLOCK_COUNTER, 50 * MIB)

    run = operations.replay(conditions.native(), stop_at_oom=True)

    assert not run["fits"]
    assert run["oom_event"] == 1
    assert run["oom_bytes"] == 30 * MIB
    assert run["n_replayed"] == 2


def test_replay_goes_on_after_failure_and_ignores_the_free_of_what_failed() -> None:
    operations = operations_of(program(30 * MIB, 30 * MIB, -2, -1, 30 * MIB))
    conditions = Conditions(AllocatorSettings(), Era.BLOCK_COUNTER, 50 * MIB)

    run = operations.replay(conditions.native())

    assert run["ooms"] == 1
    assert run["n_replayed"] == 3
    assert run["final_reserved_bytes"] == 30 * MIB


def test_replay_of_late_start_keeps_old_segments_where_they_lay() -> None:
    whole = record(program(12 * MIB, 12 * MIB, -1, 4 * MIB, 30 * MIB, -2))
    trace = Trace.of(whole, 0)
    operations = _ext.NativeOps(trace.native)

    run = operations.replay(Conditions(AllocatorSettings(), Era.BLOCK_COUNTER).native())

    assert run["n_bad_seeds"] == 0
    assert run["peak_reserved_bytes"] == trace.totals.peak_reserved_bytes


def test_edited_operations_out_of_range_are_refused() -> None:
    operations = operations_of(program(MIB))
    table = Operations.of(operations).table

    for name, value in (("kind", 200), ("pool", 7), ("allocation", 10**9)):
        changed = table.copy()
        changed[name][0] = value
        with pytest.raises(ValueError, match=r"operation|allocation"):
            Operations(changed).native(operations)


def test_each_edited_operation_may_add_an_allocation() -> None:
    operations = operations_of(program(*[MIB] * 50))
    last = Operations.of(operations).table[-1:]
    added, skipped = last.copy(), last.copy()
    added["allocation"], skipped["allocation"] = 50, 60

    Operations(added).native(operations)

    with pytest.raises(ValueError, match="not dense"):
        Operations(skipped).native(operations)


def test_edited_operations_of_another_layout_are_refused() -> None:
    operations = operations_of(program(MIB))
    table = operations.table().copy()

    for odd in (table[:-1].copy(), table[1:]):
        with pytest.raises(ValueError, match="table"):
            operations.edited(odd)


def test_operations_of_the_native_core_cannot_be_written() -> None:
    operations = operations_of(program(MIB))
    edited = Operations(Operations.of(operations).table.copy()).native(operations)

    for one in (operations, edited):
        with pytest.raises(ValueError, match="read-only"):
            Operations.of(one).kind[0] = 7


def test_edited_operations_survive_nonsense() -> None:
    """Frees of what was never made, or twice, and completions without request are ignored."""
    operations = operations_of(program(MIB, 2 * MIB))
    rng = np.random.default_rng(7)
    n = 2000
    table = np.zeros(n, OPERATION)
    table["kind"] = rng.integers(0, 8, n)
    table["size"] = rng.integers(0, 2**62, n) >> rng.integers(0, 60, n)
    table["allocation"] = rng.integers(0, 100, n)
    table["row"] = np.arange(n)
    table["stream"] = rng.integers(0, 5, n)
    edited = Operations(table).native(operations)

    run = edited.replay(Conditions(AllocatorSettings(), Era.BLOCK_COUNTER, 2**32).native())

    assert run["peak_reserved_bytes"] <= 2**32
    assert run["n_replayed"] > 0


def test_allowed_by_fraction_of_one_counts_before_2_10() -> None:
    assert allowed_by(0.3, 1000, "") == 300
    assert allowed_by(1.0, 1000, "2.12.1") is None
    assert allowed_by(1.0, 1000, "2.4.1") == 1000


@given(st.integers(1, 2**45), st.integers(0, 2**20))
def test_conditions_pass_the_allowed_bytes_on_exactly(allowed: int, more: int) -> None:
    conditions = Conditions(
        AllocatorSettings(), Era.BLOCK_COUNTER, None, allowed, device_total_bytes=allowed + more
    )

    config = conditions.native()

    assert int(config.memory_fraction * config.device_total_bytes) == allowed


def test_conditions_of_settings_match_the_model() -> None:
    settings_ = parse_conf("max_split_size_mb:64,roundup_power2_divisions:4")

    config = Conditions(settings_, Era.ADDRESS, 10 * MIB).native()

    assert config.max_split_bytes == native_config(settings_, era=Era.ADDRESS).max_split_bytes
    assert config.capacity_bytes == 10 * MIB


# What their names say is missing: nothing recorded, or the oldest events lost.
INCOMPLETE = {"empty", "no_history", "state_only"}
LOST_EVENTS = {"frag_gpt_long_truncated", "leak_features", "leak_losses", "ring_overflow"}


@given(programs(), ERAS)
@settings(max_examples=25, deadline=None)
def test_baseline_with_calls_of_empty_cache_infers_them(made: Program, era: Era) -> None:
    plain = record(made, era=era)
    reproduction = reproduced(plain)
    called = empty_cache_at(rows_of_requests(reproduction)[3::3]).apply(reproduction)

    reproduction = reproduce(Trace.of(recorded(called, era=era), 0))

    assert reproduction.is_exact, reproduction.comparison


@given(programs(), st.sampled_from(["", "garbage_collection_threshold:0.5"]))
@settings(max_examples=25, deadline=None)
def test_baseline_under_memory_fraction_loses_no_request(made: Program, conf: str) -> None:
    """The limit is found where the trace shows it: the failing requests fail in the model too."""
    snapshot = record(made, conf, capacity_bytes=400 * MIB, allowed_fraction=0.3)

    reproduction = reproduce(Trace.of(snapshot, 0), device_total_bytes=400 * MIB)

    assert reproduction.comparison["n_failed_equal"] == reproduction.comparison["n_failed"]
    assert reproduction.is_exact


def test_era_is_found_where_a_collection_hides_it() -> None:
    """Without the fraction another order reproduces more; under it only the real one does all."""
    old = [("alloc", MIB, 1), ("alloc", 512, 1), ("alloc", MIB, 1)]
    old += [("free", 0, 0), ("free", 1, 0), ("free", 2, 0)]
    old += [("alloc", 512, 1), ("free", 3, 0)]  # from the lower of two free segments
    collected = [("alloc", 512, 0)] * 3 + [("alloc", 2 * MIB, 0), ("alloc", 512, 0)]
    collected += [("alloc", 512, 1), ("free", 7, 0), ("alloc", MIB, 0)]
    last = [("alloc", 35 * MIB, 0), ("alloc", MIB - 1024, 0), ("free", 9, 0), ("alloc", 512, 1)]
    made = Program((*old, *collected, *last))
    conf = "garbage_collection_threshold:0.5"
    snapshot = record(made, conf, capacity_bytes=400 * MIB, allowed_fraction=0.3)

    reproduction = reproduce(Trace.of(snapshot, 0), device_total_bytes=400 * MIB)

    assert reproduction.is_exact
    assert reproduction.conditions.era is Era.BLOCK_COUNTER


def test_order_that_reproduces_all_addresses_of_a_long_trace_is_the_last_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fragdoctor.trace.reproduction.PREFIX_OPERATIONS", 5)
    trace = Trace.of(record(program(*[2 * MIB, 3 * MIB, 4 * MIB] * 3), era=Era.ADDRESS), 0)
    told: list[str] = []

    with watched_by(lambda what, _done, _total: told.append(what)):
        best = reproduce(trace)

    assert best.is_exact
    assert told == [f"Reproducing the recorded run, attempt {i}" for i in (1, 2)]


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


MANY_SIZES = program(
    7 * MIB, -1, 14 * MIB, 8 * MIB, -3, -2, 5 * MIB, -4, 8 * MIB, -5, 4 * MIB, 8 * MIB, 12 * MIB
)  # fmt: skip


def without_event(snapshot: Snapshot, row: int) -> Snapshot:
    """Return a snapshot of one device whose trace lacks an event in the middle."""
    events = snapshot.events
    n = len(events.action)
    columns = {name: getattr(events, name) for name in events.__struct_fields__}
    kept = {k: np.delete(v, row) for k, v in columns.items() if np.shape(v)[:1] == (n,)}
    return replace(snapshot, events=replace(events, **kept, offsets=np.array([0, n - 1])))


def test_event_that_is_missing_in_the_middle_is_the_reason() -> None:
    cut = without_event(record(MANY_SIZES), 1)

    fidelity = report(reproduce(Trace.of(cut, 0)))

    assert fidelity.share < 1.0
    assert fidelity.reason == "1 event contradicts the rest of the file: events are missing"


def test_segments_without_a_pool_are_a_reason() -> None:
    late = without_oldest(record(MANY_SIZES), 0, 12)
    kind = np.full_like(late.segments.kind, SegmentType.UNKNOWN)
    unknown = replace(late, segments=replace(late.segments, kind=kind))

    told, bare = (report(reproduce(Trace.of(one, 0))).reason for one in (late, unknown))

    assert bare == f"{told}; the file does not say which pool a segment belongs to"


@pytest.mark.slow
def test_replay_that_flushes_without_end_is_stopped_and_serves_nothing() -> None:
    """A crafted trace: each of many requests fails, after a look at each of very many holes."""
    n, n_failing = 1_000_000, 270_000
    full, holes = slice(0, 2 * n), slice(2 * n, 3 * n)
    failing, let_go = slice(3 * n, None, 2), slice(3 * n + 1, None, 2)
    # Written as the core holds operations: to make a recording of them takes longer than the rest.
    table = np.zeros(3 * n + 2 * n_failing, OPERATION)
    table["row"] = np.arange(len(table))
    table["size"][full], table["size"][failing] = 512, 30 * MIB
    table["kind"][holes] = table["kind"][let_go] = OpKind.FREE
    table["allocation"][full] = np.arange(2 * n)
    table["allocation"][holes] = np.arange(0, 2 * n, 2)
    table["allocation"][3 * n :] = np.arange(2 * n, 2 * n + n_failing).repeat(2)
    operations = Operations(table).native(operations_of(program(512)))
    conditions = Conditions(
        AllocatorSettings(), Era.BLOCK_COUNTER, capacity_bytes=2 * n * 512 + 2 * MIB
    )

    raw = operations.replay(conditions.native())

    result = result_of(raw, conditions)
    assert not result.fits
    assert result.note.startswith("stopped early")
    assert result.ooms < n_failing


def test_lost_events_are_the_reason() -> None:
    whole = record(MANY_SIZES)

    fidelity = report(reproduce(Trace.of(without_oldest(whole, 0, 12), 0)))

    assert fidelity.share == 1.0
    assert fidelity.reason.startswith(
        "1 block lies elsewhere, without effect on segments: the trace begins late or lost its "
        "oldest events"
    )


def test_foreign_trace_is_refused() -> None:
    """Sizes and addresses that this allocator would never have made."""
    rng = np.random.default_rng(3)
    whole = record(program(*[int(s) for s in rng.integers(1, 40 * MIB, 60)]))
    address = whole.events.address.copy()
    address[:] = rng.permutation(address)
    foreign = replace(whole, events=replace(whole.events, address=address))

    with pytest.raises(SimulationError, match="contradict"):
        simulate(foreign)


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
def test_retries_agree_with_the_statistics(shared: Path, has_all_recordings: bool) -> None:
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
    assert checked > (40 if has_all_recordings else 25)


def test_programs_run_forever_without_capacity() -> None:
    assert operations_of(program(MIB)).facts()["lowest_need_bytes"] is None


def test_pool_of_memory_that_stays_is_read_off_the_final_segments() -> None:
    """Before 2.12 no event names its pool: what a CUDA graph freed serves nobody else."""
    in_graph, ordinary, size = 0x7000_0000_0000, 0x7000_1000_0000, 8 * MIB
    made = [
        ("segment_alloc", in_graph, 20 * MIB),
        ("alloc", in_graph, size),
        ("free_requested", in_graph, size),
        ("free_completed", in_graph, size),
        ("segment_alloc", ordinary, 20 * MIB),
        ("alloc", ordinary, size),
    ]
    segments = [
        {
            "device": 0,
            "address": address,
            "total_size": 20 * MIB,
            "stream": 0,
            "segment_type": "large",
            "segment_pool_id": (0, pool),
            "blocks": blocks,
        }
        for address, pool, blocks in (
            (in_graph, 1, [{"size": 20 * MIB, "requested_size": 0, "state": "inactive"}]),
            (
                ordinary,
                0,
                [
                    {"size": size, "requested_size": size, "state": "active_allocated"},
                    {"size": 20 * MIB - size, "requested_size": 0, "state": "inactive"},
                ],
            ),
        )
    ]
    events = [{"action": a, "addr": at, "size": n, "stream": 0} for a, at, n in made]
    snapshot = from_python({"segments": segments, "device_traces": [events]})

    reproduction = reproduce(Trace.of(snapshot, 0))

    ops = Operations.of(reproduction.operations)
    assert ops.table["pool"][ops.is_request].tolist() == [1, 0]
    assert reproduction.is_exact
