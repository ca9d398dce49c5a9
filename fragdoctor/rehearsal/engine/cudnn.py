"""Workspaces of convolutions, as reported by cuDNN itself.

Since 9.8 cuDNN can plan operations for a device that is only described (NVIDIA, "Deviceless
Ahead-of-time Compilation"): its heuristics and the plans' workspaces need no GPU. PyTorch takes the
first plan of the heuristics that can be built (``aten/src/ATen/native/cudnn/Conv_v8.cpp``); so does
this module, through cuDNN's C interface. Every CUDA build of PyTorch comes with the library.

Compared with 9,000 convolutions of random shapes on an H200 (PyTorch 2.11, cuDNN 9.19), the
workspaces of forward passes and of input gradients are equal in 75% of cases, and in 87% they
differ by at most 1% of the size of the three tensors; for weight gradients it is 62% and 72%.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from math import prod
from pathlib import Path
from typing import Any, Final

import torch

from fragdoctor.model.gpus import GpuModel
from fragdoctor.model.marks import WORKSPACE
from fragdoctor.rehearsal.engine import session
from fragdoctor.rehearsal.engine.allocation import (
    dense_strides,
    in_engine_thread,
    take_and_give,
)
from fragdoctor.rehearsal.engine.tensors import strides_for

FIRST_VERSION: Final = 90800
"""``CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR`` came with 9.8."""

# Constants of ``cudnn_graph_v9.h``.
_TENSOR, _CONVOLUTION, _ENGINE, _CONFIG, _HEURISTICS, _PLAN, _GRAPH, _DEVICE = (
    17, 1, 2, 3, 4, 5, 15, 38
)  # fmt: skip
_DTYPE, _INT64, _FLOAT, _DOUBLE, _MODE, _HEURISTIC_MODE, _NOTE, _DESCRIPTOR, _CHAR = (
    1, 3, 4, 5, 7, 8, 11, 15, 24
)  # fmt: skip
_OPERATIONS: Final = {
    "forward": (10, 700, 701, 702, 703, 704, 705),
    "backward_data": (12, 706, 707, 708, 709, 710, 711),
    "backward_filter": (11, 712, 713, 714, 715, 716, 717),
}
"""Operation -> its descriptor, and attributes alpha, beta, convolution, weight, input, result."""
_DTYPES: Final = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 9}
_USES_TENSOR_CORES, _ROUNDS_INPUTS, _IS_NONDETERMINISTIC = 0, 1, 4
_INSTANT, _FALLBACK = 0, 2
_CROSS_CORRELATION = 1
_ALIGNED: Final = 16
"""PyTorch tells cuDNN of no larger alignment than this, and the allocator's blocks have it."""


def strides_of(shape: Sequence[int], *, is_channels_last: bool) -> tuple[int, ...]:
    """Return the strides of a dense tensor, in elements."""
    by_dims = {4: torch.channels_last, 5: torch.channels_last_3d}
    layout = by_dims[len(shape)] if is_channels_last else None
    return strides_for(shape, layout) or dense_strides(shape)


@dataclass(frozen=True, slots=True)
class Convolution:
    """One call of cuDNN; the number of groups follows from the shapes.

    Attributes:
        operation: ``forward``, ``backward_data`` or ``backward_filter``.
        input, weight, result: shapes of the forward pass, whichever operation this is.
        is_channels_last: for each of the three, whether its channels are adjacent in memory.
    """

    operation: str
    dtype: torch.dtype
    input: tuple[int, ...]
    weight: tuple[int, ...]
    result: tuple[int, ...]
    is_channels_last: bool
    padding: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]


