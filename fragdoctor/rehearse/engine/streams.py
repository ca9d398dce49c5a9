"""``torch.cuda.Stream`` and ``Event``, on PyTorch's classes for any device."""

from __future__ import annotations

from typing import Any, Self

import torch

from fragdoctor.rehearse.engine import session


class Stream(torch.Stream):
    """A stream of a fake GPU; the guard in ``tables.py`` gives out the ids."""

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Self:
        """Take the next stream of the pool, or the one with an id."""
        if "stream_id" in kwargs:
            return super().__new__(cls, **kwargs)
        gpus = session.current().gpus
        index = (
            None
            if device is None
            else torch.device(device).index
            if not isinstance(device, int)
            else device
        )
        index = gpus.device() if index is None else index
        return super().__new__(
            cls,
            stream_id=gpus.new_stream(index, priority),
            device_index=index,
            device_type=1,
        )

    @property
    def cuda_stream(self) -> int:
        """The handle."""
        handle: int = session.current().gpus.stream_handle(self.stream_id)
        return handle

    @property
    def priority(self) -> int:
        """0, or -1 for the streams of high priority."""
        return -1 if self.stream_id & 31 == 5 else 0

    def query(self) -> bool:
        """Everything is done at once."""
        return True

    def synchronize(self) -> None:
        """Everything is done already."""
        session.current().gpus.synchronize(self.device_index)

    def wait_event(self, event: Any) -> None:
        """Nothing is ever under way."""

    def wait_stream(self, stream: Any) -> None:
        """Nothing is ever under way."""

    def record_event(self, event: Any = None) -> Any:
        """Return the event, or a new one."""
        return Event() if event is None else event

    def __eq__(self, other: object) -> bool:
        """Streams are equal by device and id."""
        return isinstance(other, torch.Stream) and (self.stream_id, self.device_index) == (
            other.stream_id,
            other.device_index,
        )

    def __hash__(self) -> int:
        return hash((self.stream_id, self.device_index))

    def __repr__(self) -> str:
        return f"<torch.cuda.Stream device={self.device} cuda_stream={self.cuda_stream:#x}>"


class Event(torch.Event):
    """An event; it is done as soon as it is recorded."""

    def __new__(
        cls,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ) -> Self:
        """Make an event of the current device."""
        del external
        return super().__new__(
            cls, "cuda", enable_timing=enable_timing, blocking=blocking, interprocess=interprocess
        )

    def record(self, stream: Any = None) -> None:
        """Nothing is ever under way."""

    def wait(self, stream: Any = None) -> None:
        """Nothing is ever under way."""

    def query(self) -> bool:
        """Everything is done at once."""
        return True

    def elapsed_time(self, end_event: Any) -> float:
        """Return a millisecond: time is not rehearsed."""
        del end_event
        return 1.0

    def synchronize(self) -> None:
        """Everything is done already."""

    @property
    def cuda_event(self) -> int:
        """A handle that stands for nothing."""
        return id(self)
