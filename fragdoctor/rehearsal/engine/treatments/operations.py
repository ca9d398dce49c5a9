"""Floating-point operations of training, and of the modules that could be recomputed.

Each operation on a GPU is counted with the formulas of ``torch.utils.flop_counter``: products of
matrices, convolutions and attention; operations without a formula count as nothing.
"""

from __future__ import annotations

import logging
import weakref
from contextlib import suppress
from dataclasses import dataclass, field
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


@dataclass
class Product:
    """A counted operation within a call of a module.

    Attributes:
        event: number of events of the GPU's memory up to it.
        n_flops: its number of operations.
        addresses: addresses of the storages that it returned.
        changes: numbers of events before each in-place write to one of these, in the same call.
    """

    event: int
    n_flops: int
    addresses: list[int]
    changes: list[int] = field(default_factory=list)


class Call:
    """A forward pass of a module in training.

    Attributes:
        device: the GPU that was the current one.
        begin, end: numbers of events of the GPU's memory before and after it.
        backward: the number when its backward pass began; None = it has not begun.
        inputs, outputs: addresses of the storages that it was given and that it returned.
        products: its counted operations.
        saves_output: whether the backward pass of its last operation needs that one's result.
    """

    def __init__(self, inputs: Any) -> None:
        self.device, self.begin = _now()
        self.end = self.begin
        self.backward: int | None = None
        self.inputs = addresses(inputs)
        self.outputs: list[int] = []
        self.products: list[Product] = []
        self.saves_output = False

    def returned(self, outputs: Any) -> None:
        """Note what the module returned."""
        _, self.end = _now()
        self.outputs = addresses(outputs)
        for value in tensors(outputs):
            if value.grad_fn is not None:
                self.saves_output |= hasattr(type(value.grad_fn), "_saved_result")
            if value.requires_grad:
                value.register_hook(self._began_backward)

    def _began_backward(self, _: Any) -> None:
        if self.backward is None:
            _, self.backward = _now()

    def described(self) -> dict[str, Any]:
        """Return the call in a form for JSON."""
        return vars(self) | {"products": [vars(one) for one in self.products]}


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
                if not in_backward():
                    self._note(n_flops, made)
            elif self._inside and op._schema.is_mutable and not in_backward():
                self._note_change(_written(op, args))
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

    def _note(self, n_flops: int, made: Any) -> None:
        if not self._inside:
            return
        product = Product(_now()[1], n_flops, addresses(made))
        for _, call in self._inside:
            call.products.append(product)

    def _note_change(self, addresses: list[int]) -> None:
        for product in self._inside[0][1].products if addresses else ():
            if not {*addresses}.isdisjoint(product.addresses):
                product.changes.append(_now()[1])

    def _enter(self, module: Any, inputs: Any) -> None:
        if torch.is_grad_enabled() and not in_backward():
            begun = [*self._begins.get(module, ()), *([module] if module in self._of else [])]
            self._inside += [(one, Call(inputs)) for one in begun]

    def _leave(self, module: Any, _: Any, outputs: Any) -> None:
        ended = [module, *reversed(self._ends.get(module, ()))] if self._inside else []
        for one in ended:
            # Pieces that began within it and did not end were not called as pieces.
            depth = next((n for n, inside in enumerate(self._inside) if inside[0] is one), None)
            if depth is not None:
                call = self._inside[depth][1]
                del self._inside[depth:]
                call.returned(outputs)
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


def _written(op: Any, args: Any) -> list[int]:
    """Return the addresses of the storages that an operation changes in place."""
    marks = [a.alias_info is not None and a.alias_info.is_write for a in op._schema.arguments]
    # Those of ``out=`` arguments are new, because PyTorch's own code creates them.
    is_out = [a.is_out for a in op._schema.arguments]
    return addresses(
        [v for v, is_so, out in zip(args, marks, is_out, strict=False) if is_so and not out]
    )


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
