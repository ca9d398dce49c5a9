"""The names under which a program held its memory, as a census found them; all text is hostile."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import numpy as np
from msgspec import Struct, field

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
    """A tensor, by a variable or an attribute."""
    CONTAINER = "container"
    """A list, dict, tuple, set or deque of tensors, or of what holds them."""
    GRAPH = "graph"
    """The autograd graph of the tensors named, which keeps it for the backward pass."""
    CYCLE = "cycle"
    """A reference cycle of the classes named, which only Python's collector frees."""
    UNNAMED = "unnamed"
    """No name of the program was found for it."""


class Owner(Struct, frozen=True):
    """Who holds storages, by the name that the program has for it.

    Attributes:
        name: ``agent.buffer``; "" where the way to it was not found in time.
        kind: how it holds them.
        n_items: items of the container; tensors whose graph it is; else 0.
        class_name: class of the module, the optimizer or the container, "".
        scope: ``train()``, the function whose local the name begins with; "" for a global.
        place: where that function was, None for a global.
        through: how items of the container hold it, where that is not plain: the frames of
            tracebacks.
    """

    name: str
    kind: HoldingKind
    n_items: int = 0
    class_name: str = ""
    scope: str = ""
    place: Location | None = None
    through: str = ""


class Census(Struct, frozen=True, eq=False):
    """One census.

    Attributes:
        time_us: when, as the events of the snapshot count time.
        step: runs of optimizers before it; 0 = none, or not counted.
        is_complete: whether everything was looked at in its time.
        owners: who holds anything.
        device, holder: ``int32[n]``; address: ``uint64[n]``; size_bytes: ``int64[n]``; of each
            storage. ``holder`` is a place in ``owners``, -1 where no name was found.
        paths: of modules; part: ``int32[n]``, of each storage the place of the module whose
            parameter, gradient or optimizer state it is, -1 without one; both empty where
            allocations are not noted with modules.
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
        sums = np.zeros(len(self.owners), np.int64)
        np.add.at(sums, self.holder[known], self.size_bytes[known])
        found: list[int] = sums.tolist()
        return found
