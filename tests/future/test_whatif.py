"""What-ifs against the real allocator, and the search for the smallest capacity."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from msgspec.structs import replace
from programs import CONFS, Program, operations_of, program, programs, record, reproduced

from fragdoctor.errors import ConfigError, SimulationError
from fragdoctor.future.search import with_smallest_capacity
from fragdoctor.future.simulator import simulate
from fragdoctor.future.whatif import (
    ROUNDED,
    FairReplay,
    WhatIf,
    conditions_of,
    replay_what_if,
)
from fragdoctor.inputs.snapshot_reader import read_snapshot
from fragdoctor.trace.replay import PAGE_BYTES
from fragdoctor.units import MIB

EXP = "expandable_segments:True"

# The requests of frag_gpt_varlen, the failing one included, driven through the real allocator of
# PyTorch 2.12.1: capacity in MiB, settings -> peak reserved, final reserved, retries, failed
# requests, event of the first that failed, peak allocated.
REAL = [
    (3900, "", 4083154944, 3577741312, 2, 1, 10872, 3175552512),
    (3900, "expandable_segments:True", 3437232128, 3437232128, 0, 0, None, 3378723328),
    (3900, "max_split_size_mb:128", 4078960640, 3628072960, 2, 0, None, 3396016640),
    (3900, "roundup_power2_divisions:4", 4053794816, 4013948928, 2, 0, None, 3464409600),
    (3900, "garbage_collection_threshold:0.8", 4083154944, 3577741312, 2, 1, 10872, 3175552512),
    (3900, f"max_split_size_mb:64,{EXP}", 4066377728, 3959422976, 2, 0, None, 3378723328),
    (3900, f"large_segment_size_mb:32,{EXP}", 3462397952, 3462397952, 0, 0, None, 3378723328),
    (3600, "roundup_power2_divisions:4", 3579838464, 3477078016, 4, 3, 4047, 3084709376),
    (3600, "max_split_size_mb:32", 3774873600, 3569352704, 2, 0, None, 3470531072),
    (3600, "large_segment_size_mb:64", 3720347648, 3267362816, 3, 1, 10872, 3173946880),
    (3000, "", 3139436544, 3139436544, 9, 6, 4047, 2872400384),
    (3000, "expandable_segments:True", 3099590656, 2904555520, 3, 2, 7489, 2985813504),
    (3000, "max_split_size_mb:128", 3143630848, 3105882112, 11, 4, 4047, 2874497536),
    (3000, f"{EXP},roundup_power2_divisions:4", 3122659328, 2988441600, 4, 3, 4047, 3071077888),
    (3000, f"max_split_size_mb:64,{EXP}", 3143630848, 2925527040, 9, 2, 7489, 2985813504),
    (4400, "", 4527751168, 4003463168, 1, 0, None, 3394329088),
    (4400, "max_split_size_mb:128", 4596957184, 3588227072, 1, 0, None, 3394968064),
    (4400, "roundup_power2_divisions:8", 4320133120, 4320133120, 1, 0, None, 3464933888),
    (4400, f"max_split_size_mb:64,{EXP}", 4525654016, 4336910336, 2, 0, None, 3378723328),
]  # fmt: skip


@pytest.mark.shared
def test_whatif_of_real_trace_equals_the_real_allocator(shared: Path) -> None:
    snapshot = read_snapshot(shared / "snapshots" / "frag_gpt_varlen" / "snapshot.pickle")
    reproduction = reproduced(snapshot)

    for mb, conf, peak, final, retries, ooms, event, allocated in REAL:
        got = replay_what_if(reproduction, WhatIf(conf=conf, capacity_bytes=mb * MIB))

        figures = (got.peak_reserved_bytes, got.final_reserved_bytes, got.retries, got.ooms)
        assert figures == (peak, final, retries, ooms), (mb, conf)
        assert got.oom_event == event
        assert got.peak_allocated_bytes == allocated
        assert got.fits is (event is None)


@pytest.mark.shared
def test_expandable_segments_would_break_the_growing_cache(shared: Path) -> None:
    """kvcache_cat passes as it is; its twin under expandable segments ran out of memory."""
    snapshot = read_snapshot(shared / "snapshots" / "kvcache_cat" / "snapshot.pickle")

    simulation = simulate(snapshot, confs=["expandable_segments:True"], capacity_bytes=700 * MIB)

    assert simulation.baseline.fits
    assert not simulation.results[0].fits
    assert "requested again" in simulation.results[0].note


@pytest.mark.shared
def test_fitting_is_not_monotone_in_capacity(shared: Path) -> None:
    snapshot = read_snapshot(shared / "snapshots" / "frag_gpt_varlen" / "snapshot.pickle")
    reproduction = reproduced(snapshot)
    result = replay_what_if(reproduction, WhatIf())

    found = with_smallest_capacity(reproduction, WhatIf(), result)

    assert found.smallest_capacity_bytes is not None
    assert found.smallest_capacity_bytes < 3900 * MIB
    assert not found.fits
    assert "not monotone" in found.smallest_capacity_note
    at_smallest = replay_what_if(reproduction, WhatIf(capacity_bytes=found.smallest_capacity_bytes))
    assert at_smallest.fits


@given(programs(max_requests=15, n_streams=1), CONFS)
@settings(max_examples=15, deadline=None)
def test_smallest_capacity_is_that_of_trying_all(made: Program, conf: str) -> None:
    reproduction = reproduced(record(made))
    what_if = WhatIf(conf=conf)
    result = replay_what_if(reproduction, what_if)
    high = result.peak_reserved_bytes // PAGE_BYTES

    found = with_smallest_capacity(reproduction, what_if, result)

    fitting = [
        pages * PAGE_BYTES
        for pages in range(1, high + 1)
        if replay_what_if(reproduction, WhatIf(conf=conf, capacity_bytes=pages * PAGE_BYTES)).fits
    ]
    assert found.smallest_capacity_bytes == min(fitting)
    is_monotone = len(fitting) == high - min(fitting) // PAGE_BYTES + 1
    assert ("not monotone" in found.smallest_capacity_note) is not is_monotone


def test_smallest_capacity_may_lie_below_peak_active() -> None:
    """An oversize block of 34 MiB serves 32 MiB uncut; flushed for want of memory, it need not."""
    small = [1] * 20
    reproduction = reproduced(record(program(32 * MIB + 1, -1, *small, 32 * MIB - 511)))
    what_if = WhatIf(conf="max_split_size_mb:32")
    result = replay_what_if(reproduction, what_if)

    found = with_smallest_capacity(reproduction, what_if, result)

    assert result.peak_active_bytes > 34 * MIB
    assert found.smallest_capacity_bytes == 34 * MIB


def test_request_that_fails_anywhere_has_no_smallest_capacity() -> None:
    reproduction = reproduced(record(program(MIB)))
    operations = operations_of(program(2**52))
    result = replay_what_if(reproduction, WhatIf(), operations)

    found = with_smallest_capacity(reproduction, WhatIf(), result, operations)

    assert found.smallest_capacity_bytes is None
    assert "any capacity" in found.smallest_capacity_note


def test_failed_request_that_fits_elsewhere_is_not_kept() -> None:
    """Replayed on a larger device, the request that failed is served, and given back."""
    reproduction = reproduced(
        record(program(30 * MIB, 40 * MIB, 10 * MIB), capacity_bytes=60 * MIB)
    )

    larger = replay_what_if(reproduction, WhatIf(capacity_bytes=200 * MIB))

    assert not reproduction.result.fits
    assert reproduction.result.oom_event == 2
    assert reproduction.result.oom_bytes == 40 * MIB
    assert larger.fits
    assert larger.peak_reserved_bytes == 70 * MIB
    assert larger.peak_allocated_bytes == 70 * MIB
    assert larger.n_replayed == 3


def test_fraction_limits_by_the_capacity() -> None:
    reproduction = reproduced(record(program(30 * MIB, 30 * MIB)))

    limited = replay_what_if(reproduction, WhatIf(capacity_bytes=100 * MIB, memory_fraction=0.5))
    in_conf = replay_what_if(
        reproduction, WhatIf(capacity_bytes=100 * MIB, conf="per_process_memory_fraction:0.5")
    )

    assert not limited.fits
    assert limited.capacity_bytes == 50 * MIB
    assert limited.memory_fraction == 0.5
    assert not in_conf.fits


def test_fraction_of_unknown_memory_is_refused() -> None:
    reproduction = reproduced(record(program(30 * MIB)))

    with pytest.raises(SimulationError, match="size of the device"):
        replay_what_if(reproduction, WhatIf(memory_fraction=0.5))


def test_inferred_fraction_holds_unless_a_capacity_is_given() -> None:
    snapshot = record(program(30 * MIB, 30 * MIB), capacity_bytes=1000 * MIB, allowed_fraction=0.05)
    reproduction = reproduced(snapshot)

    as_recorded = replay_what_if(reproduction, WhatIf(conf="expandable_segments:True"))
    freed = replay_what_if(reproduction, WhatIf(capacity_bytes=1000 * MIB))

    assert reproduction.least_allowed_bytes == 30 * MIB
    assert not as_recorded.fits
    assert freed.fits


def test_version_decides_about_keys_and_order() -> None:
    reproduction = reproduced(record(program(30 * MIB)))

    with pytest.raises(ConfigError):
        conditions_of(reproduction, WhatIf(conf="large_segment_size_mb:64", torch_version="2.4.1"))
    with pytest.raises(SimulationError, match="cudaMallocAsync"):
        conditions_of(reproduction, WhatIf(conf="backend:cudaMallocAsync")).native()
    old = conditions_of(reproduction, WhatIf(conf="", torch_version="2.4.1"))
    assert old.era.name == "ADDRESS"


@pytest.mark.parametrize(("capacity_mib", "is_known"), [(56, False), (52, True)])
def test_failed_request_that_was_rounded_up_is_known_only_within_its_division(
    capacity_mib: int, is_known: bool
) -> None:
    # 34 MiB are recorded as 40: they may have been 32 MiB and a byte, for which 34 are reserved.
    made = program(20 * MIB, 34 * MIB)
    snapshot = record(made, "roundup_power2_divisions:4", capacity_bytes=capacity_mib * MIB)
    replays = FairReplay(reproduced(snapshot))

    other = replays.replay(WhatIf(conf=""))
    same = replays.replay(WhatIf(conf="roundup_power2_divisions:4"))

    assert not other.fits
    assert other.oom_bytes == 40 * MIB
    assert other.is_conclusive is is_known
    assert (other.note == ROUNDED) is not is_known
    assert not same.fits
    assert same.is_conclusive


def test_inferred_fraction_promises_only_what_holds_under_the_least_of_them() -> None:
    snapshot = record(program(30 * MIB, 30 * MIB), capacity_bytes=1000 * MIB, allowed_fraction=0.05)
    reproduction = reproduced(snapshot)
    likeliest = reproduction.conditions.allowed_bytes

    assert likeliest is not None
    assert reproduction.least_allowed_bytes == 30 * MIB < likeliest
    assert conditions_of(reproduction, WhatIf()).allowed_bytes == 30 * MIB
    assert conditions_of(reproduction, WhatIf(allowed_bytes=likeliest)).allowed_bytes == likeliest


@pytest.mark.parametrize(("slack_mib", "fits"), [(0, True), (3, True), (20, False)])
def test_stated_limit_bounds_what_a_fraction_allowed(slack_mib: int, fits: bool) -> None:
    """Of 140 MiB reserved, pages return 60: another 80 need 160, which only the limit allows."""
    made = program(40 * MIB, 100 * MIB, -2, 22 * MIB, 80 * MIB)
    snapshot = record(made, capacity_bytes=1000 * MIB, allowed_fraction=0.165)
    stated = ((165 - slack_mib) * MIB - MIB, (165 + slack_mib) * MIB)

    reproduction = reproduced(snapshot, stated_limit=stated)
    paged = replay_what_if(reproduction, WhatIf(conf="expandable_segments:True"))

    assert reproduction.is_exact
    assert paged.fits is fits


def test_limit_of_a_bundle_is_known_without_being_told() -> None:
    made = program(40 * MIB, 100 * MIB, -2, 22 * MIB, 80 * MIB)
    snapshot = record(made, capacity_bytes=1000 * MIB, allowed_fraction=0.165)

    told = simulate(replace(snapshot, limits={0: 165 * MIB - 1}), confs=[EXP])
    untold = simulate(snapshot, confs=[EXP])

    assert told.results[0].fits
    assert told.results[0].is_conclusive
    assert not untold.results[0].is_conclusive
