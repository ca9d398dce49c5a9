"""A bundle of a program that was not started by ``fragdoctor run``: runs inside of it, once.

``fragdoctor attach`` makes the program's own Python run ``take``. The program may not have
fragdoctor, and must not notice: the recording package is loaded by its path, and errors are written
to a file.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys

_NAME = "_fragdoctor_recording"


def take(directory: str, problem: str) -> None:
    """Write a bundle into a directory; if that fails, write the reason into a file there."""
    try:
        said = _take(directory)
    except BaseException as e:  # the program comes first, whatever happened here
        said = f"{type(e).__name__}: {e}"
    if said:
        with open(f"{problem}.tmp", "w", encoding="utf-8", errors="replace") as file:
            file.write(said)
        os.replace(f"{problem}.tmp", problem)


def _take(directory: str) -> str:
    """Return what went wrong, or "" if there is a bundle."""
    torch = sys.modules.get("torch")
    if torch is None:
        return "the program has not imported torch"
    if not torch.cuda.is_initialized():
        return "the program has not used a GPU yet"
    if _NAME not in sys.modules:
        home = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        spec = importlib.util.spec_from_file_location(
            _NAME, os.path.join(home, "__init__.py"), submodule_search_locations=[home]
        )
        if spec is None or spec.loader is None:
            return f"{home} cannot be loaded there"
        package = importlib.util.module_from_spec(spec)
        sys.modules[_NAME] = package
        spec.loader.exec_module(package)
    options = importlib.import_module(f"{_NAME}.record_options").Options(directory)
    recorder = importlib.import_module(f"{_NAME}.history_recorder").Recorder(options, torch)
    recorder.on_request()
    return "; ".join(recorder.problems)
