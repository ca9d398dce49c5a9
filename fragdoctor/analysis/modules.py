"""Which module of the model each block is for, and the table of modules at a moment.

A note on the allocation names the module (:mod:`fragdoctor.model.marks`). If a recording has
a census, the census says which modules own the parameters, gradients and optimizer state.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from fragdoctor.model.arrays import largest_groups
from fragdoctor.model.marks import GRADIENTS, OPTIMIZER, PARAMETERS, read_module_note
from fragdoctor.model.modules import FURTHER, ITSELF, KINDS, OUTSIDE, ModuleMemory
from fragdoctor.model.phases import Category
from fragdoctor.model.snapshot import I32, U8
from fragdoctor.trace.trace import Trace

MAX_MODULES: Final = 4000
"""The most paths to list, largest first; the memory of the others is summed up."""

MAX_DEPTH: Final = 24
_HELD: Final = {
    PARAMETERS: Category.PARAMETERS,
    GRADIENTS: Category.GRADIENTS,
    OPTIMIZER: Category.OPTIMIZER_STATE,
}
_COLUMNS: Final = (
    Category.PARAMETERS,
    Category.GRADIENTS,
    Category.OPTIMIZER_STATE,
    Category.ACTIVATIONS,
    Category.TEMPORARIES,
)
"""In the order of ``KINDS``; every other category goes into the last of ``KINDS``."""

_NUMBER: Final = re.compile(r"\d{1,9}")


UNTOLD: Final = 255
"""Stands in for a category if no module says what the block holds."""


class ModulePaths(Struct, frozen=True, eq=False):
    """Which module of the model each block is for, if that was recorded.

    Attributes:
        paths: distinct paths of the modules (``GPT.layers.3.mlp``; hostile text).
        of_row: ``int32[n]``, index into ``paths`` for each row of ``Lives``; -1 without a module.
        category: ``uint8[n]``, what the module holds; ``UNTOLD`` for what it made while it ran.
    """

    paths: Sequence[str]
    of_row: I32
    category: U8

    @classmethod
    def of(cls, trace: Trace) -> ModulePaths:
        """Return the modules that the blocks of a device are for; worked out once per trace."""
        return trace.once(_find_paths)

    def told(self, category: U8) -> U8:
        """Return the categories of blocks, replaced by the modules' own where those are known."""
        result: U8 = np.where(self.category == UNTOLD, category, self.category)
        return result


def _find_paths(trace: Trace) -> ModulePaths:
    start, strings = trace.lives.start, trace.snapshot.strings
    path_of = np.full(len(strings) + 1, -1, np.int32)  # the last entry is for events without text
    held_of = np.full(len(strings) + 1, UNTOLD, np.uint8)
    paths: dict[str, int] = {}
    for at, string in enumerate(strings):
        note = read_module_note(string)
        if note is not None:
            path_of[at] = paths.setdefault(note[0], len(paths))
            held_of[at] = _HELD.get(note[1], UNTOLD)
    text = np.full(len(start), -1, np.int32)
    if paths:
        events = trace.snapshot.events
        metadata = events.user_metadata[events.device_slice(trace.device)]
        known = np.flatnonzero((start >= 0) & (start < len(metadata)))
        text[known] = metadata[start[known]]
    return ModulePaths(tuple(paths), path_of[text], held_of[text])


