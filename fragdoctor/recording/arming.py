"""Waiting, at no cost, until the program uses CUDA; then the recorder starts.

The steps: the interpreter starts and a finder waits for ``import torch``; torch is imported and a
call is queued for the initialization of CUDA (``torch.cuda._lazy_call``, PyTorch's own way); CUDA
is initialized and, before the first allocation, recording starts. A program that stops earlier was
not changed.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from typing import Any

from .history_recorder import Recorder
from .record_options import Options
from .signals import Signals, quietly


def arm(options: Options) -> None:
    """Wait for the program to import torch."""
    note(options, "started", sys.executable or "")
    if "torch" in sys.modules:
        _on_torch(options, sys.modules["torch"])
    else:
        missing = functools.partial(note, options, "missing", sys.executable or "")
        sys.meta_path.insert(0, _Finder(lambda torch: _on_torch(options, torch), missing))


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
    """Finds nothing itself; calls ``done`` once torch has been imported, and goes away.

    If there is no torch, ``missing`` is called instead. It stays while torch is only looked for:
    transformers and vLLM call ``importlib.util.find_spec("torch")`` before they import it.
    """

    def __init__(self, done: Callable[[Any], None], missing: Callable[[], None]) -> None:
        self._done = done
        self._missing = missing

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the other finders' spec for torch, with a call added to its loader."""
        if name != "torch":
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None) if finder is not self else None
            spec: ModuleSpec | None = find(name, path, target) if find is not None else None
            if spec is not None:
                self._extend(spec.loader)
                return spec
        self._missing()
        return None

    def _extend(self, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: Any) -> None:
            with contextlib.suppress(AttributeError, ValueError):
                del loader.exec_module  # the loader is as it was
                sys.meta_path.remove(self)
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
    """Start recording. An exception here would reach the program, so none may escape."""
    try:
        recorder = Recorder(options, torch)
        recorder.start()
        note(options, "cuda")

        def reported(call: Callable[..., None]) -> Callable[..., None]:
            def act(*args: Any) -> None:
                call(*args)
                report(options, recorder)

            return act

        def ended() -> None:
            recorder.on_exit(getattr(sys, "last_exc", None) or getattr(sys, "last_value", None))

        at_exit = reported(ended)
        atexit.register(at_exit)
        if "multiprocessing.util" in sys.modules:
            # Forked children end by os._exit, which runs only multiprocessing's finalizers.
            finalize = sys.modules["multiprocessing.util"].Finalize
            quietly(finalize, None, at_exit, exitpriority=100)
        signals = Signals(
            reported(lambda name: recorder.on_exit(signal_name=name)),
            reported(recorder.on_request),
            lambda: recorder.is_writing,
        )
        recorder.on_idle = signals.resume
        quietly(signals.install)
    except Exception as e:  # see above
        note(options, "problem", f"{type(e).__name__}: {e}")


def report(options: Options, recorder: Recorder) -> None:
    """Report to the parent what went wrong, if anything did."""
    if os.getpid() == recorder.pid:
        if recorder.left_nothing:
            note(options, "unused")
        for problem in recorder.problems:
            note(options, "problem", problem)
        recorder.problems.clear()
