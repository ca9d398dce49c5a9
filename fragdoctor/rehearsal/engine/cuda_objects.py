"""``torch.cuda``'s objects: streams, events, private memory pools, and captured graphs."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Final, Self
from weakref import WeakSet

import torch

from fragdoctor.model.conf_keys import parse_version
from fragdoctor.rehearsal.engine import always, nothing, put, session
from fragdoctor.rehearsal.engine.marks import REPLAY


class Stream(torch.Stream):
    """A stream of a fake GPU; the device guard of :mod:`.vtables` does its work."""

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Self:
        """Take the next stream of the pool, or the stream with the given id."""
        if "stream_id" in kwargs:
            return super().__new__(cls, **kwargs)
        gpus, index = session.current().gpus, device
        if not (device is None or isinstance(device, int)):
            index = torch.device(device).index
        index = gpus.device() if index is None else index
        return super().__new__(
            cls,
            stream_id=gpus.new_stream(index, priority),
            device_index=index,
            device_type=1,
        )

    @property
    def cuda_stream(self) -> int:
        """The stream's CUDA handle."""
        return int(session.current().gpus.stream_handle(self.stream_id))

    @property
    def priority(self) -> int:
        """0, or -1 for a high-priority stream."""
        return -1 if self.stream_id & 31 == 5 else 0

    priority_range: Any = staticmethod(always((0, -3)))  # the lowest and the highest

    wait_event: Any = nothing  # PyTorch's own take no names of arguments
    wait_stream: Any = nothing

    def record_event(self, event: Any = None) -> Any:
        """Return the given event, or a new one, recorded here."""
        event = Event() if event is None else event
        event.record(self)
        return event


class Event(torch.Event):
    """An event; the device guard records it, and it is complete at once."""

    def __new__(
        cls,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        **_: Any,
    ) -> Self:
        """Make an event of the current device."""
        return super().__new__(
            cls, "cuda", enable_timing=enable_timing, blocking=blocking, interprocess=interprocess
        )

    elapsed_time: Any = always(1.0)  # a millisecond, since times are not rehearsed
    cuda_event = property(id)  # a placeholder handle


Handle = tuple[int, int]
_HAS_OWN_RANDOM_STATE: Final = parse_version(torch.__version__) >= (2, 12, 0)
"""Whether each graph keeps the generator's state on the default stream (pytorch/pytorch#176752)."""


class CUDAGraph:
    """A graph: what it captures runs once, from a pool of its own; replays request no memory.

    Attributes:
        has_steps: whether the graph includes an optimizer step.
    """

    _alive: Final[WeakSet[Any]] = WeakSet()

    def __init__(self, *_: Any, **__: Any) -> None:
        self._pool = self._device = -1
        self._random_state: list[torch.Tensor] = []
        self.has_steps = False

    def capture_begin(self, pool: Handle | None = None, *_: Any, **__: Any) -> None:
        """Begin to serve requests from the graph's pool."""
        now = session.current()
        self._device = now.gpus.device()
        if _HAS_OWN_RANDOM_STATE or not self._alive:
            stream = torch.cuda.default_stream() if _HAS_OWN_RANDOM_STATE else None
            with torch.cuda.stream(stream):  # seed and offset of the generator
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

    def replay(self) -> None:
        """Request nothing; if the graph includes an optimizer step, mark a run of the optimizer."""
        if not self.has_steps:
            return
        now = session.current()
        now.marks.note("START", REPLAY, self._device)
        now.progress.replayed(self)
        now.marks.note("END", REPLAY, self._device)
        now.progress.end_range()

    instantiate = nothing

    def reset(self) -> None:
        """Give the pool back."""
        if self._pool >= 0:
            session.current().gpus.pool_release(self._device, self._pool, 0)
            self._pool = -1
        if _HAS_OWN_RANDOM_STATE:
            self._random_state.clear()

    def pool(self) -> Handle:
        """Return the pool, for other graphs to share."""
        return 0, self._pool

    register_generator_state = nothing
    enable_debug_mode = nothing
    debug_dump = nothing

    raw_cuda_graph = raw_cuda_graph_exec = always(1)  # a placeholder handle

    @staticmethod
    def get_currently_capturing_graph() -> Any:
        """Return the graph that is captured at the moment."""
        return session.current().captures[-1]

    def __del__(self) -> None:
        with suppress(Exception):
            self.reset()


class MemPool:
    """A memory pool that the program creates."""

    def __init__(
        self, allocator: Any = None, use_on_oom: bool = False, no_split: bool = False, **_: Any
    ) -> None:
        if allocator is not None:
            session.note("A pool's own allocator was simulated as PyTorch's caching allocator.")
        torch.cuda.init()
        gpus = session.current().gpus
        self.device = gpus.device()
        self._pool = gpus.pool_create(self.device, int(use_on_oom), int(no_split))

    @property
    def id(self) -> Handle:
        """The pool's id."""
        return 0, self._pool

    allocator = None  # of its own
    use_count = always(1)

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


def install() -> None:
    """Install the memory pools of the fake GPUs."""
    for name, value in {
        "_cuda_beginAllocateCurrentThreadToPool": _begin,
        "_cuda_beginAllocateToPool": _begin,
        "_cuda_endAllocateToPool": lambda device, _: session.current().gpus.context_end(device),
        "_cuda_releasePool": lambda device, pool: session.current().gpus.pool_release(
            device, pool[1], 0
        ),
        "_graph_pool_handle": _graph_pool_handle,
    }.items():
        put(torch._C, name, value)
        for module in (torch.cuda.memory, torch.cuda.graphs):
            if hasattr(module, name):
                put(module, name, value)
    for module in (torch.cuda, torch.cuda.graphs):
        put(module, "CUDAGraph", CUDAGraph)
    for module in (torch.cuda, torch.cuda.memory):
        put(module, "MemPool", MemPool)
