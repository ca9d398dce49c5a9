"""``torch.cuda`` on fake GPUs.

``torch.cuda`` is Python on top of a hundred C functions (``torch._C._cuda_*``) that builds without
CUDA lack. They are added, so that PyTorch's own Python runs on them and makes statistics,
summaries, snapshots and streams from real figures. Classes with a base in C are replaced.
"""

from __future__ import annotations

import os
from ctypes import c_int64
from types import SimpleNamespace
from typing import Any, Final, Self

import torch
import torch.cuda.graphs
import torch.cuda.memory

from fragdoctor.rehearsal.engine import cuda_objects, cuda_tools, dispatch, put, put_all, session
from fragdoctor.rehearsal.engine.cuda_objects import Event, Stream
from fragdoctor.rehearsal.engine.memory_history import History, snapshot

_Generator: Any = torch.Generator


class Generator(_Generator):  # type: ignore[misc]
    """``torch.Generator``."""

    def __new__(cls, device: Any = "cpu") -> Self:
        """Make a generator for a device."""
        place = torch.device(device)
        is_of_gpu = place.type == "cuda"
        made = _Generator.__new__(_OfGpu if is_of_gpu else cls, "cpu" if is_of_gpu else place)
        made._place = place
        return made  # type: ignore[no-any-return]

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()


class _OfGpu(Generator):
    """A CPU generator that reports a GPU as its device; nothing in its state matters here."""

    @property
    def device(self) -> torch.device:
        """The device that the generator was created for."""
        return torch.device("cuda", self._place.index or 0)

    def get_state(self) -> torch.Tensor:
        """Return a state in the form of a GPU's generator: seed and offset."""
        return torch.tensor([self.initial_seed() % 2**63, 0]).view(torch.uint8).clone()

    def clone_state(self) -> Generator:
        """Return a copy for the same device, such as graphs with random numbers keep."""
        return Generator(self._place)

    def set_state(self, *_: Any) -> Self:
        """Return the generator."""
        return self

    graphsafe_get_state = graphsafe_set_state = set_state


POOLS: Final = ("all", "large_pool", "small_pool")
KINDS: Final = (
    "allocation", "segment", "active", "inactive_split", "allocated_bytes", "reserved_bytes",
    "active_bytes", "inactive_split_bytes", "requested_bytes",
)  # fmt: skip
FIGURES: Final = ("current", "peak", "allocated", "freed")
N_STATISTICS: Final = len(KINDS) * len(POOLS) + 2


def statistics(now: session.Session, device: int) -> dict[str, Any]:
    """Return the nested statistics of a device, as ``torch._C._cuda_memoryStats`` does."""
    values = (c_int64 * (len(FIGURES) * N_STATISTICS))()
    now.gpus.statistics(device, values)
    width = len(FIGURES)
    rows = [
        dict(zip(FIGURES, values[at : at + width], strict=True))
        for at in range(0, len(values), width)
    ]
    by_pool = [
        dict(zip(POOLS, rows[at : at + len(POOLS)], strict=True))
        for at in range(0, len(rows) - 2, len(POOLS))
    ]
    figures = now.gpus.figures(device)
    limit = now.settings.max_split_bytes
    return {
        **dict(zip(KINDS, by_pool, strict=True)),
        "oversize_allocations": rows[-2],
        "oversize_segments": rows[-1],
        "max_split_size": -1 if limit is None else limit,
        "num_alloc_retries": figures["retries"],
        "num_device_alloc": figures["n_malloc"] + figures["n_map"],
        "num_device_free": figures["n_free"] + figures["n_unmap"],
        "num_ooms": figures["ooms"],
        "num_sync_all_streams": 0,
    }


CUDA_TYPE: Final = 1
ARCHITECTURES: Final = "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120"


def _now() -> session.Session:
    return session.current()


def _empty_cache() -> None:
    _now().gpus.empty_cache()


def _index(device: Any) -> int:
    return _now().gpus.device() if device is None or device < 0 else int(device)


