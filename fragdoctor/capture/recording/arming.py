"""Waiting, at no cost, until the program uses CUDA; then the recorder starts.

The steps: the interpreter starts and a finder waits for ``import torch``; torch is imported and a
call is left for the initialisation of CUDA (``torch.cuda._lazy_call``, PyTorch's own way); CUDA is
initialised and, before the first allocation, recording starts. A program that stops earlier was
not changed.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from typing import Any

from .history_recorder import Recorder
from .record_options import Options
from .signals import OnTerm


def arm(options: Options) -> None:
    """Wait for the program to import torch."""
    note(options, "started", sys.executable or "")
    if "torch" in sys.modules:
        _on_torch(options, sys.modules["torch"])
    else:
        sys.meta_path.insert(0, _Finder(lambda torch: _on_torch(options, torch)))


def note(options: Options, word: str, detail: str = "") -> None:
    """Append a line to the status file, for the sentence that ``fragdoctor run`` ends with."""
    if not options.status:
        return
    line = f"{os.getpid()}\t{word}\t{' '.join(detail.split())[:500]}\n"
    with contextlib.suppress(OSError):
        descriptor = os.open(options.status, os.O_WRONLY | os.O_APPEND)
        try:
            os.write(descriptor, line.encode("utf-8", "replace"))
        finally:
            os.close(descriptor)


class _Finder:
    """Finds nothing itself; calls ``done`` when torch has been imported, and goes away."""

    def __init__(self, done: Callable[[Any], None]) -> None:
        self._done = done

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the spec that the other finders have for torch, its loader extended by a call."""
        if name != "torch":
            return None
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(self)
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(name, path, target) if find is not None else None
            if spec is not None:
                self._extend(spec.loader)
                return spec
        return None

    def _extend(self, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: Any) -> None:
            with contextlib.suppress(AttributeError):
                del loader.exec_module  # the loader is as it was
            execute(module)
            with contextlib.suppress(Exception):
                self._done(module)

        with contextlib.suppress(AttributeError, TypeError):  # a loader that cannot be extended
            loader.exec_module = exec_module


def _on_torch(options: Options, torch: Any) -> None:
    cuda = getattr(getattr(torch, "version", None), "cuda", None)
    hip = getattr(getattr(torch, "version", None), "hip", None)
    note(options, "torch", f"{torch.__version__} {cuda or hip or '-'}")
    if cuda or hip:
        torch.cuda._lazy_call(lambda: _on_cuda(options, torch))


def _on_cuda(options: Options, torch: Any) -> None:
    """Start recording. An exception here would be the program's: there must be none."""
    try:
        recorder = Recorder(options, torch)
        recorder.start()
        note(options, "cuda")
        _at_exit(lambda: _on_exit(options, recorder))
        on_term = OnTerm(
            lambda name: _on_term(options, recorder, name), lambda: recorder.is_writing
        )
        recorder.on_idle = on_term.resume
        _quietly(on_term.install)
    except Exception as e:  # see above
        note(options, "problem", f"{type(e).__name__}: {e}")


def _at_exit(call: Callable[[], None]) -> None:
    atexit.register(call)
    if "multiprocessing.util" in sys.modules:
        # Forked children end by os._exit, which runs multiprocessing's finalizers only.
        _quietly(sys.modules["multiprocessing.util"].Finalize, None, call, exitpriority=100)


def _on_exit(options: Options, recorder: Recorder) -> None:
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    recorder.on_exit(error)
    report(options, recorder)


def _on_term(options: Options, recorder: Recorder, name: str) -> None:
    recorder.on_exit(signal_name=name)
    report(options, recorder)


def report(options: Options, recorder: Recorder) -> None:
    """Report to the parent what went wrong, if anything did."""
    if os.getpid() == recorder.pid:
        if recorder.left_nothing:
            note(options, "unused")
        for problem in recorder.problems:
            note(options, "problem", problem)
        recorder.problems.clear()


def _quietly(call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    with contextlib.suppress(Exception):
        call(*args, **kwargs)
