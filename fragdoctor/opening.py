"""Open files that the user names, without waiting forever."""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import os
import queue
import stat
import threading
import time
from pathlib import Path
from typing import Final

from fragdoctor.errors import ConfigError, InputError, LimitExceeded

WRITER_WAIT_S: Final = 10.0
"""How long to wait until a named pipe has a writer; after that, the writer may be slow."""

READER_WAIT_S: Final = 10.0
"""How long to wait until a named pipe that we write to has a reader."""

_POLL_S: Final = 0.05


def is_text(name: str) -> bool:
    """Return whether a name given for a file is more likely a pasted text."""
    return len(name) > 40 and len(name.split()) > 3


def first_free(folder: Path, name: str, ending: str = "") -> Path:
    """Return the first place where nothing is: the name itself, else with "-2", "-3" and so on."""
    numbers = itertools.chain([""], (f"-{n}" for n in itertools.count(2)))
    places = (folder / f"{name}{number}{ending}" for number in numbers)
    return next(place for place in places if not os.path.lexists(place))


def open_readable(path: str | os.PathLike[str]) -> io.FileIO:
    """Open a file, unbuffered, without waiting forever for somebody to write to a named pipe.

    Raises:
        OSError: as from ``open``.
        InputError: the file is a pipe that nobody writes to.
    """
    is_pipe = stat.S_ISFIFO(os.stat(path).st_mode)  # noqa: PTH116 - names of any kind, as open
    return io.FileIO(_end_of_pipe(path) if is_pipe else os.fspath(path), "rb")


def read_bounded(path: str | os.PathLike[str], limit_bytes: int) -> bytes:
    """Return the contents of a file that is small, such as settings; the limit is in whole MiB.

    Raises:
        InputError: unreadable.
        LimitExceeded: larger than any genuine file of its kind.
    """
    name = os.fspath(path)
    try:
        with io.BufferedReader(open_readable(path)) as file:
            data = file.read(limit_bytes + 1)
    except OSError as e:
        hint = "Check the path and its permissions."
        raise InputError(f"{name} cannot be read: {e.strerror or e}.", hint=hint) from e
    if len(data) > limit_bytes:
        raise LimitExceeded(f"{name} is larger than any genuine one ({limit_bytes >> 20} MiB).")
    return data


def open_writable(path: str | os.PathLike[str]) -> io.FileIO:
    """Open a device or pipe for writing, without waiting forever for somebody to read a pipe.

    Raises:
        OSError: as from ``open``.
        ConfigError: the file is a pipe that nobody reads.
    """
    if not stat.S_ISFIFO(os.stat(path).st_mode):  # noqa: PTH116 - names of any kind, as open
        return io.FileIO(os.fspath(path), "wb")
    last = time.monotonic() + READER_WAIT_S
    while True:
        try:
            end = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as e:
            if e.errno != errno.ENXIO:
                raise
            if time.monotonic() > last:
                raise ConfigError(
                    f"Nobody reads the pipe {os.fspath(path)}.",
                    hint="Start the program that reads it first.",
                ) from None
            time.sleep(_POLL_S)
        else:
            os.set_blocking(end, True)
            return io.FileIO(end, "wb")


def _end_of_pipe(path: str | os.PathLike[str]) -> int:
    """Return the descriptor of a pipe that has a writer.

    If a pipe is opened without waiting, only a read shows whether it has no writer yet or is at its
    end. So a thread opens it and waits, as ``open`` does.
    """
    opened: queue.SimpleQueue[int | OSError] = queue.SimpleQueue()

    def wait() -> None:
        try:
            opened.put(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as e:
            opened.put(e)

    threading.Thread(target=wait, daemon=True).start()
    try:
        end = opened.get(timeout=WRITER_WAIT_S)
    except queue.Empty:
        with contextlib.suppress(OSError, queue.Empty):  # a brief writer lets the thread end
            os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC))
            end = opened.get(timeout=1)
            if isinstance(end, int):
                os.close(end)
        raise InputError(
            f"Nobody writes to the pipe {os.fspath(path)}.",
            hint="Start the program that writes to it first.",
        ) from None
    if isinstance(end, OSError):
        raise end
    return end
