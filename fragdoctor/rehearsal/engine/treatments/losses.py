"""The loss over the classes of a linear head, computed in parts, some rows at a time.

Logits are rows times classes, and so is their gradient: with many classes (a vocabulary) they are
the largest tensors of a step. Checkpointed in parts, the head never holds more than one part.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import torch
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from fragdoctor.rehearsal.engine import put, wrap
from fragdoctor.rehearsal.engine.calls import at_first_call
from fragdoctor.rehearsal.engine.treatments.written import chunked_loss

_USUAL: Final = {"ignore_index": -100, "label_smoothing": 0.0, "reduction": "mean"}
"""Arguments with which ``cross_entropy`` of rows is made of its parts, and their defaults."""
_PASSING: Final = {
    "AliasBackward0", "CloneBackward0", "ReshapeAliasBackward0", "SliceBackward0",
    "SqueezeBackward1", "ToCopyBackward0", "UnsafeViewBackward0", "ViewBackward0",
}  # fmt: skip
"""Nodes between a head and its loss that do not change values."""
_CAST: Final = "ToCopyBackward0"
_ROWS_AND_CLASSES: Final = 2
_PRODUCTS: Final = {"AddmmBackward0", "LinearBackward0", "MmBackward0"}
_OF_WEIGHTS: Final = {"TBackward0", "ToCopyBackward0"}


def head_of(logits: Any, model: Any) -> tuple[str, bool] | None:
    """Return which linear layer of a model made logits: its path, and whether they were cast.

    None if no layer did, or if its result was changed.
    """
    node, is_cast = logits.grad_fn, False
    while node is not None and node.name() in _PASSING:
        is_cast |= node.name() == _CAST
        node = node.next_functions[0][0]
    if node is None or node.name() not in _PRODUCTS:
        return None
    weights = set()
    for first, _ in node.next_functions:
        operand = first
        while operand is not None and operand.name() in _OF_WEIGHTS:
            operand = operand.next_functions[0][0]
        if hasattr(operand, "variable"):
            weights.add(id(operand.variable))
    for path, module in model.named_modules():
        if type(module) is torch.nn.Linear and id(module.weight) in weights:
            return str(path), is_cast
    return None


def how_split(
    logits: Any, target: Any, weight: Any, args: Any, kwargs: Any
) -> dict[str, Any] | None:
    """Return how ``cross_entropy`` is called, if it is made of its parts; None if it is not."""
    how = {**_USUAL, **kwargs}
    is_made_of_parts = (
        weight is None
        and not args
        and how.keys() == _USUAL.keys()
        and how["reduction"] != "none"
        and logits.dim() == _ROWS_AND_CLASSES
        and target.dim() == 1
    )
    return how if is_made_of_parts else None


def in_chunks(argument: str) -> None:
    """Compute ``cross_entropy`` over a head in parts: ``16:lm_head``."""
    number, _, path = argument.partition(":")

    def postpone(model: Any) -> None:
        head: Any = dict(model.named_modules()).get(path)
        if type(head) is not torch.nn.Linear:
            return
        forward = head.forward

        def call(x: torch.Tensor) -> Any:
            if not (torch.is_grad_enabled() and head.training):
                return forward(x)
            return _Logits.later(head, x)

        put(head, "forward", call)

    at_first_call(postpone, trains=True)

    def cross_entropy(
        loss: Any,
        input: Any,  # noqa: A002 - PyTorch's name, which some callers use
        target: Any,
        weight: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if not isinstance(input, _Logits):
            return loss(input, target, weight, *args, **kwargs)
        how = how_split(input, target, weight, args, kwargs)
        if how is None:
            return loss(input.made(), target, weight, *args, **kwargs)
        reduction = how.pop("reduction")
        total = chunked_loss(input.inputs, target, input.of, int(number), **how)
        return total if reduction == "sum" else total / (target != how["ignore_index"]).sum()

    wrap(functional, "cross_entropy", cross_entropy)


class _Logits(torch.Tensor):
    """The future result of a head: a tensor without memory.

    Operations that keep the classes last (views, slices of rows, casts) are recorded. Anything else
    causes the head to be called.
    """

    head: Any
    inputs: torch.Tensor

    @classmethod
    def later(cls, head: Any, inputs: torch.Tensor, dtype: Any = None) -> _Logits:
        """Return the future result of a head for inputs, in its own dtype or another."""
        if dtype is None:
            own = inputs.dtype
            dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else own
        made: _Logits = torch.Tensor._make_wrapper_subclass(
            cls,
            (*inputs.shape[:-1], head.out_features),
            dtype=dtype,
            device=inputs.device,
            requires_grad=True,
        )
        made.head, made.inputs = head, inputs
        return made

    def of(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the logits of some inputs, as the program would have them."""
        made = functional.linear(inputs, self.head.weight, self.head.bias)
        with torch._C.DisableTorchFunctionSubclass():
            return made.to(self.dtype)

    def made(self) -> torch.Tensor:
        """Return all logits."""
        return self.of(self.inputs)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            name = getattr(func, "__name__", "")
            if name == "__get__" or name in _OF_SHAPES:
                return func(*args, **kwargs)
            this = args[0] if args and isinstance(args[0], cls) else None
            if this is not None and name in _KEEPING:
                kept = this._kept(func, args[1:], kwargs)
                if kept is not None:
                    return kept
        args, kwargs = tree_map_only(cls, cache(cls.made), (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Never called: everything goes through functions."""
        raise NotImplementedError(f"{func} of logits that were not made yet")

    def _kept(self, func: Any, args: Any, kwargs: Any) -> _Logits | None:
        """Apply an operation to the inputs instead, if it leaves the classes where they are."""
        whole = torch.empty(self.shape, dtype=self.dtype, device="meta")
        rows = torch.arange(self.shape[:-1].numel()).view(*self.shape[:-1], 1)
        try:
            after = func(whole, *args, **kwargs)
            if func.__name__ == "__getitem__":
                inputs = func(self.inputs, *args, **kwargs)
                kept = func(rows.expand(self.shape), *args, **kwargs)
                is_kept = kept.shape[-1] == self.shape[-1] and bool((kept == kept[..., :1]).all())
            else:
                inputs = self.inputs
                if after.shape != self.shape:
                    inputs = inputs.reshape(*after.shape[:-1], inputs.shape[-1])
                is_kept = after.shape[-1] == self.shape[-1]
        except (RuntimeError, TypeError, IndexError):
            return None
        if not is_kept or inputs.shape[:-1] != after.shape[:-1]:
            return None
        return _Logits.later(self.head, inputs, after.dtype)


_OF_SHAPES: Final = {"dim", "element_size", "is_floating_point", "numel", "size", "stride"}
_KEEPING: Final = {
    "__getitem__", "bfloat16", "contiguous", "flatten", "float", "half", "reshape", "to", "view",
}  # fmt: skip
