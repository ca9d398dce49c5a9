"""The parts of ``torch.cuda`` other than memory: profiler marks, tuning, links between GPUs.

Builds without CUDA lack them or let them fail, but programs call them anyway. None of them computes
anything; those that need memory (to exchange data between GPUs) request it as PyTorch's own do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, Final, Self

import torch
import torch.cuda.nvtx
import torch.cuda.tunable
from torch import _utils as packing

from fragdoctor.rehearsal.engine import allocation, always, nothing, put, put_all, session, wrap
from fragdoctor.rehearsal.engine.cuda_objects import CUDAGraph, Stream

_CACHED_PLANS: Final = 4096  # CUFFT_MAX_PLAN_NUM


_NVTX: Final = (
    "rangePushA", "rangePop", "rangeStartA", "rangeEnd", "deviceRangeStart", "deviceRangeEnd",
    "markA",
)  # fmt: skip
"""Functions of ``torch._C._nvtx``: marks and ranges go nowhere."""


class _TypeOfTensors(type):
    """The metaclass of ``torch.cuda.FloatTensor`` and its like, which older programs call."""

    dtype: torch.dtype

    def __instancecheck__(cls, value: object) -> bool:
        """Return whether a value is a tensor of this type."""
        return isinstance(value, torch.Tensor) and value.type() == cls.__name__

    def __call__(cls, *args: Any) -> torch.Tensor:
        """Create a tensor from a size or from values."""
        is_size = not args or isinstance(args[0], int | torch.Size)
        make: Any = torch.empty if is_size else torch.as_tensor
        made: torch.Tensor = make(*args or (0,), dtype=cls.dtype, device="cuda")
        return made


def _set_default_type(kind: Any) -> None:
    """``torch.set_default_tensor_type``: from then on tensors are created on the GPU."""
    name = kind if isinstance(kind, str) else kind.__name__
    is_of_gpu = name.startswith(_OF_GPU)
    torch.set_default_device("cuda" if is_of_gpu else None)
    if is_of_gpu:
        torch.set_default_dtype(getattr(torch.cuda, name.removeprefix(_OF_GPU)).dtype)
        session.note("torch.Tensor(...) creates CPU tensors, whatever the default type is.")
    else:
        _set_default_type_of_cpu(kind)


_OF_GPU: Final = "torch.cuda."
_set_default_type_of_cpu: Final = torch.set_default_tensor_type


class _Plans:
    """``torch.backends.cuda.cufft_plan_cache``, for one GPU or the current one."""

    size = 0
    max_size = _CACHED_PLANS

    def __getitem__(self, _device: Any) -> Self:
        return self

    clear = nothing


# ---- data exchanged between GPUs (torch/csrc/cuda/comm.cpp) -------------------------------------


def _index(device: int) -> torch.device:
    return torch.device("cuda", session.current().gpus.device() if device < 0 else device)


def _copied(parts: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    for target, part in zip(targets, parts, strict=True):
        target.copy_(part, non_blocking=True)
    return list(targets)


def _broadcast(tensor: torch.Tensor, devices: Sequence[Any]) -> list[torch.Tensor]:
    if devices and isinstance(devices[0], torch.Tensor):  # the outputs
        return _copied([tensor for _ in devices], devices)
    return [tensor.to(_index(device), non_blocking=True) for device in devices]


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
    if devices and isinstance(devices[0], torch.Tensor):
        return _copied(tensor.split([t.size(dim) for t in devices], dim), devices)
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
    return _gather_out(tensors, result, dim)


def _gather_out(tensors: Sequence[torch.Tensor], result: torch.Tensor, dim: int) -> torch.Tensor:
    _copied(tensors, result.split([t.size(dim) for t in tensors], dim))
    return result


# ---- memory that a program requests by address --------------------------------------------------


def _take(n_bytes: int, _stream: int = 0) -> int:
    return allocation.take(session.current().gpus.device(), n_bytes, allocation.stack_here())


def _profile(make: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """Record no GPU times, since builds without CUDA have no clock for them."""
    kwargs.pop("use_cuda", None)
    if kwargs.get("use_device") == "cuda":
        kwargs["use_device"] = None
        session.note("Profiles contain no GPU times.")
    make(self, *args, **kwargs)


def _not_rehearsed(name: str) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"A rehearsal has no {name}.")

    return fail


_DO_NOTHING: Final = (
    "_cuda_setCublasLtWorkspaceSize", "_nccl_all_reduce", "_nccl_reduce", "_nccl_broadcast",
    "_nccl_all_gather", "_nccl_reduce_scatter", "_set_linalg_preferred_backend",
)  # fmt: skip
_IN_C: Final[dict[str, Callable[..., Any]]] = {
    **dict.fromkeys(_DO_NOTHING, nothing),
    "_broadcast": _broadcast,
    "_broadcast_out": _broadcast,
    "_broadcast_coalesced": _broadcast_coalesced,
    "_scatter": _scatter,
    "_scatter_out": lambda tensor, out, dim=0, *_: _scatter(tensor, out, None, dim),
    "_gather": _gather,
    "_gather_out": _gather_out,
    "_cuda_cudaCachingAllocator_raw_alloc": _take,
    "_cuda_cudaCachingAllocator_raw_delete": allocation.give,
    "_cuda_getStreamFromExternal": lambda pointer, device: (pointer, device, 1),
    "_cuda_getCurrentSolverHandle": lambda: 1,
    "_cuda_getCublasWorkspaceSize": lambda: session.current().blas_workspace_bytes,
    "_cuda_getCublasLtWorkspaceSize": lambda: session.current().blas_workspace_bytes,
    "_cuda_setCublasWorkspaceSize": _not_rehearsed("cuBLAS workspace size but the default"),
    "_cuda_changeCurrentAllocator": _not_rehearsed("allocator but PyTorch's own"),
    "_cuda_customAllocator": _not_rehearsed("allocator but PyTorch's own"),
    "_cuda_getAllocator": _not_rehearsed("allocator object of PyTorch's"),
    "_cuda_cudaHostAllocator": _not_rehearsed("allocator object for pinned memory"),
    "_cuda_allocationTraceback": lambda _address: None,
    "_nccl_unique_id": lambda: b"",
    "_nccl_init_rank": lambda *_: 0,
}
_FIGURES: Final = {  # what NVIDIA's management library would say of the GPU
    "utilization": 0, "temperature": 40, "power_draw": 100_000, "clock_rate": 1980,
    "memory_usage": 0,
}  # fmt: skip


def _device_memory_used(device: Any = None) -> int:
    free, total = torch.cuda.mem_get_info(device)
    return int(total - free)


def install() -> None:
    """Install these functions."""
    put_all(torch._C, _IN_C)
    put_all(torch.cuda.tunable, dict.fromkeys(torch.cuda.tunable.__all__, nothing))
    put(torch.cuda.nvtx, "_nvtx", SimpleNamespace(**dict.fromkeys(_NVTX, always(0))))
    put(torch.autograd.profiler, "emit_nvtx", lambda *_, **__: nullcontext())
    wrap(torch.autograd.profiler.profile, "__init__", _profile)
    for name in ("begin_capture_to_if_node", "end_capture_to_conditional_node"):
        put(CUDAGraph, name, _not_rehearsed("conditional part of a CUDA graph"))
    put(torch.backends.cuda, "cufft_plan_cache", _Plans())
    external = lambda _pointer, device=None, **_: Stream(device)  # noqa: E731
    put(torch.cuda, "ExternalStream", external)
    types = [kind for kind in vars(torch).values() if type(kind) is type(torch.FloatTensor)]
    for kind in types:
        made = _TypeOfTensors(_OF_GPU + kind.__name__, (), {"dtype": kind.dtype})
        put(torch.cuda, kind.__name__, made)
    put(torch, "set_default_tensor_type", _set_default_type)
    put_all(torch.cuda, {name: always(figure) for name, figure in _FIGURES.items()})
    if hasattr(torch.cuda, "device_memory_used"):
        put(torch.cuda, "device_memory_used", _device_memory_used)
