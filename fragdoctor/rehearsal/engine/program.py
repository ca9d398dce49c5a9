"""Running the user's program in a prepared process, until it ends or enough has been seen.

If one program is rehearsed several times, each rehearsal is a fork of a process that has imported
the program's libraries, since imports take most of the time of a short one. The first fork has
PyTorch and what the program imports before it does anything else; the process then imports what
else that fork imported from installed libraries, for later forks.
A fork is as good as a new process as long as it inherits no thread, no GPU in use and nothing that
the program itself did: libraries that it imported after changing its environment are left to each
fork. After each library it is checked whether threads are running.
"""

from __future__ import annotations

import ast
import ctypes
import gc
import importlib
import importlib.util
import json
import linecache
import os
import random
import runpy
import signal
import sys
import threading
import time
import traceback
import types
from contextlib import suppress
from importlib.machinery import SourceFileLoader
from itertools import takewhile
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, NoReturn

from fragdoctor.errors import FragdoctorError
from fragdoctor.model.gpus import GpuModel
from fragdoctor.rehearsal.engine import frames_from, leave, nothing, wrap
from fragdoctor.rehearsal.engine.memory_history import is_users
from fragdoctor.rehearsal.fence import FREE, restrict_writes

if TYPE_CHECKING:
    from fragdoctor.rehearsal.engine.session import Session


_TASKS: Final = Path("/proc/self/task")
_DIES_WITH_PARENT: Final = 1  # Linux's PR_SET_PDEATHSIG
_IMPORTS: Final = "<frozen importlib._bootstrap>"


def request_of_fork(server: dict[str, Any], now: Session) -> dict[str, Any]:
    """Serve requests, each in a fork; return in the fork, with its request; the server never does.

    ``server`` is the request that started this process, and ``requests_fd`` in it a pipe of paths.
    The prepared rehearsal must not have begun.
    """
    fd, progress_fd = server["requests_fd"], server["progress_fd"]
    environ = dict(os.environ)
    blocker = _blocker(now, "PyTorch")
    is_warm = not server["warms"]
    if not (blocker or is_warm) and server["kind"] == "script":
        blocker = _import_first(server["target"], now)
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
    """Make the fork what a new process with the same imports would be.

    ``before`` is the environment when the server began; the libraries may have changed it since.
    """
    _die_with_parent()
    changed = {k: v for k, v in os.environ.items() if before.get(k) != v}
    kept = {k: v for k, v in request["environ"].items() if k not in before or k in os.environ}
    os.environ.clear()
    os.environ.update(kept | changed)
    os.chdir(request["folder"])
    sys.argv[:] = [request["target"], *request["args"]]
    streams = [(os.open(os.devnull, os.O_RDONLY), [0])]
    if request["output"] is not None:
        streams.append((os.open(request["output"], os.O_WRONLY | os.O_APPEND), [1, 2]))
    for source, targets in streams:
        for target in targets:
            os.dup2(source, target)
        os.close(source)


