"""Private pools of memory: captured graphs and ``torch.cuda.MemPool``."""

from __future__ import annotations

import sys
from contextlib import ExitStack, suppress
from typing import Any, Final
from weakref import WeakSet

import torch

from fragdoctor.rehearse.engine import session
from fragdoctor.rehearse.engine.patching import put

Handle = tuple[int, int]


class CUDAGraph:
    """A graph: what it captures runs once, from a pool of its own; replays ask for nothing.

    Attributes:
        has_steps: whether an optimizer is called in it.
    """

    _alive: Final[WeakSet[Any]] = WeakSet()

    def __init__(self, keep_graph: bool = False) -> None:
        del keep_graph
        self._pool = self._device = -1
        self._random_state: list[torch.Tensor] = []
        self.has_steps = False

    def capture_begin(self, pool: Handle | None = None, *_: Any, **__: Any) -> None:
        """Begin to serve requests from the graph's pool."""
        now = session.current()
        self._device = now.gpus.device()
        if not self._alive:  # seed and offset of the generator, which the graph reads
            self._random_state = [
                torch.empty(1, dtype=torch.int64, device="cuda") for _ in range(2)
            ]
        self._alive.add(self)
        if pool is None:
            self._pool = now.gpus.pool_create(self._device, 0, 0)
        else:
            self._pool = pool[1]
            now.gpus.pool_retain(self._device, self._pool)
        now.gpus.context_begin(self._device, self._pool, 1)
        now.captures.append(self)

    def capture_end(self) -> None:
        """Serve requests from the usual pools again."""
        now = session.current()
        now.captures.remove(self)
        now.gpus.context_end(self._device)
        if self.has_steps:
            now.rounds.end_warm_up()

    def replay(self) -> None:
        """Ask for nothing; with an optimizer in it, it is a step."""
        if self.has_steps:
            session.current().mark_step(sys._getframe(1))

    def instantiate(self) -> None:
        """Ask for nothing."""

    def reset(self) -> None:
        """Give the pool back."""
        if self._pool >= 0:
            session.current().gpus.pool_release(self._device, self._pool, 0)
            self._pool = -1

    def pool(self) -> Handle:
        """Return the pool, for other graphs to share."""
        return 0, self._pool

    def register_generator_state(self, generator: Any) -> None:
        """Nothing random is drawn."""

    def enable_debug_mode(self) -> None:
        """There is nothing to show."""

    def debug_dump(self, debug_path: str) -> None:
        """There is nothing to show."""

    def __del__(self) -> None:
        with suppress(Exception):
            self.reset()


class MemPool:
    """A pool that the program asks for."""

    def __init__(
        self, allocator: Any = None, use_on_oom: bool = False, no_split: bool = False, **_: Any
    ) -> None:
        if allocator is not None:
            session.current().assumptions.note(
                "A pool's own allocator is served as PyTorch's caching allocator."
            )
        torch.cuda.init()
        gpus = session.current().gpus
        self.device = gpus.device()
        self._pool = gpus.pool_create(self.device, int(use_on_oom), int(no_split))

    @property
    def id(self) -> Handle:
        """The pool's name."""
        return 0, self._pool

    @property
    def allocator(self) -> None:
        """The pool has none of its own."""

    def snapshot(self, *_: Any, **__: Any) -> Any:
        """Return the segments of the pool."""
        return torch._C._cuda_memorySnapshot(self.id)["segments"]

    def __del__(self) -> None:
        with suppress(Exception):
            session.current().gpus.pool_release(self.device, self._pool, 1)


def _begin(device: int, pool: Handle) -> None:
    gpus = session.current().gpus
    gpus.pool_retain(device, pool[1])
    gpus.context_begin(device, pool[1], 0)


def _graph_pool_handle() -> Handle:
    gpus = session.current().gpus
    return 0, gpus.pool_create(gpus.device(), 0, 0)


def install(undo: ExitStack) -> None:
    """Put the pools of fake GPUs in place until ``undo`` is closed."""
    for name, value in {
        "_cuda_beginAllocateCurrentThreadToPool": _begin,
        "_cuda_beginAllocateToPool": _begin,
        "_cuda_endAllocateToPool": lambda device, _: session.current().gpus.context_end(device),
        "_cuda_releasePool": lambda device, pool: session.current().gpus.pool_release(
            device, pool[1], 0
        ),
        "_graph_pool_handle": _graph_pool_handle,
    }.items():
        put(undo, torch._C, name, value)
        for module in (torch.cuda.memory, torch.cuda.graphs):
            if hasattr(module, name):
                put(undo, module, name, value)
    for module in (torch.cuda, torch.cuda.graphs):
        put(undo, module, "CUDAGraph", CUDAGraph)
    for module in (torch.cuda, torch.cuda.memory):
        if hasattr(module, "MemPool"):
            put(undo, module, "MemPool", MemPool)
