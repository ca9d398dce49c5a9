"""Running the user's program in a prepared process, to its end or until it is enough."""

from __future__ import annotations

import contextlib
import json
import linecache
import os
import runpy
import sys
import threading
import traceback
import types
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from fragdoctor.errors import FragdoctorError

if TYPE_CHECKING:
    from fragdoctor.rehearse.engine.session import Session

EXIT_UNFIT: Final = 2
_CALLER: Final = runpy._run_code.__code__  # type: ignore[attr-defined]  # calls the program's code


def run(request: dict[str, Any]) -> NoReturn:
    """Prepare this process, run the program, write the outcome, and exit.

    Args:
        request: what :mod:`fragdoctor.rehearse.process` asks for.
    """
    sys.argv[:] = [request["target"], *request["args"]]
    undo = ExitStack()
    now = _prepared(request, undo)
    if "requests_fd" in request:
        from fragdoctor.rehearse.engine.forks import Libraries, request_of_fork

        request = request_of_fork(request, now)
        request["libraries"] = Libraries(undo)
    _rehearse(request, now, undo)


def _prepared(request: dict[str, Any], undo: ExitStack) -> Session:
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
    from fragdoctor.rehearse.engine.prepare import Machine, prepare

    machine = Machine(
        native=Path(request["native"]),
        n_devices=request["n_devices"],
        scratch=None if request["scratch"] is None else Path(request["scratch"]),
        torch_version=request["torch_version"],
    )
    try:
        return prepare(machine, undo)
    except FragdoctorError as err:
        _unfit(request, err.message, err.hint)


def _rehearse(request: dict[str, Any], now: Session, undo: ExitStack) -> NoReturn:
    """Run the program on the GPU that was asked for, write the outcome, and exit."""
    from fragdoctor.rehearse.engine.outcome import Outcome
    from fragdoctor.rehearse.engine.session import GpuFacts
    from fragdoctor.rehearse.engine.steps import Steps

    gpu = request["gpu"]
    now.facts = GpuFacts(gpu["name"], tuple(gpu["capability"]), gpu["n_multiprocessors"])
    now.budget = replace(
        now.budget, capacity_bytes=request["capacity_bytes"], total_bytes=gpu["total_bytes"]
    )
    now.assumptions.shares.update(request["assumed_shares"])
    outcome = Outcome(request, now)
    steps = Steps(now, request["steps"], request["most_steps"], outcome.on_step, outcome.stop_early)
    if request["stops_by_itself"]:
        steps.install(undo)
        now.rounds.install(undo)
    outcome.steps = steps
    outcome.begin()
    code = _run_guarded(request, outcome)
    outcome.end(code)
    _leave(code)


def _unfit(request: dict[str, Any], message: str, hint: str) -> NoReturn:
    Path(request["outcome"]).write_text(
        json.dumps({"status": "unfit", "message": message, "hint": hint}), encoding="utf-8"
    )
    _leave(EXIT_UNFIT)


def _leave(code: int) -> NoReturn:
    """End without what Python does at the end: threads of the program may wait for ever."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _run_guarded(request: dict[str, Any], outcome: Any) -> int:
    try:
        outcome.now.stacks.begin_below(_CALLER)
        # The program's globals, and what they hold, live on until its memory has been told.
        outcome.program_globals = _RUNNERS[request["kind"]](request)
    except SystemExit as end:
        outcome.failure = end
        return _code_of(end)
    except BaseException as err:  # noqa: BLE001 - the user's program may raise anything
        outcome.failure = err
        _print_failure(err)
        return 1
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    return 0


def _code_of(end: SystemExit) -> int:
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code
    print(end.code, file=sys.stderr)
    return 1


def _print_failure(error: BaseException) -> None:
    """Print the traceback from the program's first frame on."""
    trace = first = error.__traceback__
    while trace is not None and trace.tb_frame.f_code is not _CALLER:
        trace = trace.tb_next
    trace = first if trace is None else trace.tb_next
    traceback.print_exception(type(error), error, trace)


def _run_script(request: dict[str, Any]) -> dict[str, Any]:
    path = request["target"]
    sys.path[0] = str(Path(path).resolve().parent)
    return runpy.run_path(path, run_name="__main__")


def _run_module(request: dict[str, Any]) -> dict[str, Any]:
    sys.path[0] = str(Path.cwd())
    return runpy.run_module(request["target"], run_name="__main__", alter_sys=True)


def _run_notebook(request: dict[str, Any]) -> dict[str, Any]:
    """Run the cells of a notebook one after another, as one module."""
    path = Path(request["target"]).resolve()
    sys.path[0] = str(path.parent)
    os.chdir(path.parent)  # as Jupyter does
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    main.__dict__["display"] = print
    for name, source in request["cells"]:
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        code = SourceFileLoader("__main__", name).source_to_code(source.encode(), name)
        runpy._run_code(code, main.__dict__, None, "__main__", script_name=name)  # type: ignore[attr-defined]
    return main.__dict__


_RUNNERS: Final[dict[str, Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "script": _run_script,
    "module": _run_module,
    "notebook": _run_notebook,
}
