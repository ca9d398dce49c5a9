"""What a replay of any program must hold to."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import CONFS, ERAS, Program, operations_of, program, programs, record, reproduced

from fragdoctor._native import _ext
from fragdoctor.model.settings import AllocatorSettings, Era, parse_conf
from fragdoctor.trace.allocator import native_config
from fragdoctor.trace.operations import OPERATION, Operations, OpKind
from fragdoctor.trace.replay import Conditions, allowed_by
from fragdoctor.trace.reproduction import find_reproduction
from fragdoctor.trace.trace import Trace
from fragdoctor.units import MIB

CAPACITIES = st.sampled_from([None, 64 * MIB, 200 * MIB, 401 * MIB, 1000 * MIB])


@given(programs(), CONFS, ERAS, CAPACITIES)
@settings(max_examples=60, deadline=None)
def test_replay_of_recorded_program_reproduces_all_of_it(
    made: Program, conf: str, era: Era, capacity: int | None
) -> None:
    snapshot = record(made, conf, era=era, capacity_bytes=capacity)

    trace = Trace.of(snapshot, 0)
    reproduction = find_reproduction(trace, device_total_bytes=capacity)

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


def test_baseline_counts_operations_by_kind() -> None:
    reproduction = reproduced(record(program(MIB, 30 * MIB, -1, 5 * MIB)))

    kinds = Operations.of(reproduction.operations).kind.tolist()

    assert kinds == [OpKind.MALLOC, OpKind.MALLOC, OpKind.FREE, OpKind.MALLOC]
