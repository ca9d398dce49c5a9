"""Where in the model a GPU's memory is: a tree of modules with what each module holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from msgspec import Struct

if TYPE_CHECKING:
    import pandas as pd

OUTSIDE: Final = "(outside of modules)"
"""Memory that no module requested and no module holds: batches, losses, library workspaces."""

ITSELF: Final = "(itself)"
"""What a module holds besides the modules inside it."""

FURTHER: Final = "(further modules)"

KINDS: Final = (
    "parameters_bytes",
    "gradients_bytes",
    "optimizer_state_bytes",
    "activations_bytes",
    "temporaries_bytes",
    "other_bytes",
)
"""The columns of the table; every byte is in exactly one column."""


class ModuleMemory(Struct, frozen=True):
    """What a module and its children held at the peak of allocated bytes, by block sizes.

    In every column, a module with children holds the sum of its ``children``. The outermost modules
    of a GPU add up to all allocated memory.

    Attributes:
        device: the GPU.
        name: the last part of its path; ``0-23`` for this many merged modules. Hostile text.
        n_modules: number of merged modules.
        parameters_bytes: its parameters and buffers.
        gradients_bytes: gradients of its parameters.
        optimizer_state_bytes: what the optimizer keeps for its parameters.
        activations_bytes: results of its forward pass that wait for the backward pass.
        temporaries_bytes: temporaries of the pass that was running.
        other_bytes: inputs, memory that outlives its step, and memory of unknown use.
        children: the modules inside, in the order of their names.
    """

    device: int
    name: str
    n_modules: int
    parameters_bytes: int
    gradients_bytes: int
    optimizer_state_bytes: int
    activations_bytes: int
    temporaries_bytes: int
    other_bytes: int
    children: Sequence[ModuleMemory] = ()

    @property
    def total_bytes(self) -> int:
        """All bytes that the module held."""
        return sum(getattr(self, kind) for kind in KINDS)


ModuleRow = tuple[tuple[str, ...], ModuleMemory]
"""A line of the tree: the names from the outermost module on, and what the last module held."""


def rows_of(modules: Sequence[ModuleMemory], above: tuple[str, ...] = ()) -> Iterator[ModuleRow]:
    """Yield the tree line by line, each module before its children."""
    for module in modules:
        path = (*above, module.name)
        yield path, module
        yield from rows_of(module.children, path)


def modules_frame(modules: Sequence[ModuleMemory]) -> pd.DataFrame:
    """Return the tree as a DataFrame, each module before its children.

    Columns: ``device``, ``module`` (its whole path), ``depth`` (0 for the outermost), ``is_leaf``
    (no module is inside it; such rows add up to the peak), ``n_modules``, one column for each of
    ``KINDS``, ``total_bytes``.
    """
    from fragdoctor.model.frames import table  # noqa: PLC0415 - loads pandas

    numbers = ("device", "depth", "n_modules", *KINDS, "total_bytes")
    columns = ("device", "module", "depth", "is_leaf", "n_modules", *KINDS, "total_bytes")
    rows = (
        (m.device, ".".join(path), len(path) - 1, not m.children, m.n_modules,
         *(getattr(m, kind) for kind in KINDS), m.total_bytes)
        for path, m in rows_of(modules)
    )  # fmt: skip
    return table(rows, columns, numbers).astype({"is_leaf": "bool"})