def take(convolution: Convolution, device: int) -> None:
    """Take the scratch memory of a call on a GPU and give it back, as PyTorch does.

    If the workspace of a plan cannot be allocated, the next plan is tried (``try_configs`` in
    ``Conv_v8.cpp``). If cuDNN is not installed or knows no plan, the workspace is what most of its
    kernels take: a channels-last copy of each of the three tensors that is not in that layout.

    With ``torch.backends.cudnn.benchmark`` the plans of a new call are tried first, and then unused
    cached memory is returned to the driver (``run_single_conv`` in the same file).

    Raises:
        RuntimeError: no plan's workspace can be allocated.
    """
    session.current().libraries["cuDNN"] = 1
    tries = torch.backends.cudnn.benchmark
    plans = _plans_here(convolution, wants_all=tries)
    if not plans:
        session.note(_WITHOUT if _library() is None else _UNPLANNED)
        shapes = (convolution.input, convolution.weight, convolution.result)
        copies = 0 if convolution.is_channels_last else sum(map(prod, shapes))
        plans = (copies * convolution.dtype.itemsize, 0)
    if tries and (in_engine_thread(), convolution) not in _BENCHMARKED:
        _BENCHMARKED.add((in_engine_thread(), convolution))
        session.note(_BENCHMARK)
        with contextlib.suppress(torch.OutOfMemoryError):
            take_and_give(device, max(plans), WORKSPACE)
        if not session.current().captures:
            session.current().gpus.empty_cache()
    at = 0
    while at < len(plans):
        try:
            take_and_give(device, plans[at], WORKSPACE)
        except torch.OutOfMemoryError:  # only now ask for the others
            plans, at = _plans_here(convolution, wants_all=True) or plans, at + 1
            continue
        return
    raise RuntimeError("GET was unable to find an engine to execute this computation")


def _plans_here(convolution: Convolution, *, wants_all: bool) -> tuple[int, ...]:
    flags, now = torch.backends.cudnn, session.current()
    return plans_of(
        convolution,
        now.facts,
        now.total_bytes,
        is_deterministic=flags.deterministic or torch.are_deterministic_algorithms_enabled(),
        allows_tf32=bool(flags.allow_tf32),
        wants_all=wants_all,
    )


_WITHOUT: Final = (
    "cuDNN is not installed in this Python (pip install nvidia-cudnn-cu13): the workspace of a "
    "convolution is assumed to be a copy of each of its tensors, as for most on an H200."
)
_UNPLANNED: Final = (
    "cuDNN has no plan for some convolutions on this GPU: their workspace is assumed to be a copy "
    "of each of their tensors."
)
_BENCHMARK: Final = (
    "torch.backends.cudnn.benchmark: every plan of a convolution is tried once, and the first is "
    "assumed to win."
)
_BENCHMARKED: Final[set[tuple[bool, Convolution]]] = set()
"""Calls whose plans were tried; PyTorch keeps the plan that it chose, for each of its threads."""


@lru_cache(maxsize=100_000)
def plans_of(
    convolution: Convolution,
    facts: GpuModel,
    total_bytes: int,
    *,
    is_deterministic: bool = False,
    allows_tf32: bool = True,
    wants_all: bool = False,
) -> tuple[int, ...]:
    """Return the workspaces of the plans in PyTorch's order: only the first one's, or all."""
    library = _library()
    found = _without_plan(convolution)
    if (found and not wants_all) or library is None or convolution.dtype not in _DTYPES:
        return tuple(found)
    is_float = convolution.dtype is torch.float32
    try:
        device = _device(library, facts, total_bytes)
        graph = _graph(library, convolution)
        for mode in (_INSTANT, _FALLBACK):
            for config in _configs(library, graph, device, mode):
                notes = _notes(library, config)
                if (
                    (is_deterministic and _IS_NONDETERMINISTIC in notes)
                    or (is_float and _ROUNDS_INPUTS in notes)
                    or (is_float and not allows_tf32 and _USES_TENSOR_CORES in notes)
                ):
                    continue
                n_bytes = _workspace(library, config, device)
                if n_bytes is not None:
                    found.append(n_bytes)
                    if not wants_all:
                        return tuple(found)
            if found:
                break
    except _RefusedError:
        return ()
    return tuple(found)


def _without_plan(convolution: Convolution) -> list[int]:
    """Return the workspace of a convolution that cuDNN cannot plan without a device, if it is one.

    A pointwise one is a product of matrices, which cuDNN gives to cuBLASLt: of 258 passes that were
    measured 243 needed nothing (at most 400 bytes), and in 94 of 129 others the gradient of the
    weight was first computed for each sample, in float. Kernels with one filter for each channel
    took nothing in any of 42 passes (``benchmarks/measured/convolutions_h200.csv``).
    """
    of = convolution
    if of.is_channels_last:
        return []
    if of.weight[1] == 1 < of.input[1]:
        return [0]
    is_one = {*of.weight[2:], *of.stride, *of.dilation} == {1} and not any(of.padding)
    if not is_one or of.weight[1] != of.input[1]:
        return []
    return [of.input[0] * prod(of.weight) * 4 if of.operation == "backward_filter" else 0]