# ---- devices and streams ----------------------------------------------------------------------


def _set_device(device: int) -> None:
    if device >= _now().n_devices:
        error = getattr(torch, "AcceleratorError", RuntimeError)
        raise error("CUDA error: invalid device ordinal")
    _now().gpus.set_device(device)


def _exchange_device(device: int) -> int:
    before: int = _now().gpus.device()
    if device >= 0:
        _now().gpus.set_device(device)
    return before


def _maybe_exchange_device(device: int) -> int:
    return _exchange_device(device)  # Dynamo tells the two apart


def _set_stream(stream_id: int, device_index: int, *_: Any, **__: Any) -> None:
    _now().gpus.set_device(device_index)
    _now().gpus.set_stream(device_index, stream_id)


def _properties(*_: Any, **__: Any) -> Any:
    facts, (major, minor) = _now().facts, _now().capability
    kind = facts.generation
    return _Properties(
        name=facts.title,
        total_memory=_now().total_bytes,
        major=major,
        minor=minor,
        multi_processor_count=facts.n_multiprocessors,
        max_threads_per_multi_processor=kind.threads_per_multiprocessor,
        max_threads_per_block=1024,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=kind.block_shared_memory_bytes,
        shared_memory_per_multiprocessor=kind.shared_memory_bytes,
        L2_cache_size=facts.l2_cache_bytes,
        warp_size=32,
        is_integrated=0,
        is_multi_gpu_board=0,
        gcnArchName="",
        uuid="00000000-0000-0000-0000-000000000000",
        clock_rate=1980000,
        memory_clock_rate=2619000,
        memory_bus_width=5120,
        pci_bus_id=0,
        pci_device_id=0,
        pci_domain_id=0,
    )


class _Properties(SimpleNamespace):
    """``torch.cuda.get_device_properties``."""


def _configuration() -> str:
    """``torch.__config__.show``, which builds with CUDA cannot answer without a driver."""
    try:
        return str(_show_config())
    except RuntimeError:
        return f"PyTorch built with:\n  - CUDA Runtime {torch.version.cuda}\n"


_show_config: Final = torch._C._show_config


# ---- memory -----------------------------------------------------------------------------------


def _mem_get_info(device: Any = None) -> tuple[int, int]:
    index = device.index if isinstance(device, torch.device) else device
    figures, total = _now().gpus.figures(_index(index)), _now().total_bytes
    return min(figures["driver_free"], max(0, total - figures["reserved"])), total


def _set_fraction(fraction: float, device: int) -> None:
    now = _now()
    if not now.is_unlimited:
        now.gpus.set_fraction(_index(device), fraction)
    now.fractions[_index(device)] = fraction


def _change_settings(text: str) -> None:
    _now().start()
    _now().change_settings(text)


def _record_history(
    enabled: str | None = "all",
    context: str | None = "all",
    _stacks: str = "all",
    max_entries: int = 2**63 - 1,
    *rest: Any,
) -> None:
    now = _now()
    skipped = rest[-1] if rest and isinstance(rest[-1], list) else []
    keeps = now.history is not None and now.history.enabled == "all" and enabled == "all"
    clears = bool(rest and rest[0] is True)
    if keeps and not clears and now.history is not None:
        first, first_mark = now.history.first, now.history.first_mark
    else:
        first = {d: now.gpus.figures(d)["events"] for d in range(now.n_devices)}
        first_mark = len(now.marks.annotations)
    limit = max_entries if enabled == "all" else 1
    now.history = History(enabled, context, max(limit, 1), tuple(skipped), first, first_mark)


def _record_history_legacy(
    enabled: bool,
    record_context: bool = True,
    trace_alloc_max_entries: int = 1,
    trace_alloc_record_context: bool = False,
    *_: Any,
) -> None:
    context = "alloc" if trace_alloc_record_context else "state" if record_context else None
    _record_history("all" if enabled else None, context, "python", trace_alloc_max_entries)


