"""Where in the model the memory of a GPU is: a tree of modules, with what each of them holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from msgspec import Struct

if TYPE_CHECKING:
    import pandas as pd

OUTSIDE: Final = "(outside of modules)"
"""What no module asked for and no module holds: batches, losses, workspaces of libraries."""

ITSELF: Final = "(itself)"
"""What a module holds beside the modules inside it."""

FURTHER: Final = "(further modules)"

KINDS: Final = (
    "parameters_bytes",
    "gradients_bytes",
    "optimizer_state_bytes",
    "activations_bytes",
    "temporaries_bytes",
    "other_bytes",
)
"""The columns of the table; every byte is in one of them."""


class ModuleMemory(Struct, frozen=True):
    """What a module held at the peak of allocated bytes, by block sizes, with all that is in it.

    A module with others inside holds what its ``children`` hold together, in every column; the
    outermost of a GPU hold together what was allocated.

    Attributes:
        device: the GPU.
        name: the last part of its path; ``0-23`` where this many equal ones are taken together.
            Hostile text.
        n_modules: how many they are.
        parameters_bytes: its parameters and buffers; gradients_bytes: their gradients;
            optimizer_state_bytes: what the optimizer keeps for them.
        activations_bytes: results of its forward pass that wait for the backward pass.
        temporaries_bytes: what the pass at work needed for itself.
        other_bytes: inputs, what outlives its step, and what cannot be told.
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
        """All of it."""
        return sum(getattr(self, kind) for kind in KINDS)


ModuleRow = tuple[tuple[str, ...], ModuleMemory]
"""A line of the tree: the names from the outermost module on, and what the last of them held."""


def rows_of(modules: Sequence[ModuleMemory], above: tuple[str, ...] = ()) -> Iterator[ModuleRow]:
    """Yield the tree line by line, each module before those inside it."""
    for module in modules:
        path = (*above, module.name)
        yield path, module
        yield from rows_of(module.children, path)


def modules_frame(modules: Sequence[ModuleMemory]) -> pd.DataFrame:
    """Return the tree as a DataFrame, each module before those inside it.

    Columns: ``device``, ``module`` (its whole path), ``depth`` (0 for the outermost), ``is_leaf``
    (no module is inside it: such rows add up to the peak), ``n_modules``, one for each of
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
