"""Rehearsals of one program in forks of a process that has imported its libraries.

Most of the time of a short rehearsal goes to imports, the same each time. The first fork has
PyTorch alone; what it imported from installed libraries, the process imports after it, for those to
come. A fork is as good as a new process as long as it inherits no thread, no GPU in use and nothing
that the program itself did: libraries imported after it changed its environment are left to each
fork. Whether threads run is asked after each library.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import importlib.util
import json
import os
import signal
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Final

from fragdoctor.rehearse.engine.patching import put
from fragdoctor.rehearse.engine.session import Session
from fragdoctor.rehearse.engine.stacks import is_users

_TASKS: Final = Path("/proc/self/task")
_DIES_WITH_PARENT: Final = 1  # Linux's PR_SET_PDEATHSIG
_IMPORTS: Final = "<frozen importlib._bootstrap>"


def request_of_fork(server: dict[str, Any], now: Session) -> dict[str, Any]:
    """Serve requests, each in a fork; return there, with its request. The server never returns.

    Args:
        server: the request that started this process; ``requests_fd`` is a pipe of paths.
        now: the prepared rehearsal, of which nothing has begun.
    """
    fd, progress_fd = server["requests_fd"], server["progress_fd"]
    blocker = _blocker(now, "PyTorch")
    is_warm = not server["warms"]
    environ = dict(os.environ)
    with os.fdopen(fd, encoding="utf-8") as lines:
        for line in lines:
            request: dict[str, Any] = json.loads(Path(line.rstrip("\n")).read_text("utf-8"))
            code = None
            if not blocker:
                child = os.fork()
                if not child:
                    _begin(request, environ)
                    return request | {"progress_fd": progress_fd}
                code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                if not is_warm:
                    with suppress(OSError, ValueError, KeyError):
                        found = json.loads(Path(request["outcome"]).read_text("utf-8"))
                        blocker = _import_all(found["libraries"], request["target"], now)
                        is_warm = True
            told = {"event": "ended", "code": code, "blocker": blocker}
            os.write(progress_fd, (json.dumps(told) + "\n").encode())
    os._exit(0)


def _begin(request: dict[str, Any], before: dict[str, str]) -> None:
    """Make the fork what a new process would be that had imported the same.

    Args:
        request: its own.
        before: the environment when the server began; the libraries may have changed it since.
    """
    ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGKILL)
    changed = {k: v for k, v in os.environ.items() if before.get(k) != v}
    kept = {k: v for k, v in request["environ"].items() if k not in before or k in os.environ}
    os.environ.clear()
    os.environ.update(kept | changed)
    sys.argv[:] = [request["target"], *request["args"]]
    streams = [(os.open(os.devnull, os.O_RDONLY), [0])]
    if request["output"] is not None:
        streams.append((os.open(request["output"], os.O_WRONLY | os.O_APPEND), [1, 2]))
    for source, targets in streams:
        for target in targets:
            os.dup2(source, target)
        os.close(source)


def _import_all(libraries: list[tuple[str, str]], program: str, now: Session) -> str:
    """Import libraries by name and file; return the one after which no fork is safe, or ""."""
    sys.path[0] = str(Path(program).resolve().parent)  # what is found first there is the program's
    for name, origin in libraries:
        with suppress(BaseException):
            spec = None if name in sys.modules else importlib.util.find_spec(name)
            if spec is not None and spec.origin == origin:
                importlib.import_module(name)
        blocker = _blocker(now, name)
        if blocker:
            return blocker
    gc.collect()
    gc.freeze()  # forks share the pages of what is here
    return ""


def _blocker(now: Session, name: str) -> str:
    """Return why no fork is safe after something was imported, "" if it is."""
    try:
        n_threads = len(os.listdir(_TASKS))  # noqa: PTH208 - past what leads reads elsewhere
    except OSError:
        return "the system does not say which threads run"
    if n_threads > 1:
        return f"{name} starts a thread when it is imported"
    return f"{name} uses the GPU when it is imported" if now.is_started else ""


class Libraries:
    """Notes which libraries a program has imported by the time that it changes its environment."""

    def __init__(self, undo: ExitStack) -> None:
        self._n_safe: int | None = None
        for name in ("putenv", "unsetenv"):
            put(undo, os, name, self._watched(getattr(os, name)))

    def _watched(self, original: Any) -> Any:
        def change(*args: Any) -> None:
            if self._n_safe is None and not _is_of_import(sys._getframe(1)):
                self._n_safe = len(sys.modules)
            original(*args)

        return change

    def found(self) -> list[tuple[str, str]]:
        """Return their names and files, in the order of their import."""
        found = []
        for name, module in list(sys.modules.items())[: self._n_safe]:
            spec = getattr(module, "__spec__", None)
            origin = getattr(spec, "origin", None)
            if isinstance(origin, str) and os.sep in origin and not is_users(origin):
                found.append((name, origin))
        return found


def _is_of_import(frame: FrameType | None) -> bool:
    """Whether a library's import is at work, and none of the program's own code in it."""
    while frame is not None and not is_users(frame.f_code.co_filename):
        if _IMPORTS in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False
