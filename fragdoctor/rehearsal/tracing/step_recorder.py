"""Which operation, line and part of the training each request of a traced model belongs to.

The fake GPU of the rehearsal serves the requests; what they are for is noted here.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Final, NamedTuple

import torch
import torch.utils.checkpoint
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from fragdoctor.errors import ConfigError
from fragdoctor.frozen import frozen
from fragdoctor.rehearsal.engine import allocation
from fragdoctor.rehearsal.engine.gpu import ACTIONS, Event
from fragdoctor.rehearsal.engine.session import Session
from fragdoctor.rehearsal.tracing.footprint import RequestLog, shown

CHECKPOINT: Final = torch.utils.checkpoint.__file__
PACKAGE: Final = str(Path(__file__).parents[2])
TRAINER: Final = str(Path(__file__).with_name("trainer.py"))
TORCH: Final = str(Path(torch.__file__).parent)
GPU: Final = 0
ALLOC: Final = ACTIONS.index("alloc")
FREE: Final = ACTIONS.index("free_requested")
BLAS_WORKSPACE: Final = "cuBLAS workspace"
_NOT_THE_USERS: Final = (PACKAGE, TORCH, "<")
_READ: Final = torch.ops.aten._local_scalar_dense.default


class Label(NamedTuple):
    """What the memory at an address is for.

    Attributes:
        n_events: events before; the address is that of a block that lives then.
    """

    n_events: int
    address: int
    label: str


@frozen
class Call:
    """An operation that asked for memory.

    Attributes:
        first, end: its events: of the first, and of the one after the last.
        name: of the operation.
        place: number of the line of the user's code; -1 = none.
        recomputes: whether it is of a forward pass that checkpointing runs again.
        source: address of what a cast copies, or 0.
    """

    first: int
    end: int
    name: str
    place: int
    recomputes: bool
    source: int


class Recorder(TorchDispatchMode):
    """Notes what each operation on the fake GPU is, and where it stands in the user's code.

    Attributes:
        warnings: what could not be known, by the place in the user's code.
    """

    def __init__(self, now: Session) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.warnings: dict[str, None] = {}
        self._now = now
        self._calls: deque[Call] = deque()
        self._labels: deque[Label] = deque()
        self._marks: deque[tuple[int, str]] = deque()
        self._log = RequestLog()
        self._places: dict[tuple[Any, int], int] = {}

    def mark(self, phase: str) -> None:
        """Begin a phase."""
        self._marks.append((self._n_events(), phase))

    def label(self, tensor: torch.Tensor, label: str) -> None:
        """Note what a tensor is for, unless that is known; those of other devices do not count."""
        n_events = self._n_events()
        self._labels.extend(Label(n_events, address, label) for address in _addresses(tensor))

    def _n_events(self) -> int:
        return self._now.gpus.figures(GPU)["events"]

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run one operation and note what it asked for."""
        if func is _READ and args[0].is_cuda:
            return self._stand_in(args[0])
        first = self._n_events()
        out = func(*args, **(kwargs or {}))
        end = self._n_events()
        if end > first:
            name = func.overloadpacket.__name__
            recomputes = allocation.in_backward() and _recomputes()
            copied = args[0] if name == "_to_copy" and args else None
            source = next(_addresses(copied), 0)
            self._calls.append(Call(first, end, name, self._place(), recomputes, source))
        return out

    def _stand_in(self, tensor: torch.Tensor) -> float | bool:
        """Return a value for ``item()`` of a tensor that has none, and note that it was made up.

        A loss that is logged may be anything, but a branch may depend on it. The gradient scaler
        asks whether gradients are infinite: they are not. Truth values are usually checks for bad
        data: no.

        Raises:
            ConfigError: a whole number is read; sizes may depend on it.
        """
        frame = _user_frame()
        where = "PyTorch"
        if frame is not None:
            where = f"{shown(frame.f_code.co_filename)}:{frame.f_lineno}"
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            if frame is not None:  # PyTorch's own questions are the scaler's
                self.warnings[
                    f"The model read a value (.item()) at {where}; a trace has no values, 0.0 was "
                    "taken: branches that depend on it may differ."
                ] = None
            return 0.0
        if tensor.dtype == torch.bool:
            self.warnings[f"A condition on the GPU's data at {where} counted as false."] = None
            return False
        raise ConfigError(
            f"The model reads a whole number from the GPU at {where}, and sizes may depend on it.",
            hint="Fake tensors have no values: pass the number from Python, or leave that part "
            "out.",
        )

    def _place(self) -> int:
        frame = _user_frame()
        if frame is None:
            return -1
        key = (frame.f_code, frame.f_lineno)
        place = self._places.get(key)
        if place is None:
            code = frame.f_code
            place = self._log.add_place(shown(code.co_filename), frame.f_lineno, code.co_name)
            self._places[key] = place
        return place

    def request_log(self) -> RequestLog:
        """Return the requests, each with what is known of it; once, at the end."""
        live: dict[int, int] = {}
        events = self._now.gpus.trace(GPU)
        for number, event in enumerate(events):
            self._note(number, live)
            if event.action == FREE and event.address in live:
                self._log.free(live.pop(event.address))
            elif event.action == ALLOC:
                live[event.address] = self._request(number, event, live)
        self._note(len(events), live)
        return self._log

    def _note(self, number: int, live: dict[int, int]) -> None:
        """Take over the marks and labels made before an event."""
        while self._marks and self._marks[0][0] <= number:
            self._log.mark(self._marks.popleft()[1])
        while self._labels and self._labels[0].n_events <= number:
            _, address, label = self._labels.popleft()
            if address in live:
                self._log.labels.setdefault(live[address], label)

    def _request(self, number: int, event: Event, live: dict[int, int]) -> int:
        log, operation = self._log, self._now.stacks.names[event.operation]
        if operation == BLAS_WORKSPACE:
            request = log.request(event.size, -1, operation, None)
            log.labels[request] = "workspaces"
            return request
        while self._calls and self._calls[0].end <= number:
            self._calls.popleft()
        if not self._calls or self._calls[0].first > number:
            return log.request(event.size, -1, operation, None)
        call = self._calls[0]
        request = log.request(event.size, call.place, call.name, live.get(call.source))
        if call.recomputes:
            log.labels[request] = "recomputed"
        return request


def _addresses(value: Any) -> Iterator[int]:
    """Return where the storages of a tensor on the GPU begin."""
    if not isinstance(value, torch.Tensor):
        return
    if is_traceable_wrapper_subclass(value):
        for name in value.__tensor_flatten__()[0]:
            yield from _addresses(getattr(value, name))
    elif value.is_cuda and value.get_device() == GPU:
        yield value.untyped_storage().data_ptr()


def _user_frame() -> FrameType | None:
    """Return the innermost Python frame outside PyTorch, below fragdoctor's training loop."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        filename = frame.f_code.co_filename
        if filename == TRAINER:
            return None
        if not filename.startswith(_NOT_THE_USERS):
            return frame
        frame = frame.f_back
    return None


def _recomputes() -> bool:
    """Whether checkpointing runs a part of the forward pass again."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == CHECKPOINT:
            return True
        if frame.f_code.co_name == "_engine_run_backward":
            return False
        frame = frame.f_back
    return False
