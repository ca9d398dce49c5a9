"""The GPU that a program sees, and the processes it runs in: new ones, or forks of one."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final, Self

from msgspec import Struct, field, to_builtins

from fragdoctor.errors import ConfigError
from fragdoctor.model.gpus import DEFAULT, GpuModel, gpu_of, kernels_of
from fragdoctor.rehearsal.programs import Program


class RehearsedGpu(Struct, frozen=True):
    """The GPU that the program sees.

    Attributes:
        name: as the user asked for it.
        kernels: the GPU whose kernels it runs, and which it says it is.
        total_bytes: memory of the device.
        capacity_bytes: what PyTorch can have of it; None means no limit.
        context_bytes: what CUDA itself takes in a process, estimated.
    """

    name: str
    kernels: GpuModel
    total_bytes: int
    capacity_bytes: int | None
    context_bytes: int

    @property
    def called(self) -> str:
        """The name for reports."""
        return self.name or self.kernels.title


def rehearsed_gpu(
    name: str | None, capacity_bytes: int | None, *, is_unlimited: bool
) -> RehearsedGpu:
    """Return the GPU that was asked for.

    Args:
        name: name of a known GPU, or a size; None means kernels as on an H100.
        capacity_bytes: what PyTorch can have; None means the GPU's memory without CUDA's context.
        is_unlimited: whether requests never fail, which is also so if no size is known.

    Raises:
        ConfigError: there is no such GPU, or it is not one of NVIDIA's.
    """
    model = gpu_of(name) if name is not None else DEFAULT
    if model.compute and model.capability is None:
        raise ConfigError(
            f"Programs can only be rehearsed on NVIDIA GPUs, and {model.title} is not one.",
            hint="Choose another with --gpu; fragdoctor estimate --list-gpus names them.",
        )
    total_bytes = model.total_bytes
    if name is None and capacity_bytes is not None:
        total_bytes = capacity_bytes
    if capacity_bytes is None and name is not None:
        capacity_bytes = model.usable_bytes
    return RehearsedGpu(
        name=model.name if name is not None else "",
        kernels=kernels_of(model),
        total_bytes=max(total_bytes, capacity_bytes or 0),
        capacity_bytes=None if is_unlimited else capacity_bytes,
        context_bytes=model.context_bytes,
    )


START: Final = Path(__file__).parent / "start.py"
MOST_STEPS: Final = 200
"""Steps after which a rehearsal ends if its memory does not repeat."""
OUTCOME: Final = "outcome.json"
SNAPSHOT: Final = "snapshot.pickle"
TAIL_LINES: Final = 40
_TEMPORARY: Final = "tmp"
_OUTPUT: Final = "output"
_TAIL_BYTES: Final = 64 * 1024
_PATIENCE_S: Final = 3
_GRACE_S: Final = 10  # time after a limit to write the outcome and the snapshot
_ENDING: Final = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)
)
_OF_SIGNAL: Final = 128
# Linear algebra libraries, and Arrow's allocator (with pandas), start threads when they are loaded;
# a fork must have none.
_WITHOUT_THREADS: Final = {
    "OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"
}  # fmt: skip


class RehearsalConditions(Struct, frozen=True):
    """How a program is rehearsed.

    Attributes:
        gpu: the GPU that it sees.
        n_devices: how many of them.
        rank: the rank of a distributed run that is rehearsed; None means as the environment says.
        world_size: number of ranks of that run.
        conf: settings of the allocator; None means as the environment says.
        torch_version: the version whose allocator is modeled; "" means that of the program's
            PyTorch.
        n_steps: steps after which to stop; None means when their memory repeats.
        least_steps: steps before which it is not stopped because their memory repeats.
        known_steps: steps after which it is stopped as soon as their memory repeats, since those
            that follow are known to repeat too; None means not known.
        fitting_bytes: once more than this was allocated, it is stopped as soon as its steps repeat,
            since it does not fit; None means never.
        assumed_shares: the share kept by operations whose results depend on values, by kind.
        allows_writes: whether files outside the scratch folder may be changed.
        shows_output: whether the program's output is passed on to standard error.
        stops_by_itself: whether rounds of its loops are skipped, and the program is ended, when
            they repeat in memory.
        time_limit_s: wall time after which it is ended; None means never.
        variables: additional environment variables.
        treatments: changes to make from outside, as ``engine/treatments`` names them.
        observes: whether to note what the program uses that treatments might change.
    """

    gpu: RehearsedGpu
    n_devices: int = 1
    rank: int | None = None
    world_size: int = 1
    conf: str | None = None
    torch_version: str = ""
    n_steps: int | None = None
    least_steps: int = 0
    known_steps: int | None = None
    fitting_bytes: int | None = None
    assumed_shares: Mapping[str, float] = field(default_factory=dict)
    allows_writes: bool = False
    shows_output: bool = False
    stops_by_itself: bool = True
    time_limit_s: float | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    treatments: Sequence[str] = ()
    observes: bool = False


OnStep = Callable[[int, int], None]
"""Called with the number of steps completed and the bytes allocated on the first GPU."""


class Runs:
    """Runs of one program, one after another, in a scratch folder that is empty before each.

    Attributes:
        place: the folder, where the engine leaves its outcome and the snapshot.
        blocker: why each run has to import its libraries anew, or "" if forks have them.
    """

    def __init__(self, *, forks: bool = False) -> None:
        if sys.platform.startswith("win"):  # no process groups, and no pipes to pass on
            raise ConfigError(
                "A program can be rehearsed on Linux and macOS only.",
                hint="On Windows, run fragdoctor in WSL.",
            )
        is_possible = sys.platform.startswith("linux")
        self.blocker = "" if is_possible else "forks are safe only on Linux"
        self._forks = forks and is_possible
        self._imports = True
        self._servers: dict[str, _Process] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="fragdoctor-", ignore_cleanup_errors=True)
        self.place = Path(self._folder.name)

        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        """Turn signals that end this process into an orderly exit, with all that was started."""
        if threading.current_thread() is threading.main_thread():
            self._before = {s: signal.signal(s, _leave) for s in _ENDING}
        return self

    def __exit__(self, *_: object) -> None:
        self._end_servers()
        self._folder.cleanup()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def run(
        self,
        program: Program,
        conditions: RehearsalConditions,
        python: str,
        on_step: OnStep | None = None,
    ) -> tuple[int, str]:
        """Run a program in a prepared process; return its exit code and its last lines."""
        for left in self.place.iterdir():
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink()
        (self.place / _TEMPORARY).mkdir()
        (self.place / _OUTPUT).touch()
        request = {
            **to_builtins(conditions),
            "target": program.target,
            "kind": program.kind,
            "cells": program.cells(),
            "args": list(program.args),
            "most_steps": None if conditions.n_steps is not None else MOST_STEPS,
            "scratch": None if conditions.allows_writes else str(self.place),
            "native": str(native_library()),
            "outcome": str(self.place / OUTCOME),
            "snapshot": str(self.place / SNAPSHOT),
        }
        request["environ"] = _environment(conditions, self.place) | dict(conditions.variables)
        request["folder"] = str(Path.cwd())
        request["output"] = None if conditions.shows_output else str(self.place / _OUTPUT)
        code = self._forked(request, python, on_step) if self._forks else None
        if code is None:
            with _Process(python, request, self.place) as process:
                process.limit(conditions.time_limit_s)
                code = process.wait(on_step)
        return code, _tail(self.place / _OUTPUT)

    def _forked(
        self, request: Mapping[str, Any], python: str, on_step: OnStep | None
    ) -> int | None:
        """Return the exit code of a run in a fork; None if no fork is possible."""
        server = self._servers.get(python)
        if server is None:
            start = {**request, "warms": self._imports}
            server = self._servers[python] = _Process(python, start, self.place, serves=True)
        server.limit(request["time_limit_s"])
        code, blocker = server.fork(request, on_step)
        server.limit(None)
        if blocker:
            self._end_servers()
            self.blocker = blocker
            self._forks = self._imports  # PyTorch alone is always safe
            self._imports = False
        elif code is None:
            del self._servers[python]
            with server:
                code = server.wait(None)
        return code

    def _end_servers(self) -> None:
        while self._servers:
            _, server = self._servers.popitem()
            server.end()


def _leave(number: int, _frame: object) -> None:
    """Exit with the code of a program that a signal has ended, cleaning up on the way."""
    raise SystemExit(_OF_SIGNAL + number)


class _Process:
    """A prepared process: it runs the program of its request, or serves requests in forks.

    It leads a process group of its own, so that what the program starts can be ended with it.
    """

    def __init__(
        self, python: str, request: Mapping[str, Any], place: Path, *, serves: bool = False
    ) -> None:
        readable, writable = os.pipe()
        passed = [writable]
        given = {**request, "progress_fd": writable}
        self._requests: IO[str] | None = None
        if serves:
            requests_fd, to_requests = os.pipe()
            passed.append(requests_fd)
            given["requests_fd"] = requests_fd
            self._requests = os.fdopen(to_requests, "w", encoding="utf-8")
        path = place / ("server.json" if serves else "request.json")
        path.write_text(json.dumps(given), encoding="utf-8")
        output = request["output"]
        stream: Any = sys.stderr if output is None else open(output, "ab")  # noqa: SIM115, PTH123
        try:
            self._child = subprocess.Popen(  # noqa: S603 - the user's own program
                [python, str(START), str(path)],
                env={**request["environ"], **(_WITHOUT_THREADS if serves else {})},
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                pass_fds=passed,
                process_group=0,
            )
        finally:
            for fd in passed:
                os.close(fd)
            if output is not None:
                stream.close()
        self._timer: threading.Timer | None = None
        self._events = os.fdopen(readable, encoding="utf-8", errors="replace")
        self._place = place

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def limit(self, seconds: float | None) -> None:
        """Kill the process a while after a time limit, at which the engine ends by itself."""
        if self._timer is not None:
            self._timer.cancel()
        if seconds is not None:
            self._timer = threading.Timer(seconds + _GRACE_S, self._kill)
            self._timer.daemon = True
            self._timer.start()

    def _kill(self) -> None:
        """Kill everything in the group at once."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._child.pid, signal.SIGKILL)

    def wait(self, on_step: OnStep | None) -> int:
        """Follow the process to its end; return its exit code, negative for a signal."""
        self._follow(on_step)
        return self._child.wait()

    def fork(self, request: Mapping[str, Any], on_step: OnStep | None) -> tuple[int | None, str]:
        """Run a request in a fork; return its exit code, and why there can be no further fork.

        The code is None if there was no fork: the process has ended, or no fork is safe.
        """
        path = self._place / "request.json"
        path.write_text(json.dumps(request), encoding="utf-8")
        if self._requests is not None:
            with contextlib.suppress(BrokenPipeError):
                self._requests.write(f"{path}\n")
                self._requests.flush()
        ended = self._follow(on_step)
        return (None, "") if ended is None else (ended["code"], ended["blocker"])

    def _follow(self, on_step: OnStep | None) -> dict[str, Any] | None:
        """Pass on reported events until a fork ends; None means the process itself has ended."""
        try:
            for line in self._events:
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    event: dict[str, Any] = json.loads(line)
                    if event["event"] == "ended":
                        return event
                    if event["event"] == "step" and on_step is not None:
                        on_step(int(event["step"]), int(event["allocated_bytes"]))
        except BaseException:
            self.end()
            raise
        return None

    def end(self) -> None:
        """End the process if it is still running, and close its pipes."""
        if self._child.poll() is None:
            self._child.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(timeout=_PATIENCE_S)
        self._kill()
        self._child.wait()
        if self._timer is not None:
            self._timer.cancel()
        self._events.close()
        if self._requests is not None:
            with contextlib.suppress(BrokenPipeError):
                self._requests.close()


