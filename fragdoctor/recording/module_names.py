"""Names of a program's modules: ``GPT.layers.3.mlp``, beginning with the class of the model.

The recorder notes these names with allocations, and a rehearsal with the requests that it serves.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile
from typing import Any
from weakref import ref

_LONGEST = 300
_MOST_ABOVE = 100
"""The most modules above a module to follow, so that a ring of them ends."""

# Wrappers that repeat their name in the path of every module inside.
_WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


class ByIdentity:
    """Values attached to modules or other objects, as long as these live.

    An object's own ``==`` and hash are not used: with ``==``, a torchmetrics metric creates another
    metric, and its hash changes with its state.
    """

    def __init__(self) -> None:
        self._found: dict[int, tuple[Any, Any]] = {}

    def get(self, item: Any, default: Any = None) -> Any:
        """Return the value of an item."""
        return self._found.get(id(item), (None, default))[1]

    def __setitem__(self, item: Any, value: Any) -> None:
        found, key = self._found, id(item)
        found[key] = ref(item, lambda _: found.pop(key, None)), value

    def __iter__(self) -> Iterator[Any]:
        alive = [item() for item, _ in list(self._found.values())]
        return (item for item in alive if item is not None)


class ModuleNames:
    """Knows which modules contain which, and names models by their classes."""

    def __init__(self) -> None:
        self._models = ByIdentity()
        self._above = ByIdentity()

    def put_together(self, above: Any, module: Any) -> None:
        """Note that a module was registered as part of another one."""
        self._above[module] = ref(above)

    def outermost(self, module: Any) -> Any:
        """Return the model that a module is part of, as far as assembly was observed."""
        for _ in range(_MOST_ABOVE):
            above = self._above.get(module)
            holder = None if above is None else above()
            if holder is None or all(m is not module for m in holder._modules.values()):
                break
            module = holder
        return module

    def name_of(self, model: Any) -> str:
        """Return the class of a model; if several are alive, all but the first get a number."""
        found: str | None = self._models.get(model)
        if found is None:
            inner = model
            while len(parts := [*inner._modules.items()]) == 1 and parts[0][0] in _WRAPPERS:
                inner = parts[0][1]  # a scripted module's parts are no dictionary
            name, number = str(type(inner).__name__)[:_LONGEST], 1
            taken = {self._models.get(other) for other in self._models}
            found = self._models.get(inner, name)
            while found in taken and self._models.get(inner) is None:
                number += 1
                found = f"{name}#{number}"
            self._models[model] = self._models[inner] = found
        return found


def path_below(path: str, names: list[str]) -> str:
    """Return the path of the object with these names below a module; wrappers add nothing."""
    kept = [name for name in names if name and name not in _WRAPPERS]
    return ".".join([path, *kept])[:_LONGEST]


def common_path(one: str, other: str) -> str:
    """Return the path of the innermost module that both are in, or "" if their models differ."""
    pairs = zip(one.split("."), other.split("."))  # noqa: B905 - Python 3.9
    return ".".join(part for part, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
