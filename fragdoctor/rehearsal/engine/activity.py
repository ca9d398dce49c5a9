"""What a program is observed to do: its named ranges, backward passes, and calls of models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.autograd.profiler import record_function

from fragdoctor.model.marks import BACKWARD, NO_GRAD
from fragdoctor.rehearsal.engine import wrap
from fragdoctor.rehearsal.engine.calls import (
    around_backward,
    around_models,
    is_of_loss,
    is_traced,
    put_call,
)
from fragdoctor.rehearsal.engine.marks import in_backward
from fragdoctor.rehearsal.engine.session import Session


def install(now: Session) -> None:
    """Mark what the program does and report it to the progress."""
    _watch_ranges(now)
    _watch_backward(now)
    _watch_calls(now)
    now.modules.install(now.gpus)
    now.on_oom.append(lambda *_: now.modules.read_all())


def _watch_ranges(now: Session) -> None:
    def begin(enter: Any, self: record_function) -> Any:
        if now.is_started:
            now.marks.note("START", self.name, now.gpus.device())
        return enter(self)

    def end(leave: Any, self: record_function, *error: Any) -> None:
        leave(self, *error)
        if now.is_started:
            now.marks.note("END", self.name, now.gpus.device())
            now.progress.end_range()

    wrap(record_function, "__enter__", begin)
    wrap(record_function, "__exit__", end)


@contextmanager
def _marked(now: Session, name: str) -> Iterator[None]:
    now.marks.note("START", name, now.gpus.device())
    try:
        yield
    finally:
        now.marks.note("END", name, now.gpus.device())


def _watch_backward(now: Session) -> None:
    """Mark each backward pass that does not run inside another one."""

    def watched(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if in_backward() or not now.is_started or is_traced():
            return run(*args, **kwargs)
        is_whole = not is_of_loss(*args, **kwargs)
        if is_whole:
            now.progress.begin_backward()
        try:
            with _marked(now, BACKWARD):
                return run(*args, **kwargs)
        finally:
            now.modules.end_backward()
            if is_whole:
                now.progress.end_backward()

    around_backward(watched)


def _watch_calls(now: Session) -> None:
    """Watch calls of modules, and calls of models from outside any model."""

    def around(model: Any, _: Any) -> AbstractContextManager[None] | None:
        if not now.is_started:
            return None
        now.modules.begin_call(model)
        keeps = torch.is_grad_enabled()
        now.progress.begin_call(model, keeps=keeps)
        return None if keeps else _marked(now, NO_GRAD + type(model).__name__)

    around_models(around)

    def called(call: Any, module: Any, /, *args: Any, **kwargs: Any) -> Any:
        if not now.is_started:
            return call(module, *args, **kwargs)
        before = now.modules.enter(module)
        try:
            return call(module, *args, **kwargs)
        finally:
            now.modules.leave(before)

    put_call(called)