def _die_with_parent() -> None:
    """Let the system end this process together with its parent."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGKILL)


def _import_all(libraries: list[tuple[str, str]], program: str, now: Session) -> str:
    """Import libraries by name and file; return why no fork is safe after them, or ""."""
    sys.path[0] = str(Path(program).resolve().parent)  # the program's own modules come first
    for name, origin in libraries:
        with suppress(BaseException):
            spec = None if name in sys.modules else importlib.util.find_spec(name)
            if spec is not None and spec.origin == origin:
                importlib.import_module(name)
        blocker = _blocker(now, name)
        if blocker:
            return blocker
    gc.collect()
    gc.freeze()  # forks share the pages of existing objects
    return ""


def _import_first(program: str, now: Session) -> str:
    """Import the libraries that a script begins with; return why no fork is safe after them, or "".

    Its own modules, and what it imports after them, are left to each fork.
    """
    sys.path[0] = str(Path(program).resolve().parent)
    try:
        statements = ast.parse(Path(program).read_bytes()).body
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return ""
    for one in statements[ast.get_docstring(ast.Module(statements, [])) is not None :]:
        match one:
            case ast.Import(names=names):
                wanted = [(name.name, "") for name in names]
            case ast.ImportFrom(module=str(module), names=names, level=0):
                wanted = [(module, name.name) for name in names]
            case _:
                break
        for module, name in wanted:
            with suppress(BaseException):
                spec = importlib.util.find_spec(module.partition(".")[0])
                origin = spec and spec.origin
                if not origin or (os.sep in origin and is_users(origin)):
                    return ""
                getattr(importlib.import_module(module), name, None)  # some import it only now
            blocker = _blocker(now, module)
            if blocker:
                return blocker
    return ""


def _blocker(now: Session, name: str) -> str:
    """Return why no fork is safe after an import, "" if it is safe."""
    try:
        n_threads = len(os.listdir(_TASKS))  # noqa: PTH208 - bypasses the redirection of reads
    except OSError:
        return "the system does not tell which threads are running"
    if n_threads > 1:
        return f"{name} starts a thread when it is imported"
    return f"{name} uses the GPU when it is imported" if now.is_started else ""


class Libraries:
    """Notes which libraries a program has imported before it changes its environment."""

    def __init__(self) -> None:
        self._n_safe: int | None = None
        for name in ("putenv", "unsetenv"):
            wrap(os, name, self._change)

    def _change(self, change: Any, *args: Any) -> None:
        if self._n_safe is None and not _is_of_import(sys._getframe(1)):
            self._n_safe = len(sys.modules)
        change(*args)

    def found(self) -> list[tuple[str, str]]:
        """Return the names and files of the libraries, in the order of their import."""
        found = []
        for name, module in list(sys.modules.items())[: self._n_safe]:
            spec = getattr(module, "__spec__", None)
            origin = getattr(spec, "origin", None)
            if isinstance(origin, str) and os.sep in origin and not is_users(origin):
                found.append((name, origin))
        return found


def _is_of_import(frame: FrameType | None) -> bool:
    """Return whether a library is being imported, with none of the program's own code inside."""
    files = (one.f_code.co_filename for one in frames_from(frame))
    return any(_IMPORTS in file for file in takewhile(lambda file: not is_users(file), files))


EXIT_UNFIT: Final = 2
_CALLER: Final = runpy._run_code.__code__  # type: ignore[attr-defined]  # calls the program's code


def run(request: dict[str, Any]) -> NoReturn:
    """Prepare this process, run the program, write the outcome, and exit.

    The request comes from :mod:`fragdoctor.rehearsal.process`.
    """
    sys.argv[:] = [request["target"], *request["args"]]
    _die_with_parent()
    blocker = ""
    if request["scratch"] is not None:  # before any thread starts
        blocker = restrict_writes([os.path.realpath(request["scratch"]), *FREE])
    now = _prepared(request)
    if blocker:
        now.assumptions.note(
            f"The kernel does not fence the program in: {blocker}. Writes that bypass Python are "
            "not blocked."
        )
    if "requests_fd" in request:
        request = request_of_fork(request, now)
        request["libraries"] = Libraries()
    _rehearse(request, now)


def _prepared(request: dict[str, Any]) -> Session:
    """Import PyTorch and prepare this process."""
    try:
        import torch  # noqa: F401 - before anything of it is patched
    except ImportError as err:
        is_missing = isinstance(err, ModuleNotFoundError) and err.name == "torch"
        _unfit(
            request,
            "The program's Python has no PyTorch."
            if is_missing
            else f"The program's Python cannot import PyTorch: {err}.",
            "Run fragdoctor in the program's environment, or name its Python with --python.",
        )
    from fragdoctor.rehearsal.engine.prepare import prepare

    native, scratch = Path(request["native"]), request["scratch"] and Path(request["scratch"])
    try:
        return prepare(native, request["n_devices"], request["torch_version"], scratch)
    except FragdoctorError as err:
        _unfit(request, err.message, err.hint)


