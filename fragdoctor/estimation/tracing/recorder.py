"""What the caching allocator would see: births and deaths of storages, from every operation."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final

import torch
import torch.utils.checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fragdoctor.estimation.tracing.kernels import scratch_of
from fragdoctor.estimation.tracing.request_log import RequestLog, shown
from fragdoctor.estimation.tracing.unknown_values import stand_in

CHECKPOINT: Final = torch.utils.checkpoint.__file__
PACKAGE: Final = str(Path(__file__).parents[2])
TRAINING: Final = str(Path(__file__).with_name("training.py"))
TORCH: Final = str(Path(torch.__file__).parent)
_NOT_THE_USERS: Final = (PACKAGE, TORCH, "<")
ATEN: Final = torch.ops.aten
MATMULS: Final = frozenset(
    {"mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "addbmm", "_scaled_mm", "_int_mm", "linear"}
)


def user_frame() -> FrameType | None:
    """Return the innermost Python frame outside PyTorch, below fragdoctor's training loop."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        filename = frame.f_code.co_filename
        if filename == TRAINING:
            return None
        if not filename.startswith(_NOT_THE_USERS):
            return frame
        frame = frame.f_back
    return None


@dataclass(slots=True)
class _Live:
    """A storage that is alive."""

    number: int
    n_bytes: int
    watch: weakref.ref[torch.UntypedStorage]


class Recorder(TorchDispatchMode):
    """Record what each operation on the fake GPU asks the allocator for, and when it is freed.

    Attributes:
        log: the requests so far.
        warnings: what could not be known, by the place in the user's code.
    """

    def __init__(self, log: RequestLog, *, workspace: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.log = log
        self.warnings: dict[str, None] = {}
        self.in_backward = False
        self._workspace = workspace
        self._handles: set[bool] = set()
        self._live: dict[int, _Live] = {}
        self._places: dict[tuple[Any, int], int] = {}

    def number_of(self, tensor: torch.Tensor) -> int | None:
        """Return the request that a tensor's storage came from; None for other devices."""
        live = self._live.get(tensor.untyped_storage()._cdata)
        return None if live is None else live.number

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run one operation and note what it allocates."""
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        if func is ATEN._local_scalar_dense.default and args[0].device.type == "cuda":
            return stand_in(args[0], user_frame(), self.warnings)
        name = func.overloadpacket.__name__
        owned = self._accumulates_in_place(func, args)
        out = func(*args, **kwargs)
        if owned is not None:
            self._take_over(owned, out)
        else:
            self._note(tree_leaves(out), name, args, kwargs)
        if name in MATMULS:
            self._workspaces(args)
        return out

    def _note(
        self, outputs: Iterable[Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        place = self._place()
        scratches = sorted(scratch_of(name, args, kwargs), key=lambda s: not s.comes_first)
        n_first = sum(scratch.comes_first for scratch in scratches)
        buffers = [self.log.request(s.n_bytes, place, s.reason, None) for s in scratches[:n_first]]
        for tensor in outputs:
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cuda":
                self._note_tensor(tensor, name, args)
        buffers += [self.log.request(s.n_bytes, place, s.reason, None) for s in scratches[n_first:]]
        for number in buffers:
            self.log.free(number)

    def _note_tensor(self, tensor: torch.Tensor, name: str, args: tuple[Any, ...]) -> None:
        storage = tensor.untyped_storage()
        key, n_bytes = storage._cdata, storage.nbytes()
        known = self._live.get(key)
        if known is not None:
            if known.n_bytes == n_bytes:
                return
            self.log.free(known.number)  # resized in place
        number = self.log.request(n_bytes, self._place(), name, self._source(name, args))
        if self.in_backward and _recomputes():
            self.log.labels[number] = "recomputed"
        self._live[key] = _Live(number, n_bytes, weakref.ref(storage, self._on_death(key, number)))

    def _source(self, name: str, args: tuple[Any, ...]) -> int | None:
        """The request that a cast copies; such copies are told apart in the report."""
        if name == "_to_copy" and args and isinstance(args[0], torch.Tensor):
            return self.number_of(args[0])
        return None

    def _on_death(
        self, key: int, number: int
    ) -> Callable[[weakref.ref[torch.UntypedStorage]], None]:
        def died(_: weakref.ref[torch.UntypedStorage]) -> None:
            live = self._live.get(key)
            if live is not None and live.number == number:
                del self._live[key]
                self.log.free(number)

        return died

    def _workspaces(self, args: tuple[Any, ...]) -> None:
        """The first product of each thread allocates cuBLAS's workspace, which then stays."""
        if self._workspace and self.in_backward not in self._handles:
            if not any(isinstance(a, torch.Tensor) and a.device.type == "cuda" for a in args):
                return
            self._handles.add(self.in_backward)
            number = self.log.request(self._workspace, -1, "cuBLAS workspace", None)
            self.log.labels[number] = "workspaces"

    def _accumulates_in_place(self, func: Any, args: tuple[Any, ...]) -> torch.Tensor | None:
        """Return the buffer into which the autograd engine would add.

        Where two gradients meet, the engine adds into the first if nobody else holds it; only for
        tensors of Python classes, as fake ones are, it makes a third.
        """
        if func is not ATEN.add.Tensor or not self.in_backward:
            return None
        first, second = args[0], args[1]
        if not (isinstance(second, torch.Tensor) and isinstance(first, torch.Tensor)):
            return None
        same = first.shape == second.shape and first.dtype == second.dtype
        if not same or not _called_by_engine() or first._is_view():
            return None
        shared: int = torch._C._storage_Use_Count(first.untyped_storage()._cdata)
        return first if shared <= SOLE_OWNER else None

    def _take_over(self, first: torch.Tensor, out: torch.Tensor) -> None:
        """Let the sum live on in the first operand's memory."""
        storage = first.untyped_storage()
        old = self._live.pop(storage._cdata, None)
        if old is None:
            return
        key = out.untyped_storage()._cdata
        watch = weakref.ref(out.untyped_storage(), self._on_death(key, old.number))
        self._live[key] = _Live(old.number, old.n_bytes, watch)

    def _place(self) -> int:
        frame = user_frame()
        if frame is None:
            return -1
        key = (frame.f_code, frame.f_lineno)
        place = self._places.get(key)
        if place is None:
            code = frame.f_code
            place = self.log.add_place(shown(code.co_filename), frame.f_lineno, code.co_name)
            self._places[key] = place
        return place


SOLE_OWNER: Final = 3


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


def _called_by_engine() -> bool:
    """Whether no Python stands between the autograd engine and the operation."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_name
        if name == "_engine_run_backward":
            return True
        if not frame.f_code.co_filename.startswith(_NOT_THE_USERS) or name == "backward":
            return False
        frame = frame.f_back
    return False
