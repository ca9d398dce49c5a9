"""A bundle of a running program: requested by a signal, or taken by the program's own Python.

A program under ``fragdoctor run`` has a recorder that answers a signal (``signals``); ``/proc``
tells whether it does, since the signal would end any other program. Otherwise, from Python 3.14 on,
``sys.remote_exec`` makes the program write a bundle itself.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from fragdoctor.capture.launcher import BOOTSTRAP
from fragdoctor.errors import ConfigError
from fragdoctor.recording.bundle_writer import MANIFEST
from fragdoctor.recording.record_options import Options, from_environment
from fragdoctor.recording.signals import NUMBER

_PROC: Final = Path("/proc")
_LOOK_EVERY_S: Final = 0.1
_MOST_NAMED: Final = 16
_HANGS: Final = "It may be busy outside of Python, or stopped. Wait longer with --wait."
_FROM_START: Final = "Start it with fragdoctor run -- COMMAND, to attach to it at any time."


@contextlib.contextmanager
def bundle_of(pid: int, wait_s: float) -> Iterator[Path]:
    """Yield a bundle of what a running program holds now.

    The bundle of a program under ``fragdoctor run`` is stored with its others and stays there; any
    other bundle is removed at the end of the block.

    Args:
        pid: the program, or the process that started it.
        wait_s: seconds to wait for the bundle.

    Raises:
        ConfigError: if there is no such program, it cannot be asked, or it does not answer.
    """
    if not (_PROC / "self").exists():
        raise ConfigError(
            "Attaching to a running program works on Linux only.",
            hint="In the program: with fragdoctor.record(): ...",
        )
    if not (_PROC / str(pid)).exists():
        raise ConfigError(f"No process {pid} runs here.", hint="Find it with: nvidia-smi")
    target, options = _recorded(pid)
    if options is not None:
        yield _asked(target, options, wait_s)
        return
    if any(_environment_of(process) is not None for process in _with_children(pid)):
        raise ConfigError(f"Process {pid} has not used a GPU yet.", hint="Attach to it later.")
    execute: Callable[[int, str], None] | None = getattr(sys, "remote_exec", None)
    if execute is None:
        here = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise ConfigError(
            f"Process {pid} was not started by fragdoctor run, and attaching to it "
            f"needs Python 3.14 for both it and fragdoctor; this is Python {here}.",
            hint=_FROM_START,
        )
    with tempfile.TemporaryDirectory(prefix="fragdoctor-") as name:
        place = Path(name)
        owner = (_PROC / str(pid)).stat()
        if owner.st_uid != os.geteuid():  # only the user of the process may use it
            with contextlib.suppress(PermissionError):  # then remote_exec is refused too
                os.chown(place, owner.st_uid, owner.st_gid)
        yield _executed(pid, place, execute, wait_s)


def bundles_below(pid: int, wait_s: float) -> Sequence[Path]:
    """Return a bundle of each process below one that records, asked for at the same time.

    Raises:
        ConfigError: if no process records, or one does not answer.
    """
    answering = _answering(pid)
    if not answering:
        raise ConfigError("The program has not used a GPU yet.", hint="Ask later.")
    with ThreadPoolExecutor(len(answering)) as pool:
        return [*pool.map(lambda p: _asked(p, answering[p], wait_s), answering)]


def _answering(pid: int) -> Mapping[int, Options]:
    """Return the processes below one that answer the signal, and how they record."""
    return {p: o for p in _with_children(pid) if (o := _options_of(p)) is not None}


def _recorded(pid: int) -> tuple[int, Options | None]:
    """Return the process that answers and how it records, or None if no process does.

    Raises:
        ConfigError: if several processes answer.
    """
    answering = _answering(pid)
    if pid in answering:
        return pid, answering[pid]
    if len(answering) > 1:
        named = ", ".join(str(p) for p in [*answering][:_MOST_NAMED])
        raise ConfigError(
            f"Process {pid} has several children on a GPU.", hint=f"Attach to one of them: {named}"
        )
    return next(iter(answering.items()), (pid, None))


def _with_children(pid: int) -> Sequence[int]:
    """Return a process and everything that it and its children started."""
    parents = {}
    for place in _PROC.iterdir():
        if place.name.isdigit():
            parents[int(place.name)] = int(_status(int(place.name)).get("PPid", "0"))
    found = [pid]
    for one in found:  # grows meanwhile
        found += sorted(child for child, parent in parents.items() if parent == one)
    return found


def _status(pid: int) -> Mapping[str, str]:
    """Return the contents of ``/proc/PID/status``, or nothing if the process has ended."""
    try:
        lines = (_PROC / str(pid) / "status").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _options_of(pid: int) -> Options | None:
    """Return how a process records, or None if it would not survive the signal."""
    caught = int(_status(pid).get("SigCgt", "0"), 16)
    is_armed = NUMBER is not None and bool(caught >> (NUMBER - 1) & 1)
    return _environment_of(pid) if is_armed else None


def _environment_of(pid: int) -> Options | None:
    """Return how ``fragdoctor run`` told a process to record, or None if it did not."""
    try:
        words = (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return None
    pairs = (os.fsdecode(word).partition("=") for word in words)
    return from_environment({name: value for name, _, value in pairs})


def _asked(pid: int, options: Options, wait_s: float) -> Path:
    place = Path(options.directory)
    before = set(_bundles(place, pid))
    try:
        os.kill(pid, NUMBER or 0)
    except OSError as e:
        raise ConfigError(f"Cannot ask process {pid}: {e.strerror}.", hint="") from e
    return _awaited(lambda: next((b for b in _bundles(place, pid) if b not in before), None),
                    pid, wait_s)  # fmt: skip


def _bundles(place: Path, pid: int) -> Sequence[Path]:
    """Return the bundles that a process has written on request, whatever its rank."""
    found = [b.parent for b in place.glob(f"*attach-pid{pid}*/{MANIFEST}")]
    return sorted(b for b in found if not b.name.startswith("."))  # a hidden one is being written


def _awaited(found: Callable[[], Path | None], pid: int, wait_s: float) -> Path:
    """Return the first bundle that ``found`` finds.

    Raises:
        ConfigError: if it does not appear in this time, or the process ends.
    """
    end = time.monotonic() + wait_s
    while (bundle := found()) is None:
        if not (_PROC / str(pid)).exists():
            raise ConfigError(f"Process {pid} ended before it answered.", hint=_FROM_START)
        if time.monotonic() > end:
            raise ConfigError(f"Process {pid} did not answer in {wait_s:g} s.", hint=_HANGS)
        time.sleep(_LOOK_EVERY_S)
    return bundle


def _executed(pid: int, place: Path, execute: Callable[[int, str], None], wait_s: float) -> Path:
    problem = place / "problem.txt"
    script = place / "script.py"
    taker = str(BOOTSTRAP / "on_demand.py")
    # One expression: the program runs it in its main module, where no name must be left behind.
    script.write_text(
        f'__import__("runpy").run_path({taker!r})["take"]({str(place)!r}, {str(problem)!r})\n',
        encoding="utf-8",
    )
    script.chmod(0o644)
    try:
        execute(pid, str(script))
    except (OSError, RuntimeError, ValueError) as e:
        reason = str(getattr(e, "strerror", "") or e).rstrip(".")
        raise ConfigError(f"Cannot attach to process {pid}: {reason}.", hint=_FROM_START) from e

    def found() -> Path | None:
        if problem.exists():
            said = problem.read_text("utf-8", errors="replace")
            raise ConfigError(f"Process {pid} has no snapshot: {said}.", hint="Attach to it later.")
        return next(iter(_bundles(place, pid)), None)

    return _awaited(found, pid, wait_s)