def _rehearse(request: dict[str, Any], now: Session) -> NoReturn:
    """Run the program on the requested GPU, write the outcome, and exit."""
    from fragdoctor.rehearsal.engine.outcome import ProgramOutcome
    from fragdoctor.rehearsal.engine.step_watch import Steps, StopConditions

    gpu = request["gpu"]
    now.facts = GpuModel(**gpu["kernels"])
    now.capacity_bytes, now.total_bytes = gpu["capacity_bytes"], gpu["total_bytes"]
    now.assumptions.shares.update(request["assumed_shares"])
    outcome = ProgramOutcome(request, now)
    limit, most = request["n_steps"], request["most_steps"]
    asked = StopConditions(
        limit, most, request["least_steps"], request["known_steps"], request["fitting_bytes"]
    )
    stops = request["stops_by_itself"]
    outcome.steps = Steps(now, asked, outcome.on_step, outcome.stop_early if stops else nothing)
    outcome.steps.install()
    if stops and limit is None:
        skipping = now.loops.skipping
        skipping.most, skipping.on_stuck = most, outcome.stop_early
        skipping.assumptions = now.assumptions
        skipping.install(now.gpus, now.n_devices)
        now.loops.install()
    if request["observes"]:
        from fragdoctor.rehearsal.engine.treatments.traits import Traits

        outcome.traits = Traits()
    if request["treatments"]:
        from fragdoctor.rehearsal.engine.treatments import apply

        apply(request["treatments"])
    if request["time_limit_s"] is not None:
        _limit_time(request["time_limit_s"], outcome)
    random.seed(0)  # a program that does not seed its numbers takes the same course each time
    if "numpy" in sys.modules:  # PyTorch imports it
        sys.modules["numpy"].random.seed(0)
    code = _run_guarded(request, outcome)
    outcome.end(code)
    leave(code)


def _limit_time(seconds: float, outcome: Any) -> None:
    """End the rehearsal at the first GPU operation after a time limit."""
    from fragdoctor.rehearsal.engine import dispatch

    ends_at = time.monotonic() + seconds

    def serve_in_time(serve: Any, *args: Any) -> Any:
        if time.monotonic() > ends_at:
            outcome.stop_early(f"the time limit of {seconds:g} s was over")
        return serve(*args)

    wrap(dispatch, "serve", serve_in_time)


def _unfit(request: dict[str, Any], message: str, hint: str) -> NoReturn:
    Path(request["outcome"]).write_text(
        json.dumps({"status": "unfit", "message": message, "hint": hint}), encoding="utf-8"
    )
    leave(EXIT_UNFIT)


def _run_guarded(request: dict[str, Any], outcome: Any) -> int:
    try:
        outcome.now.stacks.outermost = _CALLER
        # The program's globals, and what they hold, stay alive until its memory has been reported.
        outcome.program_globals = _run_program(request)
    except SystemExit as end:
        outcome.failure = end
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as err:  # noqa: BLE001 - the user's program may raise anything
        outcome.failure = err
        _print_failure(err)
        return 1
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    return 0


def _print_failure(error: BaseException) -> None:
    """Print the traceback from the program's first frame on; invalid Python has no such frame."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code is not _CALLER:
        trace = trace.tb_next
    if trace is not None:
        trace = trace.tb_next
    elif not isinstance(error, SyntaxError):
        trace = error.__traceback__
    traceback.print_exception(type(error), error, trace)


def _run_program(request: dict[str, Any]) -> dict[str, Any]:
    """Run a module, a script, or a notebook's cells one after another; return its globals."""
    target, kind = request["target"], request["kind"]
    if kind == "module":
        sys.path[0] = str(Path.cwd())
        return runpy.run_module(target, run_name="__main__", alter_sys=True)
    folder = Path(target).resolve().parent
    sys.path[0] = str(folder)
    if kind == "script":
        return runpy.run_path(target, run_name="__main__")
    os.chdir(folder)  # as Jupyter does
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    main.__dict__["display"] = print
    for name, source in request["cells"]:
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        code = SourceFileLoader("__main__", name).source_to_code(source.encode(), name)
        runpy._run_code(code, main.__dict__, None, "__main__", script_name=name)  # type: ignore[attr-defined]
    return main.__dict__
