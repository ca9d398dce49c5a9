"""``simulate``: the public entry to replay, fidelity and what-ifs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from fragdoctor.errors import SimulationError
from fragdoctor.future.other_run import OtherRun
from fragdoctor.future.search import (
    best_of,
    gaining,
    pareto_of,
    sweep_candidates,
    with_smallest_capacity,
)
from fragdoctor.future.whatif import FairReplay, WhatIf, check_version, default_capacity
from fragdoctor.model.arrays import distinct
from fragdoctor.model.hooks import report_progress
from fragdoctor.model.simulation import ReplayResult, Simulation
from fragdoctor.model.snapshot import Action, Snapshot
from fragdoctor.trace.replay import Reproduction, is_foreign, report
from fragdoctor.trace.reproduction import reproduce
from fragdoctor.trace.trace import Trace
from fragdoctor.units import format_mebibytes, plural

# Below this share of reproduced events and blocks a what-if is an estimate.
REPLAY_SHARE = 0.95


def simulate(  # noqa: PLR0913 - the questions of one what-if, all by keyword
    source: Snapshot | Trace,
    *,
    device: int | None = None,
    confs: Sequence[str] = (),
    sweep: bool = False,
    capacity_bytes: int | None = None,
    memory_fraction: float | None = None,
    torch_version: str | None = None,
    smallest_capacity: bool = False,
    steps: int | None = None,
    continue_with: Snapshot | None = None,
) -> Simulation:
    """Replay a trace as recorded and under every condition asked for.

    Args:
        source: the trace, or a snapshot with one.
        device: device of a snapshot whose trace is replayed. If None, the one that ran out of
            memory, or the busiest.
        confs: setting strings, each replacing the recorded settings.
        sweep: also try all sensible settings, and mark the best ones.
        capacity_bytes: what PyTorch can have of the device; as recorded if None.
        memory_fraction: as for ``set_per_process_memory_fraction``.
        torch_version: version whose rules and keys the what-ifs follow; the recording's if None.
        smallest_capacity: also find the smallest capacity at which each run fits; in a sweep, each
            run of the Pareto set.
        steps: how many whole steps to play after the current one. If None, play until they repeat.
        continue_with: a recording of the same program that goes further (a rehearsal, a healthy
            run): it says how the run continues wherever the code is as recorded.

    Returns:
        The reproduction with its fidelity, and one result per conf, in that order. Without one,
        one result under the recorded settings if capacity, fraction or version differ.

    Raises:
        SimulationError: if there is no trace to replay, no device of that number, or the recording
            to continue with is of another program.
        ConfigError: if a setting string, the fraction or the version is wrong.
    """
    version = check_version(torch_version)
    trace = source if isinstance(source, Trace) else trace_of(source, device)
    reproduction = reproduce(trace)
    what_if = WhatIf(
        capacity_bytes=capacity_bytes, memory_fraction=memory_fraction, torch_version=version
    )
    other = continued_with(reproduction, continue_with, steps)
    fair = FairReplay(reproduction, steps, other)
    if sweep:
        candidates = sweep_candidates(reproduction, version or None)
        if capacity_bytes is None and default_capacity(reproduction) is None:
            # A fraction of a device of unknown size does not set a limit.
            candidates = tuple(c for c in candidates if "memory_fraction" not in c)
        found = search_settings(fair, tuple(dict.fromkeys((*confs, *candidates))), what_if)
        return _with_smallest(reproduction, found, what_if) if smallest_capacity else found
    differs = capacity_bytes is not None or memory_fraction is not None or bool(version)
    asked = [replace(what_if, conf=conf) for conf in confs]
    if not asked and (differs or smallest_capacity or steps is not None):
        asked = [what_if]
    results: list[ReplayResult] = []
    for i, one in enumerate(asked):
        report_progress("Replaying", i, len(asked))
        result = fair.replay(one)
        if smallest_capacity:
            result = with_smallest_capacity(reproduction, one, result, look=fair.look_of(None))
        results.append(result)
    return simulation_of(reproduction, results, other)


def search_settings(fair: FairReplay, confs: Sequence[str], what_if: WhatIf) -> Simulation:
    """Replay every setting in a what-if, and mark the best and the Pareto set.

    Raises:
        ConfigError: if a setting string is wrong.
        SimulationError: if a setting cannot be replayed.
    """
    results = fair.replay_all([replace(what_if, conf=conf) for conf in confs])
    recorded = fair.replay(what_if)
    fails_later = recorded.outlook is not None and recorded.outlook.fails
    is_fine = recorded.fits and recorded.retries == 0 and not fails_later
    return replace(
        simulation_of(fair.reproduction, results, fair.other),
        best=None if is_fine else best_of(gaining(results, recorded)),
        pareto=pareto_of(results),
        is_fine=is_fine,
    )


def _with_smallest(reproduction: Reproduction, found: Simulation, what_if: WhatIf) -> Simulation:
    """Return a search with the smallest capacity of each run of its Pareto set."""
    refined = {
        r.conf: with_smallest_capacity(reproduction, replace(what_if, conf=r.conf), r)
        for r in found.pareto
    }
    return replace(
        found,
        results=[refined.get(r.conf, r) for r in found.results],
        best=found.best and refined.get(found.best.conf, found.best),
        pareto=list(refined.values()),
    )


def continued_with(
    reproduction: Reproduction, further: Snapshot | None, steps: int | None = None
) -> OtherRun | None:
    """Return the recording that says how a run continues, or None if there is none.

    Raises:
        SimulationError: if it is of another program, or holds no whole step.
    """
    if further is None:
        return None
    trace, operations = reproduction.trace, reproduction.operations
    return OtherRun(trace, operations, trace_of(further), steps)


def simulation_of(
    reproduction: Reproduction, results: Sequence[ReplayResult], other: OtherRun | None = None
) -> Simulation:
    """Return a reproduction and its what-ifs with their fidelity, method and notes."""
    fidelity = report(reproduction)
    is_exact_enough = (fidelity.share or 0.0) >= REPLAY_SHARE and not is_foreign(reproduction.trace)
    capacity = default_capacity(reproduction)
    return Simulation(
        device=reproduction.trace.device,
        baseline=replace(
            reproduction.result,
            capacity_bytes=None if capacity is None else reproduction.result.capacity_bytes,
        ),
        fidelity=fidelity,
        results=tuple(results),
        method="replay" if is_exact_enough else "estimate",
        lower_bound_bytes=reproduction.trace.totals.peak_active_bytes,
        notes=(*_notes(reproduction), *([] if other is None else [other.note])),
    )


def trace_of(snapshot: Snapshot, device: int | None = None) -> Trace:
    """Return the trace of a device, for a replay.

    If the device is None, it is the one that ran out of memory, or the busiest.

    Raises:
        SimulationError: if the snapshot has no device of that number, or none at all.
    """
    chosen = choose_device(snapshot) if device is None else device
    if chosen not in snapshot.devices:
        raise SimulationError(
            f"The snapshot knows no device {chosen}.",
            hint=f"It has {', '.join(map(str, snapshot.devices)) or 'none'}.",
        )
    return Trace.of(snapshot, chosen)


def choose_device(snapshot: Snapshot) -> int:
    """Return the device whose trace ends in a failed request, else the one with the most events.

    Raises:
        SimulationError: if the snapshot has no device.
    """
    devices = snapshot.devices
    if not devices:
        raise SimulationError("The snapshot has no device memory and no trace.")

    def rank(device: int) -> tuple[int, int]:
        action = snapshot.events.action[snapshot.events.device_slice(device)]
        return int(np.count_nonzero(action == Action.OOM)), len(action)

    return max(devices, key=rank)


def _notes(reproduction: Reproduction) -> tuple[str, ...]:
    notes = []
    conditions, facts = reproduction.conditions, reproduction.operations.facts()
    low = None if reproduction.capacity_is_exact else conditions.capacity_bytes
    if low is not None and facts["n_flushed"] > 0:
        notes.append(
            f"The file does not say what PyTorch could have; a flush shows that it was at least "
            f"{format_mebibytes(low)} and less than "
            f"{format_mebibytes(facts['lowest_need_bytes'])}."
        )
    if conditions.allowed_bytes is not None:
        notes.append(
            f"Requests failed, or cached memory was collected, while the driver had memory left: "
            "a memory fraction was in force, of about "
            f"{format_mebibytes(conditions.allowed_bytes)}."
        )
    known = reproduction.trace.oom_capacity_bytes
    if len(distinct(known[known >= 0])) > 1:
        notes.append("The memory that PyTorch could have changed between failed requests.")
    if n_calls := facts["n_inferred_empty_cache"]:
        notes.append(
            f"{plural(n_calls, 'call')} of empty_cache() {'was' if n_calls == 1 else 'were'} "
            "inferred from segments that disappeared; what-ifs repeat them."
        )
    return tuple(notes)
