"""The calls of models, from outside of any other module."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import wraps
from typing import Any

import torch

from fragdoctor.rehearsal.engine import put
from fragdoctor.rehearsal.engine.marks import in_backward

Around = Callable[[Any], AbstractContextManager[Any] | None]


class _Depth(threading.local):
    """How many calls of modules go on in this thread."""

    n = 0


def around_models(around: Around, undo: ExitStack) -> None:
    """Enter a context around each outermost call of a module with parameters.

    ``around`` is called with the module before each; None leaves the call as it is.
    """
    call: Any = torch.nn.Module.__call__
    depth = _Depth()

    @wraps(call)
    def called(module: Any, *args: Any, **kwargs: Any) -> Any:
        # What a backward pass calls it computes again, for a call of before.
        if depth.n or in_backward() or next(module.parameters(), None) is None:
            return call(module, *args, **kwargs)
        depth.n += 1
        try:
            context = around(module)
            if context is None:
                return call(module, *args, **kwargs)
            with context:
                return call(module, *args, **kwargs)
        finally:
            depth.n -= 1

    put(undo, torch.nn.Module, "__call__", called)


def before_backward(act: Callable[[], None], undo: ExitStack) -> None:
    """Call something before each backward pass."""
    engine = torch.autograd.Variable._execution_engine

    class Engine:
        def __getattr__(self, name: str) -> Any:
            return getattr(engine, name)

        def run_backward(self, *args: Any, **kwargs: Any) -> Any:
            act()
            return engine.run_backward(*args, **kwargs)

    put(undo, torch.autograd.Variable, "_execution_engine", Engine())
