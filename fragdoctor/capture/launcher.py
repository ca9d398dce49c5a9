"""Running a program under the recorder: its environment, its signals, its exit code."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Final, NamedTuple

from msgspec import Struct

from fragdoctor.errors import ConfigError
from fragdoctor.recording import record_options
from fragdoctor.recording.record_options import VARIABLE, Options

BOOTSTRAP: Final = Path(record_options.__file__).parent / "bootstrap"
_PASSED_ON: Final = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
_NO_PYTHON: Final = (
    "no Python 3.9 or newer started that reads PYTHONPATH (python -I, -E and -S do not, containers "
    "and remote shells have their own)"
)
_FROM_TERMINAL: Final = ("SIGINT", "SIGQUIT")
_TO_THE_PROGRAM: Final = ("SIGUSR1", "SIGUSR2")


class Ended(NamedTuple):
    """How a program ended.

    Attributes:
        code: its exit code; 128 + n for a signal, as in a shell.
        was_asked_to: whether it was asked to end: by Ctrl-C, or a signal that stops programs.
    """

    code: int
    was_asked_to: bool


def command_of(words: Sequence[str], *, is_module: bool = False) -> list[str]:
    """Return the command to start: a script or module gets the Python that runs fragdoctor.

    Raises:
        ConfigError: if there is no such script or program.
    """
    if is_module:
        return [sys.executable, "-m", *words]
    first = words[0]
    if first.endswith((".py", ".pyw")):
        if not Path(first).is_file():
            raise ConfigError(f"{first} does not exist.", hint="Check the path of the script.")
        return [sys.executable, *words]
    if shutil.which(first) is None:
        raise ConfigError(
            f"{first} is not a program that can be started.",
            hint="Check the spelling, or write: fragdoctor run -- python train.py",
        )
    return list(words)


def environment_of(options: Options, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment in which every Python of the program arms the recorder."""
    path = environ.get("PYTHONPATH", "")
    home = str(BOOTSTRAP)
    return {
        **environ,
        "PYTHONPATH": f"{home}{os.pathsep}{path}" if path else home,
        VARIABLE: options.to_environment(),
    }


def launch(command: Sequence[str], environ: Mapping[str, str]) -> Ended:
    """Run a program on our own standard streams and return how it ended.

    Signals that reach us are passed on to it. Those from a terminal (Ctrl-C) reach it anyway.

    Raises:
        ConfigError: if it cannot be started.
    """
    try:
        child = subprocess.Popen(list(command), env=dict(environ))  # noqa: S603 - the user's own command
    except OSError as e:
        raise ConfigError(
            f"{command[0]} cannot be started: {e.strerror or e}.", hint="Check the command."
        ) from e
    with _signals_to(child) as seen:
        code = child.wait()
    return Ended(code if code >= 0 else 128 - code, any(n not in _TO_THE_PROGRAM for n in seen))


@contextlib.contextmanager
def _signals_to(child: subprocess.Popen[bytes]) -> Iterator[list[str]]:
    """Pass signals on while the program runs; ignored ones (as under nohup) stay ignored.

    Yields the names of the signals that came.
    """
    seen: list[str] = []

    def pass_on(number: int, _frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        seen.append(name)
        if name not in _FROM_TERMINAL or not _is_in_foreground():
            with contextlib.suppress(OSError):
                child.send_signal(number)

    before = {}
    for name in _PASSED_ON:
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, pass_on)
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_in_foreground() -> bool:
    """Return whether Ctrl-C on a terminal reaches us, and so the program in our group too."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


class Reached(Struct, frozen=True):
    """How far the processes of a program came, according to their own notes.

    Attributes:
        n_started: Python interpreters that armed the recorder.
        torch: version and CUDA version (``-`` means none) of the PyTorch that was imported; "" if
            none was.
        n_recording: processes that used CUDA; n_unused: those of them that reserved no memory.
        problems: what went wrong in them.
        n_inner: how often the program called ``fragdoctor run``; each call records on its own.
        without_torch: a Python that should have imported PyTorch but lacks it; "" means none.
    """

    n_started: int = 0
    torch: str = ""
    n_recording: int = 0
    n_unused: int = 0
    problems: tuple[str, ...] = ()
    n_inner: int = 0
    without_torch: str = ""

    def why_nothing(self, ended: Ended) -> str:
        """Return why a program that ended like this was not recorded; may hold hostile text."""
        version, cuda = (*self.torch.split(" "), "-")[:2]
        is_cut_short = self.n_recording > self.n_unused
        reasons = (
            (bool(self.problems), "".join(self.problems[:1]).rstrip(".")),
            (is_cut_short, f"the program {_end_of(ended.code)} before it could write a bundle"),
            (self.n_recording > 0, "the program used CUDA but reserved no memory on a GPU"),
            (
                bool(version) and cuda == "-",
                f"PyTorch {version} is built without CUDA{_TRY}",
            ),
            (bool(version), f"the program imported PyTorch {version} but used no GPU{_TRY}"),
            (self.n_inner > 0, "the fragdoctor run inside the program records by itself"),
            (
                bool(self.without_torch),
                f"the program's Python, {self.without_torch}, has no PyTorch",
            ),
            (self.n_started > 0, "the program did not import torch"),
            (ended.was_asked_to, "the program was stopped before Python had started"),
        )
        reason = next((text for applies, text in reasons if applies), _NO_PYTHON)
        return f"Nothing was recorded: {reason}."


_TRY: Final = "; fragdoctor rehearse needs no GPU"


def _end_of(code: int) -> str:
    if code <= 128:
        return "ended by os._exit"
    try:
        return f"was killed by {signal.Signals(code - 128).name}"
    except ValueError:
        return f"was killed by signal {code - 128}"


def read_status(path: Path) -> Reached:
    """Return what the processes noted in the status file."""
    text = ""
    with contextlib.suppress(OSError):
        text = path.read_text(encoding="utf-8", errors="replace")
    rows = [line.split("\t") for line in text.splitlines()]
    words = [(row[1], row[2]) for row in rows if len(row) == 3]
    versions = [detail for word, detail in words if word == "torch"]
    return Reached(
        n_started=sum(word == "started" for word, _ in words),
        torch=versions[0] if versions else "",
        n_recording=sum(word == "cuda" for word, _ in words),
        n_unused=sum(word == "unused" for word, _ in words),
        n_inner=sum(word == "inner" for word, _ in words),
        without_torch=next((detail for word, detail in words if word == "missing"), ""),
        problems=tuple(dict.fromkeys(detail for word, detail in words if word == "problem")),
    )
