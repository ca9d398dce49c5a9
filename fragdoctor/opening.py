"""Files that the user names, opened without waiting for ever."""

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

from fragdoctor.errors import ConfigError, InputError

WRITER_WAIT_S: Final = 10.0
"""How long a named pipe may have no writer; one that has one may be as slow as it likes."""

READER_WAIT_S: Final = 10.0
"""The same of one that is written to and has no reader."""

_POLL_S: Final = 0.05


def is_text(name: str) -> bool:
    """Whether what was given as the name of a file is rather a text that somebody pasted."""
    return len(name) > 40 and len(name.split()) > 3


def first_free(folder: Path, name: str, ending: str = "") -> Path:
    """Return the first place where nothing is: the name itself, else with "-2", "-3" and so on."""
    numbers = itertools.chain([""], (f"-{n}" for n in itertools.count(2)))
    places = (folder / f"{name}{number}{ending}" for number in numbers)
    return next(place for place in places if not os.path.lexists(place))


def open_readable(path: str | os.PathLike[str]) -> io.FileIO:
    """Open a file, unbuffered. Opening a named pipe would wait for somebody to write to it.

    Raises:
        OSError: as ``open``.
        InputError: it is a pipe, and nobody writes to it.
    """
    is_pipe = stat.S_ISFIFO(os.stat(path).st_mode)  # noqa: PTH116 - names of any kind, as open
    return io.FileIO(_end_of_pipe(path) if is_pipe else os.fspath(path), "rb")


def open_writable(path: str | os.PathLike[str]) -> io.FileIO:
    """Open a device or a pipe to write to it. Opening a pipe would wait for somebody to read it.

    Raises:
        OSError: as ``open``.
        ConfigError: it is a pipe, and nobody reads it.
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

    Opened without waiting, a pipe that nobody writes to yet cannot be told from one that is at its
    end unless something is read. So a thread waits, as ``open`` does.
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
        with contextlib.suppress(OSError, queue.Empty):  # a writer for a moment ends the thread
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