class _RefusedError(Exception):
    """CuDNN rejected what it was given."""


def _check(status: int) -> None:
    if status:
        raise _RefusedError(status)


class _Descriptor:
    """A descriptor of cuDNN's backend API, destroyed together with this object."""

    def __init__(self, library: Any, kind: int) -> None:
        self.library = library
        self.pointer = ctypes.c_void_p()
        self._held: list[Any] = []
        _check(library.cudnnBackendCreateDescriptor(kind, ctypes.byref(self.pointer)))

    def __del__(self) -> None:
        self.library.cudnnBackendDestroyDescriptor(self.pointer)

    def put(self, name: int, kind: int, *values: Any) -> None:
        """Set an attribute to numbers, to other descriptors, or to one raw buffer."""
        first, n = values[0], len(values)
        buffer = first
        if isinstance(first, _Descriptor):
            buffer = ctypes.c_void_p(first.pointer.value)
        elif isinstance(first, int):
            number = ctypes.c_int64 if kind == _INT64 else ctypes.c_int
            buffer = (number * n)(*values)
        elif kind == _CHAR:
            n = len(first)
        self._held += [buffer, *values]
        _check(
            self.library.cudnnBackendSetAttribute(
                self.pointer, name, kind, ctypes.c_int64(n), ctypes.byref(buffer)
            )
        )

    def get(self, name: int, kind: int, buffer: Any, n: int) -> int:
        """Fill a buffer of n elements; return how many elements there are."""
        count = ctypes.c_int64()
        _check(
            self.library.cudnnBackendGetAttribute(
                self.pointer, name, kind, ctypes.c_int64(n), ctypes.byref(count), buffer
            )
        )
        return count.value

    def finish(self) -> _Descriptor:
        _check(self.library.cudnnBackendFinalize(self.pointer))
        return self


@cache
def _device(library: Any, facts: GpuModel, total_bytes: int) -> _Descriptor:
    """Describe the GPU. Clock rates do not affect cuDNN's choices; those of an H100 are given."""
    major, minor = map(int, facts.compute.split("."))
    kind = facts.generation
    text = json.dumps(
        {
            "maxGridSize": [2**31 - 1, 65535, 65535],
            "maxBlockSize": [1024, 1024, 64],
            "regsPerBlock": 65536,
            "multiProcessorCount": facts.n_multiprocessors,
            "warpSize": 32,
            "maxSharedMemoryPerBlock": 49152,
            "maxSharedMemoryPerBlockOptin": kind.block_shared_memory_bytes,
            "reservedSharedMemoryPerBlock": 1024,
            "maxRegistersPerSM": 65536,
            "maxCtasPerSM": 32,
            "maxThreadsPerBlock": 1024,
            "maxThreadsPerSM": kind.threads_per_multiprocessor,
            "pciDeviceId": 0,
            "isTccDriver": 0,
            "supportCoopLaunch": 1,
            "totalGlobalMem": total_bytes,
            "smClockRateKHz": 1_980_000,
            "memClockRateKHz": 2_619_000,
            "l2CacheSize": facts.l2_cache_bytes,
            "cudaDeviceId": 0,
            "deviceVer": 100 * major + 10 * minor,
            "driverVer": 13000,
            "deviceName": facts.title,
        }
    ).encode()
    made = _Descriptor(library, _DEVICE)
    made.put(2702, _CHAR, ctypes.create_string_buffer(text, len(text)))
    return made.finish()