def _memory_snapshot(pool: Any = None) -> dict[str, Any]:
    now = _now()
    history = now.history or History(enabled=None)
    marks = now.marks.of_pytorch(history.first_mark) if history.enabled else []
    return snapshot(now, history, marks, only_pool=None if pool is None else (pool[0], pool[1]))


def _attach_observer(observer: Any) -> None:
    def tell(device: int, requested: int) -> None:
        figures = _now().gpus.oom_figures(device)
        limit = figures["allowed_bytes"]
        total = figures["total_bytes"] if limit is None else limit
        observer(device, requested, total, figures["free_bytes"])

    _now().on_oom.append(tell)


_DO_NOTHING: Final = (
    "_cuda_sleep", "_cuda_ipc_collect", "_cuda_cudaCachingAllocator_enable",
    "_cuda_set_sync_debug_mode", "_cuda_resetPeakHostMemoryStats",
    "_cuda_resetAccumulatedHostMemoryStats", "_cuda_setMemoryMetadata",
    "_cuda_set_cudnn_benchmark_limit", "_host_emptyCache", "_accelerator_emptyHostCache",
)  # fmt: skip
_DTYPES: Final = [value for value in vars(torch).values() if isinstance(value, torch.dtype)]
_PRIMITIVES: Final[dict[str, Any]] = {
    **dict.fromkeys(_DO_NOTHING, lambda *_, **__: None),
    "_cuda_init": lambda: _now().start(),
    "_cuda_getDeviceCount": lambda: _now().n_devices,
    "_cuda_getDevice": lambda: int(_now().gpus.device()),
    "_cuda_setDevice": _set_device,
    "_cuda_exchangeDevice": _exchange_device,
    "_cuda_maybeExchangeDevice": _maybe_exchange_device,
    "_cuda_hasPrimaryContext": lambda _device: True,
    "_cuda_isInBadFork": lambda: False,
    "_cuda_canDeviceAccessPeer": lambda a, b: a != b,
    "_cuda_getCurrentStream": lambda d: (_now().gpus.stream(d), _index(d), CUDA_TYPE),
    "_cuda_getDefaultStream": lambda d: (0, _index(d), CUDA_TYPE),
    "_cuda_setStream": _set_stream,
    "_cuda_getCurrentRawStream": lambda d: _now().gpus.stream_handle(_now().gpus.stream(d)),
    "_cuda_getCurrentBlasHandle": lambda: 1,
    "_cuda_clearCublasWorkspaces": dispatch.clear_blas_workspaces,
    "_cuda_synchronize": lambda: _now().gpus.synchronize(-1),
    "_cuda_getCompiledVersion": lambda: 13000,
    "_cuda_getArchFlags": lambda: ARCHITECTURES,
    "_cuda_getAllocatorBackend": lambda: "native",
    "_cuda_cudaCachingAllocator_is_enabled": lambda: True,
    "_cuda_get_sync_debug_mode": lambda: 0,
    "_cuda_emptyCache": _empty_cache,
    "_cuda_memoryStats": lambda device: statistics(_now(), _index(device)),
    "_cuda_resetPeakMemoryStats": lambda device: _now().gpus.reset_peaks(_index(device)),
    "_cuda_resetAccumulatedMemoryStats": lambda device: _now().gpus.reset_sums(_index(device)),
    "_cuda_hostMemoryStats": dict,
    "_cuda_setMemoryFraction": _set_fraction,
    "_cuda_getMemoryFraction": lambda device: _now().fractions.get(_index(device), 1.0),
    "_cuda_record_memory_history": _record_history,
    "_cuda_record_memory_history_legacy": _record_history_legacy,
    "_cuda_isHistoryEnabled": lambda: getattr(_now().history, "enabled", None) is not None,
    "_cuda_memorySnapshot": _memory_snapshot,
    "_cuda_attach_out_of_memory_observer": _attach_observer,
    "_cuda_getMemoryMetadata": lambda: "",
    "_cuda_isCurrentStreamCapturing": lambda: bool(_now().captures),
    "_cuda_cudaCachingAllocator_set_allocator_settings": _change_settings,
    "_accelerator_setAllocatorSettings": _change_settings,
    "_accelerator_emptyCache": _empty_cache,
    "_accelerator_getDeviceStats": lambda device: statistics(_now(), _index(device)),
    "_accelerator_resetPeakStats": lambda device: _now().gpus.reset_peaks(_index(device)),
    "_accelerator_resetAccumulatedStats": lambda device: _now().gpus.reset_sums(_index(device)),
    "_accelerator_getMemoryInfo": _mem_get_info,
    "_accelerator_getDeviceCapability": lambda _device: {"supported_dtypes": {*_DTYPES}},
    "_accelerator_isAllocatorInitialized": lambda: True,
    "_get_cudnn_batch_norm_reserve_space_size": lambda *_: 0,
    "_CudaDeviceProperties": _Properties,
    "_show_config": _configuration,
    "_has_cuda": True,
    "_has_cudnn": True,
    "_cuda_get_cudnn_benchmark_limit": lambda: 10,
    "_nccl_version": lambda: 2 << 32 | 27 << 16 | 3,
    "_nccl_version_suffix": lambda: b"",
}


