"""The CUDA tensors of the program and their storages, read without calling the program's code."""

from __future__ import annotations

import gc
import time
from typing import Any, NamedTuple

from .object_search import class_is

_CHUNK = 65_536
_STRIDE = 16


class Found(NamedTuple):
    """What was found among all objects: CUDA tensors, modules, optimizers."""

    tensors: list[Any]
    modules: list[Any]
    optimizers: list[Any]


class CudaStorages:
    """Reads tensors, and notes each storage that it encounters.

    Args:
        torch: the program's own.

    Attributes:
        sizes, devices: bytes and GPU of each storage, by its address; addresses of several GPUs
            never coincide.
        is_complete: whether everything was read in time.
        listing_s: how long it takes to list all objects.
    """

    def __init__(self, torch: Any) -> None:
        base = getattr(torch._C, "TensorBase", None) or torch._C._TensorBase
        self._bases = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer)
        self._is_cuda = base.is_cuda.__get__
        self._is_leaf = base.is_leaf.__get__
        self._grad = base.grad.__get__
        self._storage_of = base.untyped_storage
        self._is_cow = getattr(torch._C, "_is_cow_tensor", None)
        self.sizes: dict[int, int] = {}
        self.devices: dict[int, int] = {}
        self.is_complete = True
        self.listing_s = 0.0

    def find(self, deadline: float) -> Found:
        """Return what is found among all objects that the collector knows.

        Tensors come in an order in which every prefix is an even sample.
        """
        started = time.thread_time()
        every = gc.get_objects()
        self.listing_s = time.thread_time() - started
        try:
            return self._find(every, deadline)
        finally:
            # Emptied, since a profiler that samples frames may hold this one: to a search, anything
            # in a list of all objects would seem to be held by somebody.
            every.clear()

    def _find(self, every: list[Any], deadline: float) -> Found:
        which: dict[int, int] = {}  # by IDs: the metaclass of a class may have its own hash
        wanted: set[int] = set()
        found: tuple[list[Any], ...] = ([], [], [])
        for begin in range(0, len(every), _CHUNK):
            if time.thread_time() > deadline:
                self.is_complete = False
                break
            chunk = every[begin : begin + _CHUNK]
            kinds = list(map(id, map(type, chunk)))
            for number, value in dict(zip(kinds, chunk)).items():  # noqa: B905 - Python 3.9
                if number not in which:
                    bases = enumerate(self._bases)  # a tensor, a module, an optimizer, or none
                    which[number] = next((i for i, b in bases if class_is(type(value), b)), -1)
                    if which[number] >= 0:
                        wanted.add(number)
            for value in [v for v, number in zip(chunk, kinds) if number in wanted]:  # noqa: B905
                at = which[id(type(value))]
                if at or self._is_cuda(value):
                    found[at].append(value)
            chunk.clear()
        tensors = [t for i in range(_STRIDE) for t in found[0][i::_STRIDE]]
        return Found(tensors, found[1], found[2])

    def address(self, tensor: Any) -> int:
        """Return the address of a tensor's storage, or 0 if it has none of its own."""
        try:
            if self._is_cow is not None and self._is_cow(tensor):
                return 0  # asking for its address would copy it
            storage = self._storage_of(tensor)
            address, n_bytes = int(storage.data_ptr()), int(storage.nbytes())
        except (RuntimeError, NotImplementedError):
            return 0  # sparse, or a wrapper around other tensors
        if not address or not n_bytes:
            return 0
        if address not in self.sizes:
            self.sizes[address] = n_bytes
            self.devices[address] = storage.device.index or 0
        return address

    def tensors(self, values: Any) -> list[Any]:
        """Return the values that are tensors."""
        return [v for v in values if class_is(type(v), self._bases[0])]

    def addresses(self, values: Any) -> list[int]:
        """Return the storage addresses of those values that are CUDA tensors."""
        found = (self.address(t) for t in self.tensors(values) if self._is_cuda(t))
        return [address for address in found if address]

    def has_graph(self, tensor: Any) -> bool:
        """Return whether a tensor is the result of operations that autograd knows."""
        return not self._is_leaf(tensor)

    def gradient(self, leaf: Any) -> int:
        """Return the address of the gradient of a tensor without a graph, or 0 if it has none."""
        gradient = self._grad(leaf)
        if gradient is None or not self._is_cuda(gradient):
            return 0
        return self.address(gradient)
