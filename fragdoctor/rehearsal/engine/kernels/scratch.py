"""The table of memory that operations request besides their results, and in which order.

A rule records the steps of an operation: scratch memory, results, frees. Without a rule an
operation creates its results in order and nothing else. Scratch memory that no step frees is freed
at the end, the last first, as C++ destroys local variables. Each rule names the file of PyTorch (in
``aten/src/ATen/native/cuda`` unless stated otherwise) that requests the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import torch

TAKE, FREE, MAKE, USE_BLAS = range(4)
Step = tuple[int, int, int]
"""One of these actions, with the number of the scratch memory or result, and a size in bytes."""


class Call:
    """One call of an operation, whose steps a rule records.

    Attributes:
        op: the operation.
        args, kwargs: its arguments; tensors have no values.
        outs: the tensors that it creates.
        steps: what it does with memory.
    """

    def __init__(
        self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[Any, ...]
    ) -> None:
        self.op, self.args, self.kwargs, self.outs = op, args, kwargs, outs
        self.steps: list[Step] = []
        self._n_taken = 0
        self._held: list[int] = []

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

    # ---- steps ----------------------------------------------------------------------------------

    def make(self, *results: int) -> None:
        """Create results, by number."""
        self.steps += [(MAKE, number, 0) for number in results]

    def make_all(self) -> None:
        """Create the results in order."""
        self.make(*range(len(self.outs)))

    def take(self, *sizes: int) -> list[int]:
        """Take scratch memory; return the numbers with which to free it early."""
        numbers = list(range(self._n_taken, self._n_taken + len(sizes)))
        self._n_taken += len(sizes)
        self._held += numbers
        self.steps += [(TAKE, *one) for one in zip(numbers, sizes, strict=True)]
        return numbers

    def free(self, *numbers: int) -> None:
        """Free scratch memory."""
        for number in numbers:
            self._held.remove(number)
            self.steps.append((FREE, number, 0))

    def hold(self, *sizes: int) -> None:
        """Take scratch memory and free it again before the next step, the last first."""
        self.free(*reversed(self.take(*sizes)))

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Free what is taken inside at the end of it, as a C++ function does, the last first."""
        first = self._n_taken
        yield
        self.free(*[number for number in reversed(self._held) if number >= first])

    def copy(self, *tensors: object) -> list[int]:
        """Take the copies that a kernel makes of tensors that are not contiguous."""
        return self.take(
            *(
                n_bytes(tensor)
                for tensor in tensors
                if isinstance(tensor, torch.Tensor)
                and not tensor.is_contiguous()
                and tensor.numel()
            )
        )

    def use_blas(self, *, is_lt: bool = False) -> None:
        """Use the handle of cuBLAS, whose first use takes a workspace.

        ``is_lt``: it goes through cuBLASLt, which also adds a bias.
        """
        self.steps.append((USE_BLAS, int(is_lt), 0))


Rule = Callable[[Call], object]
_F = TypeVar("_F")
RULES: Final[dict[str, Rule]] = {}
"""Rules of the operations that request more than their results."""


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for operations, by their names without overload."""
    return registered(RULES, names)


def after_results(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for what follows the results, which are created first."""

    def register(function: Rule) -> Rule:
        def record(call: Call) -> None:
            call.make_all()
            function(call)

        rule(*names)(record)
        return function

    return register


def registered(table: dict[str, _F], names: Iterable[str]) -> Callable[[_F], _F]:
    """Return the decorator that puts a function into a table under these names."""

    def register(function: _F) -> _F:
        table.update(dict.fromkeys(names, function))
        return function

    return register


def steps_of(call: Call) -> list[Step]:
    """Return the steps of a call."""
    RULES.get(call.op.overloadpacket.__name__, Call.make_all)(call)
    return call.steps


def in_order(*names: str, order: tuple[int, ...]) -> None:
    """Give operations an order of results other than the declared one."""
    rule(*names)(lambda call: call.make(*(i for i in order if i < len(call.outs))))


def n_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


def copied_after(
    *names: str,
    places: Sequence[int] = (0,),
    copy: Callable[..., object] = Call.copy,
) -> None:
    """Give operations copies of some of their arguments, after their results are created."""
    after_results(*names)(lambda call: copy(call, *(call.args[i] for i in places)))


def copied_before(*names: str, copy: Callable[..., object] = Call.copy) -> None:
    """Give operations a copy of the first argument, before their results are created."""

    def record(call: Call) -> None:
        copy(call, call.args[0])
        call.make_all()

    rule(*names)(record)
