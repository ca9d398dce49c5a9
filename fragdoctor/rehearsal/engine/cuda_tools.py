"""The parts of ``torch.cuda`` beside memory: marks for profilers, links between GPUs.

Builds without CUDA lack them or let them fail, and programs call them all the same. None computes;
those that ask for memory (what several GPUs exchange) ask for it as PyTorch's own do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace
from typing import Any, Final

import torch
import torch.cuda.nvtx
from torch import _utils as packing

from fragdoctor.rehearsal.engine import allocation, cuda_objects, put, put_all, session

_NVTX: Final = (
    "deviceRangeEnd", "deviceRangeStart", "markA", "rangeEnd", "rangePop", "rangePushA",
    "rangeStartA",
)  # fmt: skip
"""Functions of ``torch._C._nvtx``: marks and ranges go nowhere, as nothing listens."""

# ---- what several GPUs exchange (torch/csrc/cuda/comm.cpp) --------------------------------------


def _index(device: int) -> torch.device:
    return torch.device("cuda", session.current().gpus.device() if device < 0 else device)


def _broadcast(tensor: torch.Tensor, devices: Sequence[Any]) -> list[torch.Tensor]:
    found = []
    for device in devices:
        place = _index(device)
        is_there = tensor.device == place
        found.append(tensor if is_there else tensor.to(place, non_blocking=True))
    return found


def _broadcast_coalesced(
    tensors: Sequence[torch.Tensor], devices: Sequence[int], buffer_size: int
) -> list[list[torch.Tensor]]:
    found: list[list[torch.Tensor]] = [[] for _ in devices[1:]]
    for chunk in packing._take_tensors(tensors, buffer_size):
        copies = _broadcast(packing._flatten_dense_tensors(chunk), devices)
        for place, copy in zip(found, copies[1:], strict=True):
            place += [t.detach() for t in packing._unflatten_dense_tensors(copy, chunk)]
    return [list(tensors), *(list(packing._reorder_tensors_as(made, tensors)) for made in found)]


def _scatter(
    tensor: torch.Tensor,
    devices: Sequence[Any],
    chunk_sizes: Sequence[int] | None = None,
    dim: int = 0,
    *_: Any,
) -> list[torch.Tensor]:
    parts = (
        tensor.chunk(len(devices), dim) if chunk_sizes is None else tensor.split(chunk_sizes, dim)
    )
    return [p.to(_index(d), non_blocking=True) for p, d in zip(parts, devices, strict=False)]


def _gather(
    tensors: Sequence[torch.Tensor], dim: int, destination: int | None = None
) -> torch.Tensor:
    size = list(tensors[0].shape)
    size[dim] = sum(t.size(dim) for t in tensors)
    place = torch.device("cpu") if destination == -1 else _index(destination or 0)
    result = torch.empty(size, dtype=tensors[0].dtype, device=place)
    for target, part in zip(
        result.split([t.size(dim) for t in tensors], dim), tensors, strict=True
    ):
        target.copy_(part, non_blocking=True)
    return result


# ---- memory that a program asks for by its address ----------------------------------------------


def _take(n_bytes: int, _stream: int = 0) -> int:
    return allocation.take(session.current().gpus.device(), n_bytes, allocation.stack_here())


def _timed(original: Any) -> Any:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        """Take no times of a GPU, for which builds without CUDA have no clock."""
        kwargs.pop("use_cuda", None)
        if kwargs.get("use_device") == "cuda":
            kwargs["use_device"] = None
            session.note("Profiles have no times of the GPU.")
        original(self, *args, **kwargs)

    return __init__


def _not_rehearsed(name: str) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"A rehearsal has no {name}.")

    return fail


_DO_NOTHING: Final = (
    "_cuda_setCublasLtWorkspaceSize", "_nccl_all_reduce", "_nccl_reduce", "_nccl_broadcast",
    "_nccl_all_gather", "_nccl_reduce_scatter", "_set_linalg_preferred_backend",
)  # fmt: skip
_IN_C: Final[dict[str, Callable[..., Any]]] = {
    **dict.fromkeys(_DO_NOTHING, cuda_objects.nothing),
    "_broadcast": _broadcast,
    "_broadcast_coalesced": _broadcast_coalesced,
    "_scatter": _scatter,
    "_gather": _gather,
    "_cuda_cudaCachingAllocator_raw_alloc": _take,
    "_cuda_cudaCachingAllocator_raw_delete": allocation.give,
    "_cuda_getCurrentSolverHandle": lambda: 1,
    "_cuda_getCublasWorkspaceSize": lambda: session.current().blas_workspace_bytes,
    "_cuda_getCublasLtWorkspaceSize": lambda: session.current().blas_workspace_bytes,
    "_cuda_setCublasWorkspaceSize": _not_rehearsed("other workspace of cuBLAS than the usual one"),
    "_cuda_changeCurrentAllocator": _not_rehearsed("other allocator than PyTorch's own"),
    "_cuda_customAllocator": _not_rehearsed("other allocator than PyTorch's own"),
    "_nccl_unique_id": lambda: b"",
    "_nccl_init_rank": lambda *_: 0,
}
_FIGURES: Final = {  # of the GPU itself, that NVIDIA's management library would tell
    "utilization": 0, "temperature": 40, "power_draw": 100_000, "clock_rate": 1980,
    "memory_usage": 0,
}  # fmt: skip


def _device_memory_used(device: Any = None) -> int:
    free, total = torch.cuda.mem_get_info(device)
    return int(total - free)


def install(undo: ExitStack) -> None:
    """Put them in place until ``undo`` is closed."""
    put_all(undo, torch._C, _IN_C)
    put(undo, torch.cuda.nvtx, "_nvtx", SimpleNamespace(**dict.fromkeys(_NVTX, lambda *_: 0)))
    put(undo, torch.autograd.profiler, "emit_nvtx", lambda *_, **__: nullcontext())
    profile: Any = torch.autograd.profiler.profile
    put(undo, profile, "__init__", _timed(profile.__init__))
    for name, figure in _FIGURES.items():
        put(undo, torch.cuda, name, lambda _device=None, figure=figure: figure)
    if hasattr(torch.cuda, "device_memory_used"):
        put(undo, torch.cuda, "device_memory_used", _device_memory_used)
