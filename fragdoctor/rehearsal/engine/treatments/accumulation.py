"""Micro-batches: loaders give an n-th of each batch, and the optimizer runs every n-th time."""

from __future__ import annotations

import types
from contextlib import ExitStack
from functools import wraps
from typing import Any

from torch.utils.data import DataLoader

from fragdoctor.rehearsal.engine import put
from fragdoctor.rehearsal.engine.calls import after_making


def install(argument: str, undo: ExitStack) -> None:
    """Split batches of loaders into n, and let optimizers run and gradients go every n-th time.

    What a program makes a batch of by itself is split by its arguments, not here.
    """
    n = int(argument)
    split_batches(n, undo)
    after_making(lambda optimizer: _run_every(optimizer, n), undo)


def split_batches(n: int, undo: ExitStack) -> None:
    """Let loaders give an n-th of each batch."""
    load = DataLoader.__init__

    @wraps(load)
    def split(self: Any, dataset: Any, batch_size: Any = 1, *args: Any, **kwargs: Any) -> None:
        if isinstance(batch_size, int) and batch_size > 1:
            batch_size = max(batch_size // n, 1)
        load(self, dataset, batch_size, *args, **kwargs)

    put(undo, DataLoader, "__init__", split)


def _run_every(optimizer: Any, n: int) -> None:
    step, zero_grad = type(optimizer).step, type(optimizer).zero_grad
    n_calls = 0

    def every_nth(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal n_calls
        n_calls += 1
        return step(self, *args, **kwargs) if n_calls % n == 0 else None

    def after_a_run(self: Any, *args: Any, **kwargs: Any) -> None:
        if n_calls % n == 0:
            zero_grad(self, *args, **kwargs)

    optimizer.step = types.MethodType(every_nth, optimizer)
    optimizer.zero_grad = types.MethodType(after_a_run, optimizer)
