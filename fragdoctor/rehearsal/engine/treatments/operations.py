"""Floating-point operations of training, and of the modules that could be recomputed.

Each operation on a GPU is counted with the formulas of ``torch.utils.flop_counter``: products of
matrices, convolutions and attention; operations without a formula count as nothing.
"""

from __future__ import annotations

import logging
import weakref
from contextlib import suppress
from typing import Any, Final

import torch
from torch.utils._pytree import SUPPORTED_NODES, tree_leaves

from fragdoctor.rehearsal.engine import dispatch, session, wrap
from fragdoctor.rehearsal.engine.marks import in_backward
from fragdoctor.rehearsal.engine.module_notes import places

_level = logging.root.manager.disable
logging.disable(logging.WARNING)  # about Triton kernels, which are not counted here either
from torch.utils.flop_counter import flop_registry  # noqa: E402

logging.disable(_level)
COUNTED: Final[dict[Any, Any]] = flop_registry
"""Operation -> formula for its cost."""


Call = dict[str, Any]
"""A forward pass of a module in training, as ``prescription/module_calls.py`` reads it.

``device``: the GPU that was the current one.
``begin``, ``end``: numbers of events of the GPU's memory before and after it.
``backward``: the number when its backward pass began; None = it has not begun.
``inputs``, ``outputs``: addresses of the storages that it was given and that it returned.
``saves_output``: whether the backward pass of its last operation needs that one's result.
``products``: its counted operations, each with the number of events up to it (``event``), its
number of operations (``n_flops``), the addresses that it returned, and in ``changes`` the numbers
of events before each in-place write to one of these, in the same call.
"""


def _begun(inputs: Any) -> Call:
    device, begin = _now()
    return {
        "device": device, "begin": begin, "end": begin, "backward": None,
        "inputs": addresses(inputs), "outputs": [], "products": [], "saves_output": False,
    }  # fmt: skip


def _note_result(call: Call, outputs: Any) -> None:
    """Note what a module returned, and when its backward pass begins."""

    def began_backward(_: Any) -> None:
        if call["backward"] is None:
            call["backward"] = _now()[1]

    call |= {"end": _now()[1], "outputs": addresses(outputs)}
    for value in tensors(outputs):
        if value.grad_fn is not None:
            call["saves_output"] |= hasattr(type(value.grad_fn), "_saved_result")
        if value.requires_grad:
            value.register_hook(began_backward)


class Operations:
    """Counts.

    Attributes:
        n_flops: number of operations of forward and backward passes in training.
    """

    def __init__(self) -> None:
        self.n_flops = 0
        self._of: weakref.WeakKeyDictionary[Any, list[Call]] = weakref.WeakKeyDictionary()
        self._inside: list[tuple[Any, Call]] = []
        self._begins: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()
        self._ends: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()

        def counted(serve: Any, op: Any, args: Any, kwargs: Any) -> Any:
            formula = COUNTED.get(op.overloadpacket)
            made = serve(op, args, kwargs)
            if formula is not None and (torch.is_grad_enabled() or in_backward()):
                n_flops = _n_flops(formula, args, kwargs, made)
                self.n_flops += n_flops
                if self._inside and not in_backward():
                    where = addresses(made)
                    product = {
                        "event": _now()[1], "n_flops": n_flops, "addresses": where, "changes": []
                    }  # fmt: skip
                    for _, call in self._inside:
                        call["products"].append(product)
            elif self._inside and op._schema.is_mutable and not in_backward():
                self._note_change(op, args)
            return made

        wrap(dispatch, "serve", counted)
        hooks: Any = torch.nn.modules.module
        hooks.register_module_forward_pre_hook(self._enter)
        hooks.register_module_forward_hook(self._leave, always_call=True)

    def of(self, module: Any) -> list[Call]:
        """Return a module's forward passes in training, recorded from the first request on."""
        return self._of.setdefault(module, [])

    def note_piece(self, piece: Any, first: Any, last: Any) -> None:
        """Record calls of layers from a first to a last one; a piece precedes those in it."""
        self._begins.setdefault(first, []).append(piece)
        self._ends.setdefault(last, []).append(piece)
        self.of(piece)

    def _note_change(self, op: Any, args: Any) -> None:
        """Note which results an operation changes in place."""
        declared = zip(args, op._schema.arguments, strict=False)
        # Those of ``out=`` arguments are new, because PyTorch's own code creates them.
        changed = [
            value
            for value, a in declared
            if a.alias_info is not None and a.alias_info.is_write and not a.is_out
        ]
        written = {*addresses(changed)}
        for product in self._inside[0][1]["products"]:
            if not written.isdisjoint(product["addresses"]):
                product["changes"].append(_now()[1])

    def _enter(self, module: Any, inputs: Any) -> None:
        if torch.is_grad_enabled() and not in_backward():
            begun = [*self._begins.get(module, ()), *([module] if module in self._of else [])]
            self._inside += [(one, _begun(inputs)) for one in begun]

    def _leave(self, module: Any, _: Any, outputs: Any) -> None:
        ended = [module, *reversed(self._ends.get(module, ()))] if self._inside else []
        for one in ended:
            # Pieces that began within it and did not end were not called as pieces.
            depth = next((n for n, inside in enumerate(self._inside) if inside[0] is one), None)
            if depth is not None:
                call = self._inside[depth][1]
                del self._inside[depth:]
                _note_result(call, outputs)
                self._of[one].append(call)


def _n_flops(formula: Any, args: Any, kwargs: Any, made: Any) -> int:
    """Return an operation's cost, or 0 if PyTorch's formula takes different arguments.

    The formula of ``_slow_conv2d_forward`` does (PyTorch 2.12 and 2.13). Those of attention refuse
    queries that share keys and values, which cost as much as if each head had its own.
    """
    for given in (args, _with_all_heads(args)):
        with suppress(AssertionError, TypeError):
            return int(formula(*given, **kwargs, out_val=made))
    return 0


def _with_all_heads(args: Any) -> list[Any]:
    """Return arguments with the shapes of queries, keys and values for the same number of heads."""
    shapes = [list(a.shape) if torch.is_tensor(a) and a.dim() == 4 else None for a in args]
    n_heads = max((shape[1] for shape in shapes if shape), default=0)
    return [
        torch.Size([shape[0], n_heads, *shape[2:]]) if shape else arg
        for arg, shape in zip(args, shapes, strict=True)
    ]


def _now() -> tuple[int, int]:
    """Return the current GPU, and the number of events of its memory."""
    now = session.current()
    if not now.is_started:
        return 0, 0
    device = int(now.gpus.device())
    return device, int(now.gpus.figures(device)["events"])


def tensors(values: Any) -> list[torch.Tensor]:
    """Return the plain tensors on GPUs in some values; others may be created when looked at."""
    found: list[torch.Tensor] = []
    _gather(values, found)
    return found


_PLAIN: Final = frozenset({torch.Tensor, torch.nn.Parameter})


def _gather(values: Any, found: list[torch.Tensor]) -> None:
    kind = type(values)
    if kind is tuple or kind is list:
        for value in values:
            _gather(value, found)
    elif kind in _PLAIN:
        if values.is_cuda:
            found.append(values)
    elif kind in SUPPORTED_NODES or isinstance(values, tuple):
        found += [v for v in tree_leaves(values) if type(v) in _PLAIN and v.is_cuda]


def addresses(values: Any) -> list[int]:
    """Return the addresses of the storages of tensors on GPUs."""
    return [address for value in tensors(values) for _, address in places(value)]
