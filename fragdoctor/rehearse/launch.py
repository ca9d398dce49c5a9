"""Runs the program in its own Python, prepared for a rehearsal, and reads what came of it."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import IO, Any, Final

from fragdoctor.errors import ConfigError
from fragdoctor.model.finding import Location
from fragdoctor.model.rehearsal import Assumed, Rehearsal, RehearsedDevice, RehearsedOom, Unmodelled
from fragdoctor.record import record
from fragdoctor.rehearse.machines import RehearsedGpu
from fragdoctor.rehearse.programs import Program

START: Final = Path(__file__).parent / "start.py"
MOST_STEPS: Final = 200
"""Steps after which a rehearsal ends whose memory does not repeat."""
TEMPORARY: Final = "tmp"
_OUTCOME: Final = "outcome.json"
TAIL_LINES: Final = 40
_TAIL_BYTES: Final = 64 * 1024


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
    """The process of the program cannot be prepared; another Python may do."""

    code = "cannot_rehearse"


@record
class Conditions:
    """How a program is rehearsed.

    Attributes:
        gpu: the GPU that it sees.
        n_devices: how many of them.
        rank: the rank of a distributed run that is rehearsed; None = as the environment says.
        world_size: ranks of that run.
        conf: settings of the allocator; None = as the environment says.
        torch_version: whose allocator it is; "" = of the PyTorch that the program has.
        n_steps: steps after which to stop; None = when their memory repeats.
        assumed_shares: how much operations keep whose results depend on values, by kind.
        allows_writes: whether files outside of the scratch folder may be changed.
        shows_output: whether what the program prints is passed on to standard error.
        stops_by_itself: whether the program is ended when its steps repeat in memory.
        variables: further variables of its environment.
    """

    gpu: RehearsedGpu
    n_devices: int = 1
    rank: int | None = None
    world_size: int = 1
    conf: str | None = None
    torch_version: str = ""
    n_steps: int | None = None
    assumed_shares: Mapping[str, float] = field(default_factory=dict)
    allows_writes: bool = False
    shows_output: bool = False
    stops_by_itself: bool = True
    variables: Mapping[str, str] = field(default_factory=dict)


OnStep = Callable[[int, int], None]
"""Called with the number of steps completed and the bytes allocated on the first GPU."""


def rehearse(
    program: Program,
    conditions: Conditions,
    snapshot: Path,
    on_step: OnStep | None = None,
) -> Rehearsal:
    """Run a program to its end, or until it is enough, and return what came of it.

    Args:
        program: what to run.
        conditions: under which conditions.
        snapshot: where to leave the memory snapshot.
        on_step: told after each step.

    Raises:
        ConfigError: the program cannot be rehearsed.
        ProgramFailed: it failed for another reason than the GPU's memory.
    """
    with tempfile.TemporaryDirectory(prefix="fragdoctor-", ignore_cleanup_errors=True) as scratch:
        place = Path(scratch)
        refused: CannotRehearse | None = None
        for python in program.pythons:
            try:
                found = _attempt(program, conditions, python, place, on_step)
            except CannotRehearse as err:
                refused = refused or err
                continue
            shutil.move(place / "snapshot.pickle", snapshot)
            made = _rehearsal(found, conditions, str(snapshot), python)
            return replace(made, notes=[*program.notes, *made.notes])
    raise refused or CannotRehearse("There is no Python to run the program with.")


def _attempt(
    program: Program, conditions: Conditions, python: str, place: Path, on_step: OnStep | None
) -> dict[str, Any]:
    """Return the outcome of a run with one interpreter, as the engine wrote it."""
    code, tail = run_prepared(program, conditions, python, place, on_step)
    found = outcome_of(place)
    if found is None:
        raise _vanished(python, code, tail)
    if found["status"] == "failed":
        raise _failed(found, tail)
    if not found["used_cuda"]:
        raise ConfigError(
            "The program used no GPU: it asked for no CUDA tensor.",
            hint="Check its arguments; what it prints is shown with --full.",
        )
    return found


def outcome_of(place: Path) -> dict[str, Any] | None:
    """Return what the engine wrote into the scratch folder; None = nothing.

    Raises:
        CannotRehearse: the process could not be prepared.
    """
    outcome = place / _OUTCOME
    if not outcome.is_file():
        return None
    found: dict[str, Any] = json.loads(outcome.read_text(encoding="utf-8"))
    if found["status"] == "unfit":
        raise CannotRehearse(found["message"], hint=found["hint"])
    return found


def run_prepared(
    program: Program,
    conditions: Conditions,
    python: str,
    place: Path,
    on_step: OnStep | None = None,
) -> tuple[int, str]:
    """Run a program in a prepared process; return its exit code and its last lines.

    Args:
        program: what to run.
        conditions: under which conditions.
        python: the interpreter.
        place: the scratch folder, where the engine leaves its outcome.
        on_step: told after each step.
    """
    (place / TEMPORARY).mkdir(exist_ok=True)
    gpu = conditions.gpu
    request = {
        "target": program.target,
        "kind": program.kind,
        "cells": program.cells(),
        "args": list(program.args),
        "gpu": {
            "name": gpu.title,
            "total_bytes": gpu.total_bytes,
            "capability": gpu.capability,
            "n_multiprocessors": gpu.n_multiprocessors,
        },
        "capacity_bytes": gpu.capacity_bytes,
        "torch_version": conditions.torch_version,
        "assumed_shares": dict(conditions.assumed_shares),
        "n_devices": conditions.n_devices,
        "steps": conditions.n_steps,
        "most_steps": None if conditions.n_steps is not None else MOST_STEPS,
        "stops_by_itself": conditions.stops_by_itself,
        "scratch": None if conditions.allows_writes else str(place),
        "native": str(native_library()),
        "outcome": str(place / _OUTCOME),
        "snapshot": str(place / "snapshot.pickle"),
    }
    with _pipe() as (readable, writable), (place / "output").open("w+b") as output:
        request["progress_fd"] = writable
        (place / "request.json").write_text(json.dumps(request), encoding="utf-8")
        code = _run(
            [python, str(START), str(place / "request.json")],
            _environment(conditions, place) | dict(conditions.variables),
            None if conditions.shows_output else output,
            (readable, writable),
            on_step,
        )
        return code, _tail(output)


def native_library() -> Path:
    """Return the library of the fake GPUs, beside the core."""
    from fragdoctor import _native

    for folder in _native.__path__:
        found = Path(folder) / "_fake_gpu.so"
        if found.is_file():
            return found
    spec = importlib.util.find_spec("fragdoctor._native._ext")
    return Path(spec.origin if spec and spec.origin else ".").with_name("_fake_gpu.so")


def _environment(conditions: Conditions, place: Path) -> dict[str, str]:
    """Return the environment of the program: its own, and what keeps it here."""
    environ = dict(os.environ)
    environ.setdefault("PYTHONUNBUFFERED", "1")
    environ.setdefault("PYTHONDONTWRITEBYTECODE", "1")
    if conditions.conf is not None:
        environ.pop("PYTORCH_ALLOC_CONF", None)
        environ["PYTORCH_CUDA_ALLOC_CONF"] = conditions.conf
    if conditions.rank is not None:
        local, n_local = conditions.rank % conditions.n_devices, conditions.n_devices
        told = {
            "RANK": conditions.rank,
            "WORLD_SIZE": conditions.world_size,
            "LOCAL_RANK": local,
            "LOCAL_WORLD_SIZE": n_local,
            "GROUP_RANK": conditions.rank // n_local,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": 29500,
        }
        environ |= {name: str(value) for name, value in told.items()}
    if not conditions.allows_writes:
        environ["TMPDIR"] = str(place / TEMPORARY)
        environ.setdefault("WANDB_MODE", "disabled")
    return environ


@contextlib.contextmanager
def _pipe() -> Iterator[tuple[int, int]]:
    readable, writable = os.pipe()
    try:
        yield readable, writable
    finally:
        for end in (readable, writable):
            with contextlib.suppress(OSError):
                os.close(end)


def _run(
    command: Sequence[str],
    environ: Mapping[str, str],
    output: IO[bytes] | None,
    pipe: tuple[int, int],
    on_step: OnStep | None,
) -> int:
    """Run the program; return its exit code, negative for a signal."""
    readable, writable = pipe
    stream: Any = sys.stderr if output is None else output
    with subprocess.Popen(  # noqa: S603 - the user's own program
        command,
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=stream,
        stderr=stream,
        pass_fds=(writable,),
    ) as child:
        os.close(writable)
        try:
            with os.fdopen(os.dup(readable), encoding="utf-8", errors="replace") as events:
                for line in events:
                    if on_step is not None:
                        _tell(line, on_step)
            return child.wait()
        except BaseException:
            child.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(timeout=3)
            child.kill()
            raise


def _tell(line: str, on_step: OnStep) -> None:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        event = json.loads(line)
        if event["event"] == "step":
            on_step(int(event["step"]), int(event["allocated_bytes"]))


def _tail(output: IO[bytes]) -> str:
    size = output.seek(0, os.SEEK_END)
    output.seek(max(0, size - _TAIL_BYTES))
    lines = output.read().decode("utf-8", "replace").splitlines()
    return "\n".join(lines[-TAIL_LINES:])


def _vanished(python: str, code: int, tail: str) -> ConfigError:
    if code == os.EX_USAGE or "fragdoctor rehearses with Python" in tail:
        version = tail.splitlines()[-1] if tail else f"{python} is too old."
        return CannotRehearse(version, hint="Name the program's Python with --python.")
    ended = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
    return ProgramFailed(
        f"The program {ended} before the rehearsal was complete.",
        hint="Its last lines are above; --full shows all that it prints.",
        output=tail,
    )


def _failed(found: Mapping[str, Any], tail: str) -> ProgramFailed:
    failure = found["failure"]
    if failure is None:
        return ProgramFailed(
            f"The program ended with exit code {found['exit_code']}.",
            hint="What it printed last is above.",
            output=tail,
        )
    place = failure["location"]
    where = f" at {_location(place)}" if place else ""
    text = failure["text"].strip().splitlines()
    if failure["type"] == "NotImplementedError" and "SparseCUDA" in failure["text"]:
        return ProgramFailed(
            "Gradients of sparse embeddings can be rehearsed, but not what the program does with a "
            f"sparse tensor{where}.",
            hint="Rehearse it with dense tensors: embeddings with sparse=False, else to_dense().",
            output=tail,
        )
    return ProgramFailed(
        f"The program failed{where}: {failure['type']}: {text[0] if text else ''}",
        hint="If it runs on a GPU, it cannot be rehearsed; its traceback is above.",
        output=tail,
    )


def _rehearsal(
    found: Mapping[str, Any], conditions: Conditions, snapshot: str, python: str
) -> Rehearsal:
    devices = [RehearsedDevice(**device) for device in found["devices"]]
    fullest = max(devices, key=lambda d: d.peak_reserved_bytes)
    oom = found["out_of_memory"]
    return Rehearsal(
        gpu=conditions.gpu.name or conditions.gpu.title,
        is_known_gpu=bool(conditions.gpu.name),
        capacity_bytes=conditions.gpu.capacity_bytes,
        conf=found["conf"],
        fits=oom is None,
        steps=found["steps"],
        stopped=found["stopped"],
        peak_allocated_bytes=fullest.peak_allocated_bytes,
        peak_reserved_bytes=fullest.peak_reserved_bytes,
        out_of_memory=None if oom is None else _oom(oom),
        n_ooms=found["n_ooms"],
        devices=devices,
        assumptions=[
            Assumed(
                a["location"] and _location(a["location"]), a["operation"], a["assumed"], a["count"]
            )
            for a in found["assumptions"]
        ],
        unmodelled=_unmodelled(conditions.gpu),
        notes=found["notes"],
        snapshot=snapshot,
        torch_version=conditions.torch_version or found["torch"],
        python=python,
    )


def _oom(found: Mapping[str, Any]) -> RehearsedOom:
    place = found["location"]
    return RehearsedOom(
        device=found["device"],
        step=found["step"],
        event=found["event"],
        requested_bytes=found["requested_bytes"],
        location=None if place is None else _location(place),
        stack=[_location(frame) for frame in found["stack"]],
        message=found["message"],
    )


def _location(place: Mapping[str, Any]) -> Location:
    return Location(place["filename"], place["line"] or 0, place.get("name", ""))


def _unmodelled(gpu: RehearsedGpu) -> list[Unmodelled]:
    return [
        Unmodelled("CUDA's context and libraries, estimated", gpu.context_bytes),
        Unmodelled("workspaces that cuDNN and cuBLASLt choose while they run"),
        Unmodelled("buffers of NCCL"),
    ]
