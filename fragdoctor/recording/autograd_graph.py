"""What the autograd graph of a tensor keeps for the backward pass, without unpacking any of it.

A tensor that was packed by hooks is not read, since unpacking it may be a whole forward pass: the
packed value is an object of the program like any other.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

from .object_search import class_is

_MAX_PACKED = 64
_PREFIX = "_raw_saved_"


class GraphReader:
    """Reads graphs, each node once; a node goes by the ID of its Python object.

    Args:
        torch: the program's own.
        deadline: time by ``time.thread_time`` at which the reading ends.
        addresses: returns the storages of those of some tensors that have no owner yet.

    Attributes:
        heads: ID of a tensor -> its node.
        after: a node -> the nodes that it calls.
        kept: a node -> the storages that it keeps for the backward pass.
        is_complete: whether the reading ended before the deadline.
    """

    def __init__(
        self, torch: Any, deadline: float, addresses: Callable[[Iterator[Any]], list[int]]
    ) -> None:
        base = getattr(torch._C, "TensorBase", None) or torch._C._TensorBase
        self._grad_fn = base.grad_fn.__get__
        self._tensor = torch.Tensor
        saved = getattr(torch._C._autograd, "SavedTensor", None)
        self._can_read = saved is not None and hasattr(saved, "unpack_hook")
        self._saved = saved
        self._custom = torch._C._FunctionBase
        self._names: dict[int, list[Any]] = {}
        self._held: list[Any] = []  # a node's object, and so its ID, lives as long as it is held
        self._deadline = deadline
        self._addresses = addresses
        self.heads: dict[int, int] = {}
        self.after: dict[int, list[int]] = {}
        self.kept: dict[int, list[int]] = {}
        self.is_complete = True

    def read(self, tensor: Any) -> None:
        """Read the graph of a tensor."""
        first = self._grad_fn(tensor) if self._can_read else None
        todo = [] if first is None else [first]
        while todo:
            node = todo.pop()
            if id(node) in self.after:
                continue
            if len(self.after) % 64 == 63 and time.thread_time() > self._deadline:
                self.is_complete = False
                return
            self._held.append(node)
            after = [n for n, _ in self._next(node) if n is not None]
            self._held += after
            self.after[id(node)] = [id(n) for n in after]
            self.kept[id(node)] = self._addresses(self._saved_of(node))
            todo += after
        if first is not None:
            self.heads[id(tensor)] = id(first)

    def outputs(self) -> set[int]:
        """Return the IDs of tensors on whose nodes no other node depends."""
        inner = {n for after in self.after.values() for n in after}
        return {tensor for tensor, node in self.heads.items() if node not in inner}

    def kept_from(self, node: int, seen: set[int]) -> list[int]:
        """Return what is kept from a node on, except by nodes already seen."""
        found: list[int] = []
        todo = [node]
        while todo:
            one = todo.pop()
            if one not in seen:
                seen.add(one)
                found += self.kept.get(one, ())
                todo += self.after.get(one, ())
        return found

    def _next(self, node: Any) -> Any:
        if class_is(type(node), self._custom):
            return self._custom.next_functions.__get__(node) or ()
        return node.next_functions  # a C++ class

    def _saved_of(self, node: Any) -> Iterator[Any]:
        kind = type(node)
        if class_is(kind, self._custom):
            raw = self._custom._raw_saved_tensors.__get__(node)
            yield from self._inside(node)
            yield from self._read(raw)
            return
        getters = self._names.get(id(kind))
        if getters is None:
            names = type.__dict__["__dict__"].__get__(kind)
            getters = [g.__get__ for n, g in names.items() if n.startswith(_PREFIX)]
            self._names[id(kind)] = getters
        for get in getters:
            try:
                yield from self._read(get(node))
            except RuntimeError:  # released after a backward pass
                continue

    def _read(self, raw: Any) -> Iterator[Any]:
        for saved in raw if type(raw) is tuple else (raw,):
            if type(saved) is not self._saved:
                continue
            try:
                value = saved.data
            except RuntimeError:
                continue
            if class_is(type(value), self._tensor):
                yield value
            elif saved.unpack_hook is not None:
                yield from self._inside(value)

    def _inside(self, value: Any) -> Iterator[Any]:
        """Yield the tensors in a small object: what a hook packed, the context of a function."""
        todo, seen = [value], {id(value)}
        while todo and len(seen) < _MAX_PACKED:
            one = todo.pop()
            if class_is(type(one), self._tensor):
                yield one
                continue
            for inner in gc.get_referents(one):
                if (
                    id(inner) not in seen
                    and gc.is_tracked(inner)
                    and not class_is(type(inner), type)
                ):
                    seen.add(id(inner))
                    todo.append(inner)
