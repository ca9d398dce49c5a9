"""Who holds a tensor: the outermost container on the way to it that no single item fills."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

from .object_names import INSIDE_MODULES, class_name, container_of, way_name
from .object_search import ObjectSearch, class_is, dict_of

_MOST_HELD_ALONE = 0.9
"""Share of a container's bytes: an item with that much is named in its place."""


class Keeper(NamedTuple):
    """Who holds storages, by the name that the program has for it.

    Attributes:
        name: ``agent.buffer``.
        kind: ``parameters``, ``gradients``, ``optimizer``, ``tensor``, ``graph`` (what the graph
            of the named tensors keeps), ``cycle``, ``container``.
        n_items: items of the container, or tensors whose graph it is; otherwise 0.
        max_items: the most items that a deque can have (``maxlen``); 0 without a limit.
        class_name: class of the module, optimizer or container.
        scope: ``train()``, the function whose local variable it begins with; "" for a global.
        place: file, line and function where that variable was alive; None for a global.
        through: how items of the container hold the storages, if through frames.
    """

    name: str
    kind: str
    n_items: int = 0
    class_name: str = ""
    scope: str = ""
    place: tuple[str, int, str] | None = None
    through: str = ""
    max_items: int = 0


class Naming:
    """Names the objects that a search has reached.

    Args:
        search: the search, which has ended.
        module: the base class of modules.
    """

    def __init__(self, search: ObjectSearch, module: type) -> None:
        self._search = search
        self._module = module
        self._bytes: list[int] = []
        self._largest: list[int] = []
        self._cuts: dict[int, int] = {}

    def owners_of(self, leaves: list[tuple[int, int, int]]) -> Iterator[tuple[Keeper, list[int]]]:
        """Yield owners of tensors, each with its storages.

        Each of ``leaves`` is a tensor's place in the search, its storage, and the storage's bytes.
        """
        below: dict[int, list[tuple[int, int, int]]] = {}
        for leaf in leaves:
            below.setdefault(self._search.parents[leaf[0]], []).append(leaf)
        self._sum_up(below)
        found: dict[int, list[Any]] = {}
        for parent, items in sorted(below.items()):
            cut = -1 if parent < 0 else self._outermost(self._search.parents[parent])
            of_parent = parent if parent >= 0 and self._is_container(parent) else -1
            for place, address, n in items:
                at = cut
                if at < 0:
                    is_most = of_parent < 0 or n >= _MOST_HELD_ALONE * self._bytes[of_parent]
                    at = place if is_most else of_parent
                found.setdefault(at, []).append((place, address, n))
        for at, members in found.items():
            largest = max(members, key=lambda m: m[2])[0]
            owner = self.owner_at(at)._replace(through=self._through(at, largest))
            yield owner, [address for _, address, _ in members]

    def _through(self, at: int, place: int) -> str:
        """Return the rest of the way from a container, if it leads through frames."""
        if at == place:
            return ""
        root, way = self._search.way(place)
        n = len(self._search.way(at)[1])
        rest = way_name(root, way)[len(way_name(root, way[:n])) :]
        return rest[rest.find(" -> ") :] if " -> " in rest else ""

    def owner_at(self, place: int) -> Keeper:
        """Return the owner, named after the object that was reached at a place."""
        root, way = self._search.way(place)
        value = self._search.objects[place]
        container = container_of(value)
        kind, n_items, of_class, most = "tensor", 0, "", 0
        if container is not None:
            kind, n_items = "container", int(container.__len__(value))  # type: ignore[attr-defined]
            of_class = class_name(type(value))
        if container is deque:
            most = deque.maxlen.__get__(value) or 0  # not an attribute of a class of the program
        name = way_name(root, way)
        return Keeper(name, kind, n_items, of_class, root.scope, root.place, max_items=most)

    def direct_container(self, place: int) -> int:
        """Return the place of the container that holds a tensor directly, else its own place."""
        above = self._search.parents[place]
        return above if above >= 0 and self._is_container(above) else place

    def _sum_up(self, below: dict[int, list[tuple[int, int, int]]]) -> None:
        """Note the bytes that each object leads to; an object comes after the one it came from."""
        parents = self._search.parents
        self._bytes = [0] * len(parents)
        self._largest = [0] * len(parents)
        counted: set[int] = set()
        for parent, items in below.items():
            for _, address, n in items:
                if parent >= 0 and address not in counted:
                    counted.add(address)
                    self._bytes[parent] += n
        for at in range(len(parents) - 1, -1, -1):
            above = parents[at]
            if self._bytes[at] and above >= 0:
                self._bytes[above] += self._bytes[at]
                self._largest[above] = max(self._largest[above], self._bytes[at])

    def _outermost(self, at: int) -> int:
        """Return the first container on a way that no single item nearly fills, or -1 for none."""
        way = []
        while at >= 0 and at not in self._cuts:
            way.append(at)
            at = self._search.parents[at]
        cut = self._cuts[at] if at >= 0 else -1
        for one in reversed(way):
            if cut < 0 and self._largest[one] < _MOST_HELD_ALONE * self._bytes[one]:
                cut = one if self._is_container(one) else -1
            self._cuts[one] = cut
        return cut

    def _is_container(self, at: int) -> bool:
        """Return whether it is a container that the program itself made.

        The attributes of an instance are a dict, the cells of a function are a tuple, and a module
        keeps its parts in dicts; none of these count.
        """
        objects, parents = self._search.objects, self._search.parents
        value, above = objects[at], parents[at]
        if container_of(value) is None:
            return False
        holder = objects[above] if above >= 0 else None
        if dict_of(holder) is value or type(holder) is types.FunctionType:
            return False
        keeper = objects[parents[above]] if above >= 0 and parents[above] >= 0 else None
        for module in (holder, keeper):
            if class_is(type(module), self._module):
                names = dict_of(module) or {}
                return not any(names.get(n) is value for n in INSIDE_MODULES)
        return True