def native_library() -> Path:
    """Return the library of the fake GPUs, which is next to the core."""
    from fragdoctor._native import _ext

    return Path(_ext.__file__).with_name("_fake_gpu.so")


def _environment(conditions: RehearsalConditions, place: Path) -> dict[str, str]:
    """Return the program's environment: its own, plus what keeps it here."""
    environ = dict(os.environ)
    environ.setdefault("PYTHONUNBUFFERED", "1")
    environ.setdefault("PYTHONDONTWRITEBYTECODE", "1")
    if conditions.conf is not None:
        environ.pop("PYTORCH_ALLOC_CONF", None)
        environ["PYTORCH_CUDA_ALLOC_CONF"] = conditions.conf
    if conditions.rank is not None:
        local, n_local = conditions.rank % conditions.n_devices, conditions.n_devices
        environ |= {
            "RANK": str(conditions.rank),
            "WORLD_SIZE": str(conditions.world_size),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(n_local),
            "GROUP_RANK": str(conditions.rank // n_local),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29500",
        }
    if not conditions.allows_writes:
        # Compilers, which know nothing of redirected files, build extensions there.
        environ["TMPDIR"] = environ["TORCH_EXTENSIONS_DIR"] = str(place / _TEMPORARY)
        environ.setdefault("WANDB_MODE", "disabled")
    return environ


def _tail(output: Path) -> str:
    with output.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL_BYTES))
        lines = file.read().decode("utf-8", "replace").splitlines()
    return "\n".join(lines[-TAIL_LINES:])