def _graph(library: Any, convolution: Convolution) -> _Descriptor:
    """Describe the operation."""
    dtype = _DTYPES[convolution.dtype]

    def tensor(name: str, shape: tuple[int, ...]) -> _Descriptor:
        made = _Descriptor(library, _TENSOR)
        made.put(901, _DTYPE, dtype)
        strides = strides_of(shape, is_channels_last=convolution.is_channels_last)
        made.put(902, _INT64, *shape)
        made.put(903, _INT64, *strides)
        made.put(906, _INT64, ord(name))
        made.put(900, _INT64, _ALIGNED)
        return made.finish()

    how = _Descriptor(library, _CONVOLUTION)
    is_double = convolution.dtype is torch.float64
    how.put(100, _DTYPE, _DTYPES[torch.float64 if is_double else torch.float32])
    how.put(101, _MODE, _CROSS_CORRELATION)
    how.put(102, _INT64, *convolution.dilation)
    how.put(103, _INT64, *convolution.stride)
    how.put(104, _INT64, *convolution.padding)
    how.put(105, _INT64, *convolution.padding)
    how.put(106, _INT64, len(convolution.stride))
    how.finish()
    kind, alpha, beta, described, weight, input_, result = _OPERATIONS[convolution.operation]
    operation = _Descriptor(library, kind)
    factor, number = (_DOUBLE, ctypes.c_double) if is_double else (_FLOAT, ctypes.c_float)
    operation.put(alpha, factor, number(1))
    operation.put(beta, factor, number(0))
    operation.put(described, _DESCRIPTOR, how)
    operation.put(weight, _DESCRIPTOR, tensor("w", convolution.weight))
    operation.put(input_, _DESCRIPTOR, tensor("x", convolution.input))
    operation.put(result, _DESCRIPTOR, tensor("y", convolution.result))
    graph = _Descriptor(library, _GRAPH)
    graph.put(801, _DESCRIPTOR, operation.finish())
    return graph.finish()


def _configs(library: Any, graph: _Descriptor, device: _Descriptor, mode: int) -> list[_Descriptor]:
    """Return the configurations that the heuristics recommend, best first."""
    heuristics = _Descriptor(library, _HEURISTICS)
    heuristics.put(201, _DESCRIPTOR, graph)
    heuristics.put(200, _HEURISTIC_MODE, mode)
    heuristics.put(204, _DESCRIPTOR, device)
    heuristics.finish()
    n = heuristics.get(202, _DESCRIPTOR, None, 0)
    configs = [_Descriptor(library, _CONFIG) for _ in range(n)]
    pointers = (ctypes.c_void_p * max(1, n))(*[c.pointer for c in configs])
    return configs[: heuristics.get(202, _DESCRIPTOR, pointers, n)]


def _notes(library: Any, config: _Descriptor) -> list[int]:
    """Return the numerical notes of a configuration's engine."""
    engine = _Descriptor(library, _ENGINE)
    config.get(300, _DESCRIPTOR, (ctypes.c_void_p * 1)(engine.pointer), 1)
    notes = (ctypes.c_int * 16)()
    return notes[: engine.get(1303, _NOTE, notes, len(notes))]


def _workspace(library: Any, config: _Descriptor, device: _Descriptor) -> int | None:
    """Return the scratch memory of a plan, in bytes; None if there is no such plan."""
    plan = _Descriptor(library, _PLAN)
    plan.put(401, _DESCRIPTOR, config)
    plan.put(407, _DESCRIPTOR, device)
    try:
        plan.finish()
    except _RefusedError:
        return None
    n_bytes = ctypes.c_int64()
    plan.get(402, _INT64, ctypes.byref(n_bytes), 1)
    return n_bytes.value


@cache
def _library() -> Any | None:
    """Return cuDNN if this Python has a version that can plan without a device."""
    # CuDNN aborts if the cuBLASLt of its CUDA version is missing, and does not say which it needs.
    products = [_loaded(f"libcublasLt.so.{major}") for major in (12, 13)]
    if products == [None, None]:
        return None
    library = _loaded("libcudnn.so.9")
    return library if library is not None and library.cudnnGetVersion() >= FIRST_VERSION else None


def _loaded(name: str) -> Any | None:
    """Return a library that NVIDIA's packages, conda or the system have installed."""
    spec = importlib.util.find_spec("nvidia")
    folders = (spec.submodule_search_locations or ()) if spec else ()
    packaged = [path for one in folders for path in sorted(Path(one).glob(f"*/lib/{name}"))]
    for path in (*packaged, Path(sys.prefix, "lib", name), name):
        try:
            return ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
        except OSError:
            continue
    return None