def module_table(
    trace: Trace, state: int, paths: ModulePaths, category: U8
) -> tuple[ModuleMemory, ...]:
    """Return the modules of a device with what they hold after ``state`` events, largest first.

    Empty if no module is recorded. ``category`` has the category of each block of ``Lives``.
    """
    if not paths.paths:
        return ()
    lives = trace.lives
    rows = lives.allocated_at(state)
    if len(category) != len(lives):
        category = np.full(len(lives), Category.UNKNOWN, np.uint8)
    kind = paths.told(category)[rows]
    column = np.full(len(Category), len(KINDS) - 1, np.int64)
    column[list(_COLUMNS)] = np.arange(len(_COLUMNS))
    place = paths.of_row[rows].astype(np.int64)
    most = largest_groups(place[place >= 0], lives.size_bytes[rows][place >= 0]).group
    further = len(paths.paths)
    place[np.isin(place, most[MAX_MODULES:])] = further
    sums = np.zeros((2, further + 2, len(KINDS)), np.int64)  # the last place is for no module
    np.add.at(sums[0], (place, column[kind]), lives.size_bytes[rows])
    np.add.at(sums[1], (place, column[kind]), lives.requested_bytes[rows])
    root = _Module("")
    for at in np.flatnonzero(sums.any(axis=(0, 2))).tolist():
        if at == further + 1:
            path: list[str] = [OUTSIDE]
        else:
            path = [FURTHER] if at == further else paths.paths[at].split(".", MAX_DEPTH)
        root.below(path).sums += sums[:, at]
    found = list(root.children.values())
    for module in found:
        module.sum_up()
    found.sort(key=lambda module: (module.name in (OUTSIDE, FURTHER), -int(module.sums[0].sum())))
    return tuple(module.as_memory(trace.device) for module in found)


class _Module:
    """A module in the making: what it holds, by block size and by request, and its children."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.n_modules = 1
        self.sums = np.zeros((2, len(KINDS)), np.int64)
        self.children: dict[str, _Module] = {}

    def below(self, path: Sequence[str]) -> _Module:
        """Return the module at a path below this one."""
        module = self
        for part in path:
            module = module.children.setdefault(part, _Module(part))
        return module

    def sum_up(self) -> None:
        """Add what the children hold, and merge the children that are equal."""
        if not self.children:
            return
        for child in self.children.values():
            child.sum_up()
        if self.sums.any():
            self.below([ITSELF]).sums += self.sums
        self.sums = sum((child.sums for child in self.children.values()), np.zeros_like(self.sums))
        self.children = _folded(self.children.values())

    @property
    def form(self) -> tuple[Any, ...]:
        """What equal layers have in common: the bytes requested by each module in them."""
        asked = tuple(self.sums[1].tolist())
        return asked, tuple((child.name, child.form) for child in self.children.values())

    def take(self, other: _Module) -> None:
        """Add an equal module to this one."""
        self.n_modules += other.n_modules
        self.sums = self.sums + other.sums
        for mine, theirs in zip(self.children.values(), other.children.values(), strict=True):
            mine.take(theirs)

    def as_memory(self, device: int) -> ModuleMemory:
        figures = dict(zip(KINDS, self.sums[0].tolist(), strict=True))
        children = [child.as_memory(device) for child in self.children.values()]
        if len(children) == 1:  # the module itself holds nothing: merge it with its only child
            (one,) = children
            return replace(one, name=f"{self.name}.{one.name}")
        return ModuleMemory(device, self.name, self.n_modules, children=children, **figures)


def _folded(modules: Iterable[_Module]) -> dict[str, _Module]:
    """Return modules ordered by name; equal modules with consecutive numbers are merged.

    The part of a block that exceeds its request is ignored, because the allocator decides it.
    """
    ordered = sorted(modules, key=_order)
    found: dict[str, _Module] = {}
    for number, run in _runs(ordered):
        merged = found[run[0].name] = run[0]
        for other in run[1:]:
            merged.take(other)
        if len(run) > 1:
            merged.name = f"{number}-{number + len(run) - 1}"
    return found


def _order(module: _Module) -> tuple[int, int, str]:
    if module.name == ITSELF:
        return 2, 0, ""
    is_number = _NUMBER.fullmatch(module.name) is not None
    return (0, int(module.name), "") if is_number else (1, 0, module.name)


def _runs(modules: Sequence[_Module]) -> Iterator[tuple[int, list[_Module]]]:
    """Yield runs of equal modules with consecutive numbers, and the first number of each run."""
    run: list[_Module] = []
    first, form = -1, ()
    for module in modules:
        number = int(module.name) if _NUMBER.fullmatch(module.name) else -1
        if run and 0 <= first == number - len(run) and form == module.form:
            run.append(module)
            continue
        if run:
            yield first, run
        run, first, form = [module], number, module.form
    if run:
        yield first, run
