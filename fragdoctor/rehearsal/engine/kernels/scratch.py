"""The table of memory that operations request besides their results, and in which order.

A rule returns the steps of an operation: scratch memory, results, frees. Without a rule an
operation creates its results in order and nothing else. Scratch memory that no step frees is freed
at the end, the last first, as C++ destroys local variables. Each rule names the file of PyTorch (in
``aten/src/ATen/native/cuda`` unless stated otherwise) that requests the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, TypeVar

import torch


@dataclass(frozen=True, slots=True, eq=False)
class Temp:
    """Take scratch memory."""

    n_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Free:
    """Free scratch memory that was taken before."""

    temp: Temp


@dataclass(frozen=True, slots=True)
class Out:
    """Create the n-th result."""

    number: int


@dataclass(frozen=True, slots=True)
class UseBlas:
    """Use the handle of cuBLAS; its first use takes a workspace.

    Attributes:
        is_lt: whether it goes through cuBLASLt, which also adds a bias.
    """

    is_lt: bool = False


Step = Temp | Free | Out | UseBlas


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an operation.

    Attributes:
        op: the operation.
        args, kwargs: its arguments; tensors have no values.
        outs: the tensors that it creates.
        device: the GPU.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: tuple[Any, ...]
    device: int

    def argument(self, name: str) -> Any:
        """Return an argument, or its default; None if the operation has none with this name."""
        for place, declared in enumerate(self.op._schema.arguments):
            if declared.name == name:
                given = self.kwargs.get(name, declared.default_value)
                return self.args[place] if place < len(self.args) else given
        return None

    @property
    def out_dtype(self) -> torch.dtype:
        """The dtype of the first result, or of the tensor that is written to."""
        if self.outs:
            return self.outs[0].dtype  # type: ignore[no-any-return]
        written = self.kwargs.get("out", self.args[0])
        return written.dtype  # type: ignore[no-any-return]

    @property
    def results(self) -> list[Step]:
        """The steps that create the results, in order."""
        return [Out(i) for i in range(len(self.outs))]


Rule = Callable[[Call], Iterable[Step]]
_F = TypeVar("_F")
RULES: Final[dict[str, Rule]] = {}
"""Rules of the operations that request more than their results."""


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for operations, by their names without overload."""
    return registered(RULES, names)


def after_results(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for what follows the results, which are created first."""

    def register(function: Rule) -> Rule:
        def steps(call: Call) -> Iterable[Step]:
            yield from call.results
            yield from function(call)

        rule(*names)(steps)
        return function

    return register


def registered(table: dict[str, _F], names: Iterable[str]) -> Callable[[_F], _F]:
    """Return the decorator that puts a function into a table under these names."""

    def register(function: _F) -> _F:
        table.update(dict.fromkeys(names, function))
        return function

    return register


def steps_of(call: Call) -> Sequence[Step]:
    """Return the steps of a call."""
    found = RULES.get(call.op.overloadpacket.__name__)
    return tuple(call.results if found is None else found(call))


def in_order(*names: str, order: tuple[int, ...]) -> None:
    """Give operations an order of results other than the declared one."""

    def ordered(call: Call) -> list[Step]:
        return [Out(i) for i in order if i < len(call.outs)]

    rule(*names)(ordered)


def returned_from(steps: Iterable[Step]) -> list[Step]:
    """Return the steps of a C++ function, and frees at its end for what it did not free itself."""
    done = list(steps)
    freed = {id(step.temp) for step in done if isinstance(step, Free)}
    left = [step for step in done if isinstance(step, Temp) and id(step) not in freed]
    return [*done, *(Free(temp) for temp in reversed(left))]


def held_only(*sizes: int) -> list[Step]:
    """Return scratch memory that is freed again before the next step, the last first."""
    return returned_from(map(Temp, sizes))


def n_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


def copied_unless_dense(tensor: object) -> list[Temp]:
    """Return the copy that a kernel makes of a tensor that is not contiguous."""
    if isinstance(tensor, torch.Tensor) and not tensor.is_contiguous() and tensor.numel():
        return [Temp(n_bytes(tensor))]
    return []


def copied_after(
    *names: str,
    places: Sequence[int] = (0,),
    copies: Callable[[Any], list[Temp]] = copied_unless_dense,
) -> None:
    """Give operations copies of some of their arguments, after their results are created."""
    after_results(*names)(lambda call: chain.from_iterable(copies(call.args[i]) for i in places))


def copied_before(*names: str, copies: Callable[[Any], list[Temp]] = copied_unless_dense) -> None:
    """Give operations a copy of the first argument, before their results are created."""
    rule(*names)(lambda call: [*copies(call.args[0]), *call.results])
