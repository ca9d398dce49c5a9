"""Running the user's program in a prepared process, to its end or until it is enough."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import json
import os
import sys
import threading
import traceback
import types
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, NoReturn

from fragdoctor.errors import FragdoctorError

EXIT_UNFIT: Final = 2


def run(request: dict[str, Any]) -> NoReturn:
    """Prepare this process, run the program, write the outcome, and exit.

    Args:
        request: what :mod:`fragdoctor.rehearse.launch` asks for.
    """
    sys.argv[:] = [request["target"], *request["args"]]
    try:
        import torch  # noqa: F401 - before anything of it is patched
    except ImportError:
        _unfit(
            request,
            "The program's Python has no PyTorch.",
            "Run fragdoctor in the program's environment, or name its Python with --python.",
        )
    from fragdoctor.rehearse.engine.outcome import Outcome
    from fragdoctor.rehearse.engine.prepare import Machine, prepare
    from fragdoctor.rehearse.engine.session import GpuFacts
    from fragdoctor.rehearse.engine.steps import Steps

    gpu = request["gpu"]
    machine = Machine(
        library=Path(request["library"]),
        n_devices=request["n_devices"],
        capacity_bytes=request["capacity_bytes"],
        total_bytes=gpu["total_bytes"],
        facts=GpuFacts(gpu["name"], tuple(gpu["capability"]), gpu["n_multiprocessors"]),
    )
    undo = ExitStack()
    try:
        now = prepare(machine, undo)
    except FragdoctorError as err:
        _unfit(request, err.message, err.hint)
    outcome = Outcome(request, now)
    steps = Steps(
        now, request["steps"], request["most_steps"], outcome.on_step, outcome.stop_early
    )
    steps.install(undo)
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
        _call_program(lambda: _RUNNERS[request["kind"]](request["target"]), outcome)
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


def _call_program(call: Callable[[], None], outcome: Any) -> None:
    """The program's frames begin below this one."""
    outcome.now.stacks.begin_below(sys._getframe().f_code)
    call()


def _print_failure(error: BaseException) -> None:
    """Print the traceback from the program's first frame on."""
    trace = error.__traceback__
    here = str(Path(__file__))
    while trace is not None and trace.tb_frame.f_code.co_filename == here:
        trace = trace.tb_next
    while trace is not None and "importlib" in trace.tb_frame.f_code.co_filename:
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace)


def _as_main(filename: str) -> types.ModuleType:
    module = types.ModuleType("__main__")
    module.__file__ = filename
    module.__builtins__ = __builtins__  # type: ignore[attr-defined]
    sys.modules["__main__"] = module
    return module


def _run_script(path: str) -> None:
    module = _as_main(path)
    sys.path[0] = str(Path(path).resolve().parent)
    code = compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
    exec(code, module.__dict__)  # noqa: S102 - the user's own program


def _run_module(name: str) -> None:
    sys.path[0] = str(Path.cwd())
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    if spec is None or spec.loader is None or not hasattr(spec.loader, "get_code"):
        raise ModuleNotFoundError(f"No module named {name}", name=name)
    code = spec.loader.get_code(spec.name)
    module = _as_main(spec.origin or name)
    module.__spec__ = spec
    module.__package__ = spec.parent
    sys.argv[0] = spec.origin or name
    exec(code, module.__dict__)  # noqa: S102 - the user's own program


def _run_notebook(path: str) -> None:
    """Run the code cells in order; what only IPython understands is left out."""
    cells = json.loads(Path(path).read_text(encoding="utf-8")).get("cells", [])
    module = _as_main(path)
    sys.path[0] = str(Path(path).resolve().parent)
    for number, cell in enumerate(cells, 1):
        if cell.get("cell_type") == "code":
            source = cell.get("source", "")
            text = source if isinstance(source, str) else "".join(source)
            _run_cell(text, f"{path}[{number}]", module)


def _run_cell(text: str, name: str, module: types.ModuleType) -> None:
    if text.lstrip().startswith("%%"):
        return
    lines = [
        "pass  # " + line.lstrip() if line.lstrip().startswith(("%", "!")) else line
        for line in text.splitlines()
    ]
    kept = []
    for line in lines:
        indent = line[: len(line) - len(line.lstrip())]
        kept.append(indent + line.lstrip())
    tree = ast.parse("\n".join(kept), name)
    exec(compile(tree, name, "exec", dont_inherit=True), module.__dict__)  # noqa: S102


_RUNNERS: Final[dict[str, Callable[[str], None]]] = {
    "script": _run_script,
    "module": _run_module,
    "notebook": _run_notebook,
}

