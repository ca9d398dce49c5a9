"""The parts of ``torch.cuda`` other than memory: profiler marks, tuning, links between GPUs.

Builds without CUDA lack them or let them fail, but programs call them anyway. None of them computes
anything; those that need memory (to exchange data between GPUs) request it as PyTorch's own do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from itertools import count
from typing import Any, Final, Self

import torch
import torch.cuda.gds
import torch.cuda.green_contexts
import torch.cuda.nvtx
import torch.cuda.tunable
from torch import _utils as packing

from fragdoctor.rehearsal.engine import allocation, cuda_objects, put, put_all, session, wrap

_CACHED_PLANS: Final = 4096  # CUFFT_MAX_PLAN_NUM


class _Nvtx:
    """``torch._C._nvtx``: marks go nowhere, and ranges only keep their depth."""

    def __init__(self) -> None:
        self._depth = 0
        self._numbers = count(1)

    def rangePushA(self, _message: str) -> int:  # noqa: N802 - NVTX's names
        """Begin a nested range."""
        self._depth += 1
        return self._depth - 1

    def rangePop(self) -> int:  # noqa: N802
        """End the innermost range; return -1 if there is none, as NVTX does."""
        if not self._depth:
            return -1
        self._depth -= 1
        return self._depth

    def rangeStartA(self, *_: Any) -> int:  # noqa: N802
        """Begin a range that may end in another thread."""
        return next(self._numbers)

    deviceRangeStart = rangeStartA  # noqa: N815 - on a stream
    rangeEnd = markA = deviceRangeEnd = cuda_objects.nothing  # noqa: N815


def _tuning() -> dict[str, Callable[..., Any]]:
    """Return the C functions of ``torch.cuda.tunable`` by name; nothing is timed, so none tunes."""
    flags: dict[str, Any] = {"tunableop": False, "tunableop_tuning": True, "record_untuned": False}
    # PyTorch's defaults (aten/src/ATen/cuda/tunable/Tunable.h)
    others: dict[str, Any] = {
        "filename": "tunableop_results.csv", "max_tuning_duration": 30,
        "max_tuning_iterations": 100, "rotating_buffer_size": 0,
    }  # fmt: skip
    found: dict[str, Callable[..., Any]] = {
        "_cuda_tunableop_get_results": tuple,
        "_cuda_tunableop_get_validators": tuple,
        "_cuda_tunableop_read_file": lambda *_: True,
        "_cuda_tunableop_write_file": lambda *_: True,
    }
    for name in flags:
        found[f"_cuda_{name}_enable"] = partial(_set, flags, name)
        found[f"_cuda_{name}_is_enabled"] = partial(flags.get, name)
    for name in others:
        found[f"_cuda_tunableop_get_{name}"] = partial(others.get, name)
        found[f"_cuda_tunableop_set_{name}"] = partial(_set, others, name)
    return found


def _set(values: dict[str, Any], name: str, value: Any, *_: Any) -> None:
    values[name] = value


class GreenContext:
    """``torch.cuda.green_contexts.GreenContext``: a share of the multiprocessors, no memory."""

    @staticmethod
    def create(*_: Any, **__: Any) -> GreenContext:
        """Create a context."""
        return GreenContext()

    set_context = pop_context = cuda_objects.nothing

    def Stream(self) -> Any:  # noqa: N802 - PyTorch's name
        """Return a stream of the context."""
        return cuda_objects.Stream()


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

    def clear(self) -> None:
        """Do nothing, as there is no plan."""


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


def _jit(
    _code: str, _name: str, _by_reference: bool, n_outputs: int, tensors: Any, _values: Any
) -> Any:
    """Return the result of a kernel written as text: elementwise, in the dtype of its inputs."""
    size = torch.broadcast_shapes(*(t.shape for t in tensors))
    made = [tensors[0].new_empty(size) for _ in range(n_outputs)]
    return made[0] if len(made) == 1 else tuple(made)


_DO_NOTHING: Final = (
    "_cuda_tunableop_write_file_on_exit", "_cuda_tunableop_set_numerical_check_tolerances",
    "_cuda_setCublasLtWorkspaceSize", "_nccl_all_reduce", "_nccl_reduce", "_nccl_broadcast",
    "_nccl_all_gather", "_nccl_reduce_scatter", "_set_linalg_preferred_backend",
    "_gds_register_buffer", "_gds_deregister_buffer", "_gds_deregister_handle", "_gds_load_storage",
    "_gds_save_storage",
)  # fmt: skip
_IN_C: Final[dict[str, Callable[..., Any]]] = {
    **dict.fromkeys(_DO_NOTHING, cuda_objects.nothing),
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
    "_cuda_jiterator_compile_and_launch_kernel": _jit,
    "_cuda_changeCurrentAllocator": _not_rehearsed("allocator but PyTorch's own"),
    "_cuda_customAllocator": _not_rehearsed("allocator but PyTorch's own"),
    "_cuda_getAllocator": _not_rehearsed("allocator object of PyTorch's"),
    "_cuda_cudaHostAllocator": _not_rehearsed("allocator object for pinned memory"),
    "_cuda_allocationTraceback": lambda _address: None,
    "_nccl_unique_id": lambda: b"",
    "_nccl_init_rank": lambda *_: 0,
    "_gds_register_handle": lambda *_: 0,
}
_FIGURES: Final = {  # what NVIDIA's management library would say of the GPU
    "utilization": 0, "temperature": 40, "power_draw": 100_000, "clock_rate": 1980,
    "memory_usage": 0,
}  # fmt: skip


def _device_memory_used(device: Any = None) -> int:
    free, total = torch.cuda.mem_get_info(device)
    return int(total - free)


def install(undo: ExitStack) -> None:
    """Install these functions until ``undo`` is closed."""
    put_all(undo, torch._C, {**_IN_C, **_tuning()})
    put(undo, torch.cuda.nvtx, "_nvtx", _Nvtx())
    put(undo, torch.autograd.profiler, "emit_nvtx", lambda *_, **__: nullcontext())
    wrap(undo, torch.autograd.profiler.profile, "__init__", _profile)
    put(undo, torch.cuda.green_contexts, "GreenContext", GreenContext)
    put(undo, torch.backends.cuda, "cufft_plan_cache", _Plans())
    external = lambda _pointer, device=None, **_: cuda_objects.Stream(device)  # noqa: E731
    put(undo, torch.cuda, "ExternalStream", external)
    types = [kind for kind in vars(torch).values() if type(kind) is type(torch.FloatTensor)]
    for kind in types:
        made = _TypeOfTensors(_OF_GPU + kind.__name__, (), {"dtype": kind.dtype})
        put(undo, torch.cuda, kind.__name__, made)
    put(undo, torch, "set_default_tensor_type", _set_default_type)
    for name, figure in _FIGURES.items():
        put(undo, torch.cuda, name, lambda _device=None, figure=figure: figure)
    if hasattr(torch.cuda, "device_memory_used"):
        put(undo, torch.cuda, "device_memory_used", _device_memory_used)
