"""Changed code, replayed: each edit does what its name says to the requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from programs import program, record, reproduced, rows_of_requests
from stock import from_python
from toy_allocator import ToyAllocator

from fragdoctor.analysis.growth import StepEnds
from fragdoctor.errors import ConfigError, SimulationError
from fragdoctor.future import edits, training_edits
from fragdoctor.future.edits import Edit
from fragdoctor.future.steps import Steps
from fragdoctor.future.whatif import FairReplay, WhatIf
from fragdoctor.inputs.snapshot_reader import read_snapshot
from fragdoctor.model.simulation import ReplayResult
from fragdoctor.model.snapshot import Snapshot
from fragdoctor.trace.operations import Operations, OpKind
from fragdoctor.trace.replay import Reproduction
from fragdoctor.units import MIB

BASE = 0x7000_0000_0000


def changed(reproduction: Reproduction, edit: Edit) -> Operations:
    return Operations.of(edit.apply(reproduction))


def replayed(snapshot: Snapshot, edit: Edit, **what_if: Any) -> ReplayResult:
    reproduction = reproduced(snapshot)
    asked = WhatIf(edit=edit.name, **what_if)
    return FairReplay(reproduction).replay(asked, edit.apply(reproduction))


def live_addresses(snapshot: Snapshot) -> list[int]:
    return [int(a) for a in snapshot.blocks.address[snapshot.blocks.state == 1]]


def stepped(n_steps: int, *, sizes: tuple[int, ...] = (6, 7, 8)) -> Snapshot:
    """Return a run of steps: a parameter first; each step makes three blocks and frees two.

    The step's number enters its sizes, and the third block of each step leaks.
    """
    events: list[dict[str, Any]] = []
    at = BASE

    def alloc(size: int, line: int) -> int:
        nonlocal at
        address = at
        at += 64 * MIB
        frames = [{"filename": "train.py", "line": line, "name": "step"}]
        events.append({"action": "segment_alloc", "addr": address, "size": _segment(size),
                       "stream": 0})  # fmt: skip
        events.append({"action": "alloc", "addr": address, "size": size, "stream": 0,
                       "frames": frames})  # fmt: skip
        segments.append((address, size))
        return address

    segments: list[tuple[int, int]] = []
    live: set[int] = {alloc(10 * MIB, 1)}
    for step in range(n_steps):
        made = [alloc(size * MIB * 2 + step * 2 * MIB, 10 + i) for i, size in enumerate(sizes)]
        for address in made[:2]:
            size = dict(segments)[address]
            events += [
                {"action": action, "addr": address, "size": size, "stream": 0}
                for action in ("free_requested", "free_completed")
            ]
        live.add(made[2])
    return from_python(
        {
            "segments": [
                {"device": 0, "address": a, "total_size": _segment(s), "stream": 0,
                 "segment_type": "large",
                 "blocks": [{"size": s, "requested_size": s,
                             "state": "active_allocated" if a in live else "inactive"}]}
                for a, s in segments
            ],
            "device_traces": [events],
        }
    )  # fmt: skip


def _segment(size: int) -> int:
    return -(-size // (2 * MIB)) * 2 * MIB


def test_empty_cache_is_called_before_the_rows_asked() -> None:
    reproduction = reproduced(record(program(12 * MIB, -1, 30 * MIB, -2, 40 * MIB)))
    last = reproduction.trace.n_events - 1

    operations = changed(reproduction, edits.empty_cache_at([last]))

    assert operations.kind.tolist()[-2:] == [OpKind.EMPTY_CACHE, OpKind.MALLOC]


def test_empty_cache_returns_what_hinders() -> None:
    """Cached segments of 30 MiB cannot serve 60 MiB; without a flush they would add up."""
    snapshot = record(program(30 * MIB, 30 * MIB, -1, -2, 60 * MIB))

    last = rows_of_requests(reproduced(snapshot))[-1]

    result = replayed(snapshot, edits.empty_cache_at([last]))

    assert reproduced(snapshot).result.peak_reserved_bytes == 120 * MIB
    assert result.peak_reserved_bytes == 60 * MIB
    assert result.edit == "empty_cache() at 1 chosen points"


@pytest.mark.parametrize("goes_on", [False, True])
def test_what_an_exception_lets_go_of_is_no_request_of_the_program(goes_on: bool) -> None:
    toy = ToyAllocator()
    blocks = [toy.malloc(size * MIB) for size in (30, 40)]
    toy.refuse(100 * MIB, MIB)
    for block in blocks:
        toy.free(block)
    if goes_on:
        toy.malloc(50 * MIB)

    operations = Operations.of(reproduced(from_python(toy.data())).operations)

    ends = [OpKind.FREE, OpKind.FREE, OpKind.MALLOC] if goes_on else []
    assert operations.kind.tolist() == [OpKind.MALLOC, OpKind.MALLOC, OpKind.FAILED, *ends]


def test_sizes_are_padded_above_the_threshold_only() -> None:
    reproduction = reproduced(record(program(1000, 3 * MIB + 1, 8 * MIB)))

    operations = changed(reproduction, edits.sizes_padded(4 * MIB))

    assert operations.size.tolist() == [1000, 4 * MIB, 8 * MIB]


def test_without_stranding_block_the_request_fits() -> None:
    """A small block in the middle of 60 MiB keeps 40 MiB from being returned."""
    asked = program(60 * MIB, -1, 20 * MIB, 2 * MIB, -2, 50 * MIB)
    snapshot = record(asked, capacity_bytes=80 * MIB)
    strander = [a for a in live_addresses(snapshot) if a != 0]

    never_made = replayed(snapshot, edits.blocks_freed(strander))
    freed = replayed(snapshot, edits.blocks_freed(strander, row=len(snapshot.events) - 1))

    assert not reproduced(snapshot).result.fits
    assert never_made.fits
    assert freed.fits
    assert freed.edit == "without 1 block"


def test_blocks_older_than_the_trace_can_be_left_out() -> None:
    snapshot = from_python(
        {
            "segments": [
                {"device": 0, "address": BASE, "total_size": 20 * MIB, "stream": 0,
                 "segment_type": "large",
                 "blocks": [{"size": 20 * MIB, "requested_size": 20 * MIB,
                             "state": "active_allocated"}]}
            ],
            "device_traces": [
                [{"action": "oom", "size": 30 * MIB, "stream": 0, "device_free": 20 * MIB}] * 2
            ],
        }
    )  # fmt: skip

    assert not reproduced(snapshot).result.fits
    assert replayed(snapshot, edits.blocks_freed([BASE])).fits


def test_address_without_live_block_is_refused() -> None:
    reproduction = reproduced(record(program(30 * MIB, -1)))

    with pytest.raises(SimulationError, match="No block is live at 0x123"):
        edits.blocks_freed([0x123]).apply(reproduction)


def test_steps_are_found_by_their_stacks() -> None:
    steps = Steps.of(reproduced(stepped(5)).trace)

    assert len(steps) == 5
    assert steps.at(steps.rows - 1).tolist() == [-1, 0, 1, 2, 3]


def test_leak_removed_frees_survivors_at_the_end_of_their_step() -> None:
    snapshot = stepped(4)
    reproduction = reproduced(snapshot)
    lives = reproduction.trace.lives
    leaked = np.flatnonzero(lives.survives)[1:]
    ends = StepEnds.of(reproduction.trace).end_of(lives.start[leaked])

    operations = changed(reproduction, edits.leak_removed(leaked, ends))

    before = Operations.of(reproduction.operations)
    n_frees = int((operations.kind == OpKind.FREE).sum())
    assert n_frees == int((before.kind == OpKind.FREE).sum()) + 4


def test_batch_scaled_leaves_parameters_alone() -> None:
    reproduction = reproduced(stepped(4))

    operations = changed(reproduction, training_edits.batch_scaled(0.5))

    before = Operations.of(reproduction.operations)
    assert operations.size[0] == 10 * MIB
    freed = set(before.allocation[before.kind == OpKind.FREE].tolist())
    for i in range(len(before)):
        if before.kind[i] == OpKind.MALLOC and int(before.allocation[i]) in freed:
            assert operations.size[i] == before.size[i] // 2


def test_results_of_a_forward_pass_shrink_though_a_parameter_is_as_large() -> None:
    reproduction = reproduced(stepped(4))
    before = Operations.of(reproduction.operations)
    first, last = int(before.row[0]) + 1, int(before.row.max())
    passes = np.array([first], np.int64), np.array([last + 1], np.int64)
    parameter = int(before.size[0])
    table = before.table.copy()
    table["size"][1:][before.kind[1:] == OpKind.MALLOC] = parameter

    for forward, size in ((passes, parameter // 2), (training_edits.NO_PASSES, parameter)):
        edit = training_edits.passes_scaled(passes, first, 0.5, forward)
        sizes = edit.change(reproduction, Operations(table)).size
        assert set(sizes[1:][before.kind[1:] == OpKind.MALLOC].tolist()) == {size}


def test_edits_refuse_wrong_numbers() -> None:
    for make in (
        lambda: edits.sizes_padded(0),
        lambda: training_edits.batch_scaled(0.0),
        lambda: training_edits.batch_scaled(float("nan")),
    ):
        with pytest.raises(ConfigError):
            make()


@pytest.mark.shared
def test_edits_of_real_trace(shared: Path) -> None:
    """Figures of the real allocator, driven with the changed requests."""
    snapshot = read_snapshot(shared / "snapshots" / "frag_gpt_varlen" / "snapshot.pickle")

    chosen = (
        edits.empty_cache_at(rows_of_requests(reproduced(snapshot))[500::500]),
        edits.sizes_padded(8 * MIB),
    )
    results = [replayed(snapshot, edit, capacity_bytes=3900 * MIB) for edit in chosen]

    got = [(r.fits, r.peak_reserved_bytes) for r in results]
    assert got == [(True, 3512729600), (False, 3846176768)]


@pytest.mark.shared
def test_steps_of_real_traces(shared: Path) -> None:
    expected = {"healthy_gpt": 4, "frag_gpt_varlen": 7, "convnet_varsize": 10, "two_devices": 3}
    for name, n_steps in expected.items():
        snapshot = read_snapshot(shared / "snapshots" / name / "snapshot.pickle")
        steps = Steps.of(reproduced(snapshot).trace)
        assert len(steps) == n_steps, name
