"""Smaller batches: those that are trained on, with an update every n-th time, or of an evaluation.

Batches are those of PyTorch's ``BatchSampler``, which a ``DataLoader`` creates for itself and
frameworks pass on. Samplers are identified by the lines that create them and by their batch size.
"""

from __future__ import annotations

import sys
import types
import weakref
from collections.abc import Sequence
from contextlib import suppress
from functools import partial, reduce
from pathlib import Path
from typing import Any, Final
from zlib import crc32

import torch
from torch.utils.data import BatchSampler

from fragdoctor.rehearsal.engine import SEEN_THROUGH, frames_from, put, when_imported, wrap
from fragdoctor.rehearsal.engine.calls import after_making, parameters_of
from fragdoctor.rehearsal.engine.loops import Loops
from fragdoctor.rehearsal.engine.session import current

AGAIN: Final = ":again"
"""Ends the spec if the program's loop makes no more rounds by itself when its batches shrink."""
_OF_LIGHTNING: Final = ("fit_loop", "epoch_loop", "max_steps")
OWN: Final = (str(Path(__file__).parents[2]), SEEN_THROUGH)


def lines_and_size(batch_size: Any) -> str:
    """Return a sampler's identity: the calling lines outside the rehearsal, and its batch size."""
    number = 0
    for frame in frames_from(sys._getframe(1)):
        if not frame.f_code.co_filename.startswith(OWN):
            number = crc32(f"{frame.f_code.co_filename}:{frame.f_lineno}".encode(), number)
    return f"{number}x{batch_size}"


def install(argument: str) -> None:
    """Split batches of some samplers into n, and update every n-th time: ``2:17x64,4711x8``.

    Batches that a program makes itself are split through its arguments, not here. If it makes no
    more of them than before, its loop runs n times as many rounds: ``2::again``. So does that of a
    framework which is told how many steps to take.
    """
    split = argument.removesuffix(AGAIN)
    n = int(split.partition(":")[0])
    split_batches(split)
    loops: Loops | None = None
    with suppress(IndexError):  # on a GPU there is no rehearsal
        loops = current().loops
    if split != argument:
        put(loops, "n_each", n)
        when_imported(
            {
                "transformers.training_args": lambda m: wrap(
                    m.TrainingArguments, "__post_init__", partial(_longer, n, ("max_steps",))
                ),
                **dict.fromkeys(
                    ("lightning.pytorch.trainer.trainer", "pytorch_lightning.trainer.trainer"),
                    lambda m: wrap(m.Trainer, "__init__", partial(_longer, n, _OF_LIGHTNING)),
                ),
            }
        )
    made: weakref.WeakSet[Any] = weakref.WeakSet()  # entries vanish with the optimizer

    def run_every(optimizer: Any) -> None:
        _run_every(optimizer, n, loops)
        made.add(optimizer)

    def after_a_run(zero_grad: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        """Keep gradients that are being accumulated: the Trainer clears those of the model."""
        own = {id(one) for one in self.parameters()}
        if not any(o.is_between and not own.isdisjoint(parameters_of(o)) for o in made):
            zero_grad(self, *args, **kwargs)

    after_making(run_every)
    wrap(torch.nn.Module, "zero_grad", after_a_run)


def _longer(n: int, path: Sequence[str], make: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """Let a framework take n times as many steps, if it is told how many."""
    make(self, *args, **kwargs)
    owner = reduce(getattr, path[:-1], self)
    n_steps = getattr(owner, path[-1])
    if n_steps > 0:
        setattr(owner, path[-1], n_steps * n)


def split_batches(argument: str) -> None:
    """Make some samplers give an n-th of each batch, ``2:17x64,4711x8``; ``2``: all samplers."""
    n, _, numbers = argument.partition(":")

    def split(make: Any, self: Any, sampler: Any, batch_size: Any, *args: Any, **how: Any) -> None:
        if argument == n or lines_and_size(batch_size) in numbers.split(","):
            batch_size = max(batch_size // int(n), 1)
        make(self, sampler, batch_size, *args, **how)

    wrap(BatchSampler, "__init__", split)


def _run_every(optimizer: Any, n: int, loops: Loops | None) -> None:
    step, zero_grad = type(optimizer).step, type(optimizer).zero_grad
    n_calls = 0
    optimizer.is_between = False

    def every_nth(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal n_calls
        n_calls += 1
        is_left_out = n_calls % n != 0
        if loops is not None:
            loops.skipping.is_between = is_left_out
            if is_left_out:
                loops.takes_steps(sys._getframe(1))
        # A closure, in which Lightning trains, is called anyway; it may clear gradients first.
        closure = next(filter(callable, (*args, *kwargs.values())), lambda: None)
        found = closure() if is_left_out else step(self, *args, **kwargs)
        self.is_between = is_left_out
        return found

    def after_a_run(self: Any, *args: Any, **kwargs: Any) -> None:
        if not self.is_between:
            zero_grad(self, *args, **kwargs)

    optimizer.step = types.MethodType(every_nth, optimizer)
    optimizer.zero_grad = types.MethodType(after_a_run, optimizer)
