"""What a rehearsal means: the diagnosis of its snapshot, and the GPUs on which it would fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fragdoctor.diagnosis.pipeline import diagnose
from fragdoctor.estimation.gpus import known_gpus
from fragdoctor.inputs.cases import read_case
from fragdoctor.inputs.messages import find_messages
from fragdoctor.model.case import Overrides
from fragdoctor.model.hooks import report_progress
from fragdoctor.model.rehearsal import Rehearsal, RehearsalResult
from fragdoctor.trace.simulate import simulate


def judge(rehearsal: Rehearsal) -> RehearsalResult:
    """Return a rehearsal with its diagnosis, and the GPUs on which its steps fit by replay.

    Raises:
        InputError: its snapshot is damaged.
    """
    overrides = Overrides(
        capacity_bytes=rehearsal.capacity_bytes,
        torch_version=rehearsal.torch_version.partition("+")[0],
    )
    case = read_case([rehearsal.snapshot], overrides)
    case = replace(case, sources=(Path(rehearsal.snapshot).name,))
    if rehearsal.out_of_memory is not None:
        case = replace(case, oom=find_messages(rehearsal.out_of_memory.message))
    diagnosis = diagnose(case)
    if not rehearsal.fits or case.snapshot is None or not case.snapshot.devices:
        return RehearsalResult(diagnosis, rehearsal)
    report_progress("Looking for GPUs")
    replayed = simulate(case.snapshot, smallest_capacity=True)
    needed = replayed.results[0].smallest_capacity_bytes
    if needed is None:
        return RehearsalResult(diagnosis, rehearsal)
    fitting = [gpu for gpu in known_gpus() if gpu.usable_bytes >= needed]
    by_size = sorted(fitting, key=lambda gpu: gpu.total_bytes)
    return RehearsalResult(diagnosis, rehearsal, needed, tuple(gpu.name for gpu in by_size))