_SUCCEEDING: Final = (
    "cudaProfilerStart", "cudaProfilerStop", "cudaHostRegister", "cudaHostUnregister",
    "cudaStreamCreate", "cudaStreamDestroy",
)  # fmt: skip
_CUDART: Final = SimpleNamespace(
    cudaMemGetInfo=_mem_get_info,
    cudaGetErrorString=str,
    cudaError=SimpleNamespace(success=0),
    **dict.fromkeys(_SUCCEEDING, lambda *_: 0),
)
"""The functions of the CUDA runtime that PyTorch binds."""


def visible_devices(n_devices: int) -> int:
    """Return how many of the GPUs ``CUDA_VISIBLE_DEVICES`` leaves visible.

    If it hides every GPU from the start, it speaks of this machine's, not of those rehearsed.
    """
    n_named = len(torch.cuda._parse_visible_devices())
    is_of_program = n_named or os.environ.get("CUDA_VISIBLE_DEVICES") != _AT_START
    return min(n_devices, n_named) if is_of_program else n_devices


_AT_START: Final = os.environ.get("CUDA_VISIBLE_DEVICES")


def install() -> None:
    """Make ``torch.cuda`` see the fake GPUs."""
    put_all(torch._C, _PRIMITIVES)
    put(torch, "Generator", Generator)
    cuda_objects.install()
    cuda_tools.install()
    of_cuda = {
        "_cudart": _CUDART,
        "is_available": lambda: torch.cuda.device_count() > 0,
        "device_count": lambda: visible_devices(_now().n_devices),
        "_device_count_nvml": lambda: -1,
        "_nvml_based_avail": lambda: False,
        "_exchange_device": _exchange_device,
        "_maybe_exchange_device": _maybe_exchange_device,
        "_CudaDeviceProperties": _Properties,
        "_get_device_properties": _properties,
        "get_device_properties": _properties,
        "has_half": True,
        "is_bf16_supported": lambda *_, **__: _now().capability >= (8, 0),
        "_initialized": False,
        "default_generators": tuple(Generator(f"cuda:{i}") for i in range(_now().n_devices)),
    }
    put_all(torch.cuda, of_cuda)
    for module in (torch.cuda, torch.cuda.streams):
        put_all(module, {"Stream": Stream, "Event": Event})
    put(torch.cuda.graphs, "_cuda_isCurrentStreamCapturing", lambda: bool(_now().captures))
    put(torch.cuda.memory, "_set_allocator_settings", _change_settings)
    if torch.version.cuda is None:
        put(torch.version, "cuda", "13.0")
    put(torch.backends.cuda, "is_built", lambda: True)
    put(torch.backends.cudnn, "is_available", lambda: True)
    put(torch.backends.cudnn, "version", lambda: 91900)
