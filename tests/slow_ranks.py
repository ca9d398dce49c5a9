"""Ranks that block their reader: named pipes, with a test at the other end."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

HAS_PROC = Path("/proc/self/fd").is_dir()


def has_open(pid: int, path: Path) -> bool:
    """Return whether a process has a file open."""
    with contextlib.suppress(OSError):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if fd.readlink() == path:
                    return True
    return False


def reader_of(path: Path) -> int | None:
    """Return a process other than this one that has a file open, or None."""
    pids = (int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit())
    return next((pid for pid in pids if pid != os.getpid() and has_open(pid, path)), None)


Answer = Callable[[Path, int, int], None]


class Held:
    """A rank whose reader waits for bytes; each opening gets the next of ``answers``."""

    def __init__(self, path: Path, *answers: Answer) -> None:
        self.path = path
        self.n_opened = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        os.mkfifo(path)
        self._answers = answers
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        for answer in self._answers:
            fd = os.open(self.path, os.O_WRONLY)  # returns when a reader opens it
            # The reader may not be visible yet, or a killed reader may have been there briefly.
            while (pid := reader_of(self.path)) is None:
                threading.Event().wait(0.01)
            self.n_opened += 1
            answer(self.path, fd, pid)

    def join(self) -> None:
        """Wait until all answers were given."""
        self._thread.join(30)
        assert not self._thread.is_alive()


def kill_reader(path: Path, fd: int, pid: int) -> None:
    """Kill the reading process, like the system does when memory runs out."""
    os.kill(pid, signal.SIGSTOP)  # neither it nor its successor may see the end of the pipe
    os.close(fd)
    os.kill(pid, signal.SIGKILL)
    while has_open(pid, path):
        threading.Event().wait(0.01)


def sending(data: bytes) -> Answer:
    """Return the answer that sends these bytes to the reader."""

    def answer(_path: Path, fd: int, _pid: int) -> None:
        with os.fdopen(fd, "wb") as pipe:
            pipe.write(data)

    return answer
