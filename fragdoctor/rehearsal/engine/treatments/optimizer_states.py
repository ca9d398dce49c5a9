"""Where and when optimizers run: as gradients come, or with their states away in between."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from inspect import signature
from typing import Any

import torch

from fragdoctor.rehearsal.engine import put


def in_backward(_: str, undo: ExitStack) -> None:
    """Update each parameter as soon as its gradient is there, and let the gradient go.

    The program's own optimizer then finds no gradients, and does nothing.
    """

    def split(optimizer: Any) -> None:
        kind = type(optimizer)
        known = signature(kind.__init__).parameters.keys() & optimizer.defaults.keys()
        own = {
            parameter: kind([parameter], **{name: group[name] for name in known})
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.requires_grad
        }

        def update(parameter: torch.Tensor) -> None:
            own[parameter].step()
            own[parameter].zero_grad()

        for parameter in own:
            undo.callback(parameter.register_post_accumulate_grad_hook(update).remove)

    _after_making(split, undo)


def on_host(_: str, undo: ExitStack) -> None:
    """Keep the states of optimizers on the host but while they run."""

    def keep(optimizer: Any) -> None:
        def move(device: str) -> None:
            for state in optimizer.state.values():
                for name, value in state.items():
                    if torch.is_tensor(value) and value.dim():
                        state[name] = value.to(device)

        optimizer.register_step_pre_hook(lambda *_: move("cuda"))
        optimizer.register_step_post_hook(lambda *_: move("cpu"))

    _after_making(keep, undo)


def _after_making(act: Callable[[Any], None], undo: ExitStack) -> None:
    """Do something with each optimizer that the program makes, and with none made meanwhile."""
    make = torch.optim.Optimizer.__init__
    is_acting = False

    @wraps(make)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal is_acting
        make(self, *args, **kwargs)
        if is_acting:
            return
        is_acting = True
        try:
            act(self)
        finally:
            is_acting = False

    put(undo, torch.optim.Optimizer, "__init__", made)
