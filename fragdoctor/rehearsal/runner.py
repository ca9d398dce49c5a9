"""Runs a program in its own Python, prepared for a rehearsal, and returns the outcome.

That is the rehearsal itself, the diagnosis of its snapshot with the GPUs on which it would fit, or
the reports of one pytest test.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from msgspec import convert
from msgspec.structs import replace

from fragdoctor.diagnosis.pipeline import diagnose
from fragdoctor.errors import ConfigError
from fragdoctor.future.search import with_smallest_capacity
from fragdoctor.future.simulator import simulate, trace_of
from fragdoctor.future.whatif import WhatIf, replay_what_if
from fragdoctor.inputs.cases import read_case
from fragdoctor.inputs.messages import find_messages
from fragdoctor.model.case import Overrides
from fragdoctor.model.finding import Location
from fragdoctor.model.gpu_table import OUTSIDE
from fragdoctor.model.gpus import GPUS
from fragdoctor.model.hooks import report_progress
from fragdoctor.model.rehearsal import Rehearsal, RehearsalResult, Unmodelled
from fragdoctor.rehearsal.process import (
    OUTCOME,
    SNAPSHOT,
    OnStep,
    RehearsalConditions,
    Runs,
    rehearsed_gpu,
)
from fragdoctor.rehearsal.programs import Program
from fragdoctor.trace.reproduction import reproduce
from fragdoctor.units import MIB

# What builds without CUDA say about kernels for layouts other than strided.
_OF_OTHER_LAYOUTS: Final = re.compile(r"\b(Sparse|SparseCsr|NestedTensor)CUDA\b")
_OPERATION: Final = re.compile(r"Could not run '(?:\w+::)?(\w+)")
# What code for a GPU says if there is none.
_NEEDS_GPU: Final = re.compile(
    r"driver version is insufficient|no CUDA-capable device|Found no NVIDIA driver"
)


_REFUSED: Final = re.compile(r"Permission denied|\b[Ee]rrno = ?13\b|--allow-writes")
_MOST_MADE_UP: Final = 3


class ProgramFailed(ConfigError):  # noqa: N818 - reads as what it says
    """The program ended with an error that is not about the GPU's memory.

    Attributes:
        output: the last lines that it wrote to standard error; hostile text.
    """

    code = "program_failed"

    def __init__(self, message: str, *, hint: str = "", output: str = "") -> None:
        super().__init__(message, hint=hint)
        self.output = output


class CannotRehearse(ConfigError):  # noqa: N818 - reads as what it says
    """The process of the program cannot be prepared; another Python may work."""

    code = "cannot_rehearse"


def rehearse(
    program: Program,
    conditions: RehearsalConditions,
    snapshot: Path,
    on_step: OnStep | None = None,
    runs: Runs | None = None,
) -> Rehearsal:
    """Run a program to its end, or until enough has been seen, and return the outcome.

    ``snapshot`` is where to leave the memory snapshot; ``on_step`` is called after each step.

    Raises:
        ConfigError: the program cannot be rehearsed.
        ProgramFailed: it failed for a reason other than the GPU's memory.
    """
    with ExitStack() as closing:
        if runs is None:
            runs = closing.enter_context(Runs())
        refused: CannotRehearse | None = None
        for python in program.pythons:
            code, tail = runs.run(program, conditions, python, on_step)
            try:
                found = _outcome(runs.place, python, code, tail, conditions)
            except CannotRehearse as err:
                refused = refused or err
                continue
            shutil.move(runs.place / SNAPSHOT, snapshot)
            made = _rehearsal(found, conditions, str(snapshot), python)
            made = replace(made, notes=[*program.notes, *made.notes])
            if not found["fails_after_skipping"]:
                return made
            # A replay buffer, for example, has too little in it after skipped rounds.
            limit = min(_WHOLE_S, conditions.time_limit_s or _WHOLE_S)
            whole = replace(conditions, n_steps=_ALL_STEPS, time_limit_s=limit)
            place = snapshot.with_suffix(".whole")
            again = rehearse(program, whole, place, on_step, runs)
            if again.is_partial:
                place.unlink()
                return replace(made, stopped="")  # it ended by itself
            return replace(again, snapshot=str(place.replace(snapshot)))
    raise refused or CannotRehearse("There is no Python to run the program with.")


_WHOLE_S: Final = 60.0  # to rerun a program without skipping if it failed after skipped rounds
_ALL_STEPS: Final = 2**31


def _outcome(
    place: Path, python: str, code: int, tail: str, conditions: RehearsalConditions
) -> dict[str, Any]:
    """Return the outcome of a run, as the engine wrote it."""
    found = outcome_of(place)
    if found is None:
        raise _vanished(python, code, tail, conditions)
    if found["status"] == "failed":
        raise _failed(found, tail, conditions)
    if not found["used_cuda"]:
        raise ConfigError(
            "The program used no GPU: it created no CUDA tensor.",
            hint="Check its arguments; --full shows its output.",
        )
    return found


def outcome_of(place: Path) -> dict[str, Any] | None:
    """Return what the engine wrote into the scratch folder; None means nothing.

    Raises:
        CannotRehearse: the process could not be prepared.
    """
    outcome = place / OUTCOME
    if not outcome.is_file():
        return None
    found: dict[str, Any] = json.loads(outcome.read_text(encoding="utf-8"))
    if found["status"] == "unfit":
        raise CannotRehearse(found["message"], hint=found["hint"])
    return found


def _vanished(python: str, code: int, tail: str, conditions: RehearsalConditions) -> ConfigError:
    if code == os.EX_USAGE or "fragdoctor rehearses with Python" in tail:
        version = tail.splitlines()[-1] if tail else f"{python} is too old."
        return CannotRehearse(version, hint="Name the program's Python with --python.")
    if code == -signal.SIGKILL and conditions.time_limit_s is not None:
        return ProgramFailed(
            f"The time limit of {conditions.time_limit_s:g} s was over before the program used the "
            "GPU again.",
            hint="Give it more time: --time-limit, or --rehearse-time after a failed run.",
            output=tail,
        )
    ended = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
    return ProgramFailed(
        f"The program {ended} before the rehearsal was complete.",
        hint="Its last lines are above; --full shows all of its output.",
        output=tail,
    )


def _failed(found: Mapping[str, Any], tail: str, conditions: RehearsalConditions) -> ProgramFailed:
    failed = partial(ProgramFailed, output=tail)
    failure = found["failure"]
    if failure is None:
        return failed(
            f"The program ended with exit code {found['exit_code']}.",
            hint="Its last lines are above." if tail else "It printed nothing before it ended.",
        )
    if failure["advice"] is not None:
        return ProgramFailed(failure["text"], hint=failure["advice"])
    place = failure["location"]
    where = f" at {convert(place, Location)}" if place else ""
    text = failure["text"].strip().splitlines()
    needs_gpu = _NEEDS_GPU.search(failure["text"]) is not None
    if _OF_OTHER_LAYOUTS.search(failure["text"]) or (needs_gpu and failure["is_of_other_layout"]):
        named = _OPERATION.search(failure["text"])
        what = f"the operation {named[1]}" if named else "what the program does"
        return failed(
            "Gradients of sparse embeddings and products of a sparse and a dense matrix can be "
            f"rehearsed, but not {what} with a sparse or nested tensor{where}.",
            hint="Rehearse it with dense tensors: embeddings with sparse=False, or to_dense().",
        )
    if needs_gpu:
        return failed(
            f"The program calls GPU code that is not PyTorch's own{where}, and nothing tells what "
            "memory it takes.",
            hint="Rehearse the program without it (attn_implementation='sdpa', an optimizer of "
            "torch.optim), or register what it returns: torch.library.register_fake.",
        )
    if _REFUSED.search(failure["text"]) and not conditions.allows_writes:
        return failed(
            f"The program was not allowed to change a file{where}: {text[0]}",
            hint="What Python writes goes to a scratch folder, and what other code writes is "
            "blocked; --allow-writes lets the program change files.",
        )
    hint = _made_up(found) or (
        "The traceback is above. If the program works on a GPU, it does something here that a "
        "rehearsal cannot imitate."
    )
    if failure["type"] == "ModuleNotFoundError":
        hint = "Rehearse in the environment of the program: --python names its interpreter."
    return failed(
        f"The program failed{where}: {failure['type']}: {text[0] if text else ''}",
        hint=hint,
    )


def _made_up(found: Mapping[str, Any]) -> str:
    """Return which values were made up before a program failed, the last of them first."""
    made = found["assumptions"][::-1][:_MOST_MADE_UP]
    said = [
        f"{one['assumed']} ({one['operation']} at {convert(one['location'], Location).at})"
        for one in made
        if one["location"]
    ]
    if not said:
        return ""
    return f"Values on the GPU are made up, which may be why: {'; '.join(said)}."


def _rehearsal(
    found: Mapping[str, Any], conditions: RehearsalConditions, snapshot: str, python: str
) -> Rehearsal:
    """Return what the engine wrote, with what only this process knows."""
    fullest = max(found["devices"], key=lambda device: device["peak_reserved_bytes"])
    known = {
        "gpu": conditions.gpu.called,
        "is_known_gpu": bool(conditions.gpu.name),
        "capacity_bytes": conditions.gpu.capacity_bytes,
        "fits": found["out_of_memory"] is None,
        "peak_allocated_bytes": fullest["peak_allocated_bytes"],
        "peak_reserved_bytes": fullest["peak_reserved_bytes"],
        "unmodelled": [_unmodelled(conditions, found["handles"])],
        "snapshot": snapshot,
        "torch_version": conditions.torch_version or found["torch_version"],
        "python": python,
        "is_partial": bool(found["partial_reason"]),
    }
    return convert({**found, **known}, Rehearsal)


def _unmodelled(conditions: RehearsalConditions, used: Mapping[str, int]) -> Unmodelled:
    """Return what CUDA and the libraries that a program used take outside PyTorch.

    Only an H200 was measured: it sets the figure of its generation, for others it is a comparison,
    and the figure is what the answer leaves free for the context.
    """
    gpu = conditions.gpu
    handles = {"the context": 1, "kernels": 1, **used}
    if conditions.world_size > 1:
        handles["NCCL"] = 1
    parts = [name if n == 1 else f"{n} handles of {name}" for name, n in handles.items()]
    low, high = (sum(n * OUTSIDE[name][i] for name, n in handles.items()) for i in (0, 1))
    said = f"CUDA outside PyTorch: {', '.join(parts)}; {low} to {high} MiB on an H200"
    is_measured = gpu.kernels.architecture == "hopper"
    if is_measured and gpu.context_bytes == gpu.kernels.context_bytes:  # not known by size only
        return Unmodelled(said, (low + high) // 2 * MIB)
    more = OUTSIDE["NCCL"][0] * MIB if "NCCL" in handles else 0
    return Unmodelled(f"{said}, not measured on others", gpu.context_bytes + more)


def diagnosed(
    program: Program,
    conditions: RehearsalConditions,
    kept: Path | None = None,
    on_step: OnStep | None = None,
    batch: int | None = None,
) -> RehearsalResult:
    """Rehearse once and diagnose the snapshot, which is kept if a path is given.

    Raises:
        ConfigError: the program cannot be rehearsed.
        ProgramFailed: it failed for a reason other than the GPU's memory.
    """
    with TemporaryDirectory(prefix="fragdoctor-") as scratch:
        snapshot = kept or Path(scratch, SNAPSHOT)
        found = replace(rehearse(program, conditions, snapshot, on_step), batch=batch)
        result = judge(found, kept.name if kept else program.name)
    return result if kept else replace(result, rehearsal=replace(found, snapshot=""))


def judge(rehearsal: Rehearsal, name: str) -> RehearsalResult:
    """Return a rehearsal with its diagnosis, and the GPUs on which its steps fit by replay.

    ``name`` is its name in reports.

    Raises:
        InputError: its snapshot is damaged.
    """
    overrides = Overrides(
        capacity_bytes=rehearsal.capacity_bytes,
        torch_version=rehearsal.torch_version.partition("+")[0],
    )
    case = read_case([rehearsal.snapshot], overrides)
    case = replace(case, sources=(name,))
    if rehearsal.out_of_memory is not None:
        case = replace(case, oom=find_messages(rehearsal.out_of_memory.message))
    diagnosis = diagnose(case)
    if not rehearsal.fits or case.snapshot is None or not case.snapshot.devices:
        return RehearsalResult(diagnosis, rehearsal)
    report_progress("Looking for GPUs")
    if rehearsal.stopped or rehearsal.is_partial:
        replayed = simulate(case.snapshot, smallest_capacity=True).results[0]
    else:  # nothing follows the program's end
        reproduction, as_it_is = reproduce(trace_of(case.snapshot)), WhatIf()
        result = replay_what_if(reproduction, as_it_is)
        replayed = with_smallest_capacity(reproduction, as_it_is, result, is_steady=True)
    needed = replayed.smallest_capacity_bytes
    if needed is None:
        return RehearsalResult(diagnosis, rehearsal)
    fitting = [gpu for gpu in GPUS.values() if gpu.usable_bytes >= needed]
    by_size = sorted(fitting, key=lambda gpu: gpu.total_bytes)
    return RehearsalResult(diagnosis, rehearsal, needed, tuple(gpu.name for gpu in by_size))


def rehearse_test(
    args: Sequence[str], gpu: str | None, reports_variable: str
) -> tuple[list[dict[str, Any]], str]:
    """Run pytest in a prepared process.

    Args:
        args: pytest's arguments.
        gpu: the GPU that the test sees, with its size; None means kernels of an H100 and no limit.
        reports_variable: the environment variable that names the file for its reports.

    Returns:
        its reports as pytest serializes them, and why there are none, or "".

    Raises:
        ConfigError: there is no such GPU.
    """
    program = Program("pytest", is_module=True, args=args, pythons=[sys.executable])
    with Runs() as runs:
        reports = runs.place / "reports"
        conditions = RehearsalConditions(
            gpu=rehearsed_gpu(gpu, None, is_unlimited=gpu is None),
            stops_by_itself=False,
            variables={reports_variable: str(reports)},
        )
        code, tail = runs.run(program, conditions, sys.executable)
        found = reports.read_text(encoding="utf-8").splitlines() if reports.is_file() else []
        if found:
            return [json.loads(line) for line in found], ""
        try:
            outcome_of(runs.place)
        except CannotRehearse as err:
            return [], f"{err.message} {err.hint}"
        return [], tail or f"pytest ended with code {code}"
