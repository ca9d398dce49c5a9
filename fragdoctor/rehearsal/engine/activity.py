"""What a program is seen to do: its named ranges, backward passes, and calls of models."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from functools import wraps
from typing import Any

import torch
from torch.autograd.profiler import record_function

from fragdoctor.model.marks import BACKWARD, NO_GRAD
from fragdoctor.rehearsal.engine import put
from fragdoctor.rehearsal.engine.marks import in_backward
from fragdoctor.rehearsal.engine.session import Session


def install(now: Session, undo: ExitStack) -> None:
    """Mark what the program does, and tell the session's progress, until ``undo`` is closed."""
    _watch_ranges(now, undo)
    engine = torch.autograd.Variable._execution_engine
    put(undo, torch.autograd.Variable, "_execution_engine", _Engine(engine, now))
    _watch_calls(now, undo)
    now.modules.install(now.gpus, undo)
    now.on_oom.append(lambda *_: now.modules.read_all())


def _watch_ranges(now: Session, undo: ExitStack) -> None:
    enter: Any = record_function.__enter__
    leave: Any = record_function.__exit__

    @wraps(enter)
    def begin(self: record_function) -> Any:
        if now.is_started:
            now.marks.begin(self.name, now.gpus.device())
        return enter(self)

    @wraps(leave)
    def end(self: record_function, *error: Any) -> None:
        leave(self, *error)
        if now.is_started:
            now.marks.end(self.name, now.gpus.device())
            now.progress.end_range()

    put(undo, record_function, "__enter__", begin)
    put(undo, record_function, "__exit__", end)


class _Engine:
    """The autograd engine; each backward pass that is none of another's is marked."""

    def __init__(self, engine: Any, now: Session) -> None:
        self._engine = engine
        self._now = now

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        """Run a backward pass; arguments as for PyTorch's engine."""
        now = self._now
        if in_backward() or not now.is_started:
            return self._engine.run_backward(*args, **kwargs)
        now.progress.begin_backward()
        now.marks.begin(BACKWARD, now.gpus.device())
        try:
            return self._engine.run_backward(*args, **kwargs)
        finally:
            now.marks.end(BACKWARD, now.gpus.device())
            now.modules.end_backward()
            now.progress.end_backward()


class _Inside(threading.local):
    """Whether a model's call goes on in this thread."""

    model = False


def _watch_calls(now: Session, undo: ExitStack) -> None:
    """Watch calls of modules that have parameters: losses and transforms are no models."""
    call: Any = torch.nn.Module.__call__
    inside = _Inside()

    @wraps(call)
    def called(module: Any, *args: Any, **kwargs: Any) -> Any:
        if not now.is_started:
            return call(module, *args, **kwargs)
        before = now.modules.enter(module)
        try:
            return outermost(module, *args, **kwargs)
        finally:
            now.modules.leave(before)

    def outermost(module: Any, *args: Any, **kwargs: Any) -> Any:
        # What a backward pass calls it computes again, for a call of before.
        if inside.model or in_backward() or not _has_parameters(module):
            return call(module, *args, **kwargs)
        now.modules.begin_call(module)
        keeps = torch.is_grad_enabled()
        name = NO_GRAD + type(module).__name__
        now.progress.begin_call(module, keeps=keeps)
        if not keeps:
            now.marks.begin(name, now.gpus.device())
        inside.model = True
        try:
            return call(module, *args, **kwargs)
        finally:
            inside.model = False
            if not keeps:
                now.marks.end(name, now.gpus.device())

    put(undo, torch.nn.Module, "__call__", called)


def _has_parameters(module: Any) -> bool:
    return next(module.parameters(), None) is not None
