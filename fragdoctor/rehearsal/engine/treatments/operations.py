"""Floating-point operations of training, and of the modules that could be computed again.

Each operation on a GPU is counted by the formulas of ``torch.utils.flop_counter``: products of
matrices, convolutions and attention; what has no formula counts nothing.
"""

from __future__ import annotations

import logging
import weakref
from contextlib import ExitStack
from typing import Any

import torch

from fragdoctor.rehearsal.engine import dispatch, put, session
from fragdoctor.rehearsal.engine.allocation import in_backward

_level = logging.root.manager.disable
logging.disable(logging.WARNING)  # of kernels of Triton, which count nothing here either
from torch.utils.flop_counter import flop_registry  # noqa: E402

logging.disable(_level)


class Costs:
    """What forward passes of a module took in training.

    Attributes:
        n_flops: of all its calls.
        saved_bytes: the most that a call left allocated.
    """

    def __init__(self) -> None:
        self.n_flops = 0
        self.saved_bytes = 0


class Operations:
    """Counts until ``undo`` is closed.

    Attributes:
        n_flops: of forward and backward passes in training.
    """

    def __init__(self, undo: ExitStack) -> None:
        self.n_flops = 0
        self._of: weakref.WeakKeyDictionary[Any, Costs] = weakref.WeakKeyDictionary()
        self._inside: list[tuple[Costs, int]] = []
        serve = dispatch.serve

        def counted(op: Any, args: Any, kwargs: Any) -> Any:
            made = serve(op, args, kwargs)
            formula = flop_registry.get(op.overloadpacket)
            if formula is not None and (torch.is_grad_enabled() or in_backward()):
                n_flops = int(formula(*args, **kwargs, out_val=made))
                self.n_flops += n_flops
                if not in_backward():
                    for costs, _ in self._inside:
                        costs.n_flops += n_flops
            return made

        put(undo, dispatch, "serve", counted)
        hooks: Any = torch.nn.modules.module
        for hook in (
            hooks.register_module_forward_pre_hook(self._enter),
            hooks.register_module_forward_hook(self._leave, always_call=True),
        ):
            undo.callback(hook.remove)

    def of(self, module: Any) -> Costs:
        """Return what a module takes; it is counted from the first time that it is asked for."""
        return self._of.setdefault(module, Costs())

    def _enter(self, module: Any, _: Any) -> None:
        costs = self._of.get(module)
        if costs is not None and torch.is_grad_enabled() and not in_backward():
            self._inside.append((costs, _allocated()))

    def _leave(self, module: Any, *_: Any) -> None:
        if self._inside and self._of.get(module) is self._inside[-1][0]:
            costs, before = self._inside.pop()
            costs.saved_bytes = max(costs.saved_bytes, _allocated() - before)


def _allocated() -> int:
    now = session.current()
    return int(now.gpus.figures(now.gpus.device())["allocated"]) if now.is_started else 0
