"""The names by which a program held its memory, as a census found them; all text is hostile."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import numpy as np
from msgspec import Struct, field

from fragdoctor.model.arrays import sum_by
from fragdoctor.model.finding import Location
from fragdoctor.model.snapshot import I32, I64, U64


class HoldingKind(StrEnum):
    """How a name holds memory. The strings are a contract (JSON ``owners[].kind``)."""

    PARAMETERS = "parameters"
    """Parameters and buffers of a module."""
    GRADIENTS = "gradients"
    """Gradients of a module's parameters."""
    OPTIMIZER = "optimizer"
    """The state of an optimizer."""
    TENSOR = "tensor"
    """A tensor that a variable or an attribute holds."""
    CONTAINER = "container"
    """A list, dict, tuple, set or deque of tensors, or of objects that hold tensors."""
    GRAPH = "graph"
    """The autograd graph of the named tensors, which keeps memory for the backward pass."""
    CYCLE = "cycle"
    """A reference cycle of the named classes, which only Python's garbage collector frees."""
    UNNAMED = "unnamed"
    """No name in the program was found for the memory."""


class Owner(Struct, frozen=True):
    """Who holds storages, by its name in the program.

    Attributes:
        name: such as ``agent.buffer``; "" if no path to it was found in time.
        kind: how the owner holds them.
        n_items: number of items of a container, or of tensors of a graph; otherwise 0.
        class_name: class of the module, the optimizer or the container, or "".
        scope: ``train()``, the function whose local variable the name begins with; "" for a global.
        place: the line that the function had reached, None for a global.
        through: how items of the container hold the memory if that is not obvious, such as the
            frames of tracebacks.
        max_items: the most items that the container can have; 0 if nothing bounds it.
    """

    name: str
    kind: HoldingKind
    n_items: int = 0
    class_name: str = ""
    scope: str = ""
    place: Location | None = None
    through: str = ""
    max_items: int = 0


class Census(Struct, frozen=True, eq=False):
    """One census.

    Attributes:
        time_us: when it was taken, on the clock of the snapshot's events.
        step: how often optimizers had run before it; 0 means never, or not counted.
        is_complete: whether the census looked at everything before its time ran out.
        owners: everything that holds memory.
        device, address, size_bytes: ``int32[n]``, ``uint64[n]`` and ``int64[n]``, one per storage.
        holder: ``int32[n]``, index into ``owners`` for each storage; -1 if no name was found.
        paths: paths of modules; empty, like ``part``, if allocations are not noted with modules.
        part: ``int32[n]``, index into ``paths`` of the module whose parameter, gradient or
            optimizer state each storage is; -1 without a module.
    """

    time_us: int
    step: int
    is_complete: bool
    owners: Sequence[Owner]
    device: I32
    address: U64
    size_bytes: I64
    holder: I32
    paths: Sequence[str] = ()
    part: I32 = field(default_factory=lambda: np.zeros(0, np.int32))

    @property
    def bytes_by_owner(self) -> Sequence[int]:
        """The bytes of each owner."""
        known = self.holder >= 0
        sums = sum_by(self.holder[known], self.size_bytes[known], len(self.owners))
        found: list[int] = sums.tolist()
        return found
