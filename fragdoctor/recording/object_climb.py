"""Climbs from an object to what holds it: a reference cycle, or a name in a library's module."""

from __future__ import annotations

import gc
import time
import types
from collections.abc import Iterator
from typing import Any

from .object_names import class_name, container_of
from .object_search import class_is, module_dicts

_MAX_LEVELS = 8
_MAX_PARENTS = 8
_MAX_BELOW = 200
_LEADING_EVERYWHERE = (type, types.ModuleType, types.FunctionType)


Holder = tuple[str, tuple[type, ...]]
"""The name of what holds an object, and the classes of the instances of a cycle, if it is one."""


class Climb:
    """Asks the collector who refers to an object, and so on upward, until the answer is a name.

    Args:
        hidden: IDs of objects that the census itself made.
        placed: IDs of objects that names lead to.
        deadline: time by ``time.thread_time`` at which the climb ends.
        listing_s: how long it takes to list all objects; asking who refers to one takes about twice
            as long.

    Attributes:
        is_complete: whether the climb ended before the deadline.
    """

    def __init__(
        self, hidden: set[int], placed: dict[int, int], deadline: float, listing_s: float
    ) -> None:
        self._every = gc.get_objects()
        # Objects made from here on do not belong to the program.
        self._known = {id(o) for o in self._every} - hidden
        self._placed = placed
        self._deadline = deadline
        self._listing_s = listing_s
        self._modules = module_dicts()
        self.is_complete = True

    def holder(self, value: Any) -> Holder | None:
        """Return what holds an object, or None if nothing is found: C++ has it, or time is up."""
        above: dict[int, list[Any]] = {}
        tried = {id(value): value}
        level = [value]
        for _ in range(_MAX_LEVELS):
            if not level:
                return None
            if time.thread_time() + 2 * len(level) * self._listing_s > self._deadline:
                self.is_complete = False
                return None
            parents = []
            for parent, held in self._referrers(level):
                if id(parent) in self._modules:
                    pairs = list(parent.items())
                    keys = (k for k, v in pairs if v is held[0] and type(k) is str)
                    return f"{self._modules[id(parent)]}.{next(keys, '...')}", ()
                for child in held:
                    above.setdefault(id(child), []).append(parent)
                if id(parent) not in tried:
                    tried[id(parent)] = parent
                    parents.append(parent)
            cycle = _cycle_above(value, above)
            if cycle:  # the classes of its instances, each holding the next
                instances = [c for c in cycle[::-1] if container_of(c) is None] or cycle[:1]
                classes = tuple({id(type(c)): type(c) for c in instances}.values())
                names = [class_name(c) for c in classes]
                return " -> ".join([*names, names[0]]), classes
            level = parents[:_MAX_PARENTS]
        return None

    def _referrers(self, level: list[Any]) -> Iterator[tuple[Any, list[Any]]]:
        """Yield the objects that refer to any of a level, each with those that it refers to."""
        for parent in gc.get_referrers(*level):
            # Only objects that existed before: not the lists and frames of the census itself.
            if id(parent) in self._known:
                below = {id(c) for c in gc.get_referents(parent)}
                if type(parent) is not types.FrameType:
                    yield parent, [c for c in level if id(c) in below]

    def below(self, classes: tuple[type, ...], wanted: dict[int, int]) -> list[int]:
        """Return the IDs of wanted objects that other instances of some classes lead to."""
        found: list[int] = []
        if not classes:
            return found
        kinds = {id(c) for c in classes}
        for one in self._every:
            if id(type(one)) not in kinds or id(one) in self._placed:
                continue
            if time.thread_time() > self._deadline:
                self.is_complete = False
                break
            todo, seen = [one], {id(one)}
            while todo and len(seen) < _MAX_BELOW:
                for child in gc.get_referents(todo.pop()):
                    if id(child) not in seen and id(child) in self._known:
                        seen.add(id(child))
                        if id(child) in wanted:
                            found.append(id(child))
                        elif not any(class_is(type(child), c) for c in _LEADING_EVERYWHERE):
                            todo.append(child)
        return found

    def forget(self) -> None:
        """Let go of all objects, even if somebody holds this one."""
        self._every.clear()


def _cycle_above(value: Any, above: dict[int, list[Any]]) -> list[Any]:
    """Return the objects of a cycle that holds an object, or [] if there is none."""
    way: list[Any] = [value]
    tried = {id(value)}
    while way:
        for parent in above.get(id(way[-1]), ()):
            at = next((i for i, w in enumerate(way) if w is parent), None)
            if at is not None:
                return way[at:]
            if id(parent) not in tried:
                tried.add(id(parent))
                way.append(parent)
                break
        else:
            way.pop()
    return []
