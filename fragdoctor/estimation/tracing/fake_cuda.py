"""A process without a GPU in which fake CUDA tensors behave as CUDA tensors, autograd included.

Fake tensors carry the device ``cuda`` through the dispatcher in any build of PyTorch, so that
autocast, fused dropout, attention kernels and foreach optimizers are chosen as on a GPU. Two
things stand in the way without one, and both are put aside for as long as a trace runs:

* C++ asks the table of device guards for CUDA's. PyTorch has a guard for fake tensors and installs
  it in place of a guard that counts no devices; a build without CUDA has none to replace, so one
  that answers 0 to everything is offered for the moment of the exchange.
* The autograd engine asks the CUDA hooks whether CUDA is built in and has a context. Both are
  answered with yes, in a copy of the hooks' method table. Where they stand in the table differs
  between versions; they are found by trying, with a question whose answer shows it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, Self
from unittest import mock

import torch
from torch import library as torch_library
from torch._prims_common import suggest_memory_format
from torch._subclasses import fake_tensor

from fragdoctor.errors import ConfigError
from fragdoctor.estimation.tracing import attention
from fragdoctor.units import GIB

CUDA: Final = 1
POINTER: Final = ctypes.sizeof(ctypes.c_void_p)
TABLE_HEAD: Final = 2  # before the methods: offset to top, and type information
TABLE_LENGTH: Final = 128
# Every operation that has both a CUDA kernel and a written-out form.
FUSED_ON_CUDA: Final = ("silu_backward", "mish_backward", "_fused_rms_norm")
FIRST_METHOD, LAST_METHOD = 2, 48
_ANSWER_0: Final = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 0)
_ANSWER_1: Final = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 1)
_KEPT: list[object] = []  # what C++ points to from now on


class FakeMode(fake_tensor.FakeTensorMode):
    """Fake tensors that never touch a device."""

    @property
    def avoid_device_init(self) -> bool:
        """Tell PyTorch that there is no device to initialise, whatever ``torch.cuda`` says."""
        return True


@dataclass(frozen=True, slots=True)
class _Switch:
    """A place in PyTorch's memory, what stands there, and what fake CUDA needs there."""

    place: ctypes.c_void_p
    original: int | None
    pretended: int | None


@cache
def _switches() -> tuple[_Switch, ...]:
    """Find what has to be exchanged for autograd to work on fake CUDA tensors; done once.

    Raises:
        ConfigError: this build of PyTorch does not have what is needed.
    """
    # Dispatch modes import it sooner or later, and it must not see patched functions.
    import torch._dynamo

    try:
        guard = _guard()
        guard.place.value = guard.pretended
        try:
            return guard, _hooks()
        finally:
            guard.place.value = guard.original
    except (AttributeError, OSError, ValueError) as err:
        raise ConfigError(
            f"This build of PyTorch ({torch.__version__}) cannot run a model on fake CUDA tensors.",
            hint="Use PyTorch 2.6 or newer on Linux, or estimate by formula from a config.json.",
        ) from err


def _library(name: str) -> ctypes.CDLL:
    folder = Path(torch.__file__).parent / "lib"
    return ctypes.CDLL(str(next(iter(sorted(folder.glob(f"lib{name}.*"))), folder / name)))


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _guard() -> _Switch:
    """CUDA's entry in the table of device guards."""
    table = ctypes.addressof(
        ctypes.c_void_p.in_dll(_library("c10"), "_ZN3c104impl26device_guard_impl_registryE")
    )
    place = ctypes.c_void_p.from_address(table + CUDA * POINTER)
    original = place.value
    if original is None:
        methods = (ctypes.c_void_p * TABLE_LENGTH)(*[_address(_ANSWER_0)] * TABLE_LENGTH)
        stand_in = (ctypes.c_void_p * 1)(ctypes.addressof(methods))
        _KEPT.extend([methods, stand_in])
        place.value = ctypes.addressof(stand_in)
    before = place.value
    torch._C._ensureCUDADeviceGuardSet()
    pretended, place.value = place.value, original
    if original is None and pretended == before:
        raise ValueError("the guard was not replaced")
    return _Switch(place, original, pretended)


def _hooks() -> _Switch:
    """The method table of the CUDA hooks, in a copy that answers the two questions with yes."""
    get_hooks = _library("torch_cpu")["_ZN2at6detail12getCUDAHooksEv"]
    get_hooks.restype = ctypes.c_void_p
    place = ctypes.c_void_p.from_address(get_hooks())
    original = place.value or 0
    head = TABLE_HEAD * POINTER
    table_type = ctypes.c_void_p * TABLE_LENGTH
    table = table_type(*table_type.from_address(original - head))
    _KEPT.append(table)
    place.value = ctypes.addressof(table) + head
    try:
        _answer_yes(table, _cuda_is_built)
        _answer_yes(table, _backward_works)
        return _Switch(place, original, place.value)
    finally:
        place.value = original


def _keep_fused() -> torch_library.Library:
    """Return a library that gives operations with a CUDA kernel one in builds without CUDA.

    Without one PyTorch writes them out in several operations, which take more memory. The kernel is
    never called: on fake tensors only shapes are computed.
    """
    library = torch_library.Library("aten", "IMPL")
    for name in FUSED_ON_CUDA:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA"):
            library.impl(name, _nothing, "CUDA")
    return library


def _answer_yes(table: ctypes.Array[ctypes.c_void_p], wanted: Callable[[], bool]) -> None:
    """Find the method whose yes brings about what is wanted, and leave it so."""
    if wanted():
        return
    for number in range(TABLE_HEAD + FIRST_METHOD, TABLE_HEAD + LAST_METHOD):
        original = table[number]
        table[number] = _address(_ANSWER_1)
        if wanted():
            return
        table[number] = original
    raise ValueError("no method of the hooks was the one")


def _cuda_is_built() -> bool:
    accelerator = torch._C._accelerator_getAccelerator
    return str(accelerator()) == "cuda"


def _backward_works() -> bool:
    with _patched(SimpleNamespace(total_bytes=GIB, name="", capability=(9, 0))), FakeMode():
        try:
            torch.empty(1, device="cuda", requires_grad=True).mul(2).sum().backward()
        except RuntimeError:
            return False
    return True


@contextmanager
def pretend_cuda(
    *, total_bytes: int, name: str, capability: tuple[int, int], allocated: Callable[[], int]
) -> Iterator[None]:
    """Answer questions to ``torch.cuda`` as a machine with one such GPU would.

    Args:
        total_bytes: memory of the GPU.
        name: what ``get_device_name`` says.
        capability: compute capability; decides which attention kernel is taken.
        allocated: tells the bytes allocated so far, for ``memory_allocated()``.
    """
    switches = _switches()
    attention.set_capability(capability)
    gpu = SimpleNamespace(total_bytes=total_bytes, name=name, capability=capability)
    with ExitStack() as stack:
        for switch in switches:
            stack.callback(setattr, switch.place, "value", switch.original)
            switch.place.value = switch.pretended
        for library in (attention.install(), _keep_fused()):
            stack.callback(library._destroy)
        stack.enter_context(_patched(gpu, allocated))
        yield


def _swap_tensors(first: Any, second: Any) -> None:
    """Swap two tensors as PyTorch does when a fake module moves, whoever holds them.

    PyTorch refuses where weak references are around; fake tensors have some, in tables that are
    only there to give the same fake for the same original.
    """
    for name in ("__class__", "__dict__"):
        old = getattr(first, name)
        setattr(first, name, getattr(second, name))
        setattr(second, name, old)
    torch._C._swap_tensor_impl(first, second)


def _layout(inputs: torch.Tensor, weight: torch.Tensor, _backend: object) -> torch.memory_format:
    """Return what cuDNN's convolutions give: channels last if input or weight has it."""
    layouts = [suggest_memory_format(t) for t in (inputs, weight)]
    return next((f for f in layouts if f is not torch.contiguous_format), torch.contiguous_format)


def _yes(*_: object, **__: object) -> bool:
    return True


def _nothing(*_: object, **__: object) -> None:
    return None


class _FakeStream:
    """A stream or event on which everything is done at once."""

    def __init__(self, *_: object, **__: object) -> None:
        self.device = torch.device("cuda", 0)
        self.cuda_stream = self.stream_id = self.device_index = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def query(self) -> bool:
        return True

    def elapsed_time(self, *_: object) -> float:
        return 1.0

    def record_event(self, event: object = None) -> object:
        return event or _FakeStream()

    record = wait = wait_event = wait_stream = synchronize = _nothing


def _answers(gpu: SimpleNamespace, allocated: Callable[[], int]) -> dict[str, object]:
    """What ``torch.cuda`` says, by the name of the function."""
    major, minor = gpu.capability
    facts = SimpleNamespace(
        name=gpu.name,
        total_memory=gpu.total_bytes,
        major=major,
        minor=minor,
        multi_processor_count=132,
        warp_size=32,
        is_integrated=False,
        gcnArchName="",
    )

    def count(*_: object, **__: object) -> int:
        return allocated()

    def stream(*_: object, **__: object) -> _FakeStream:
        return _FakeStream()

    quiet = (
        "_lazy_init", "init", "synchronize", "empty_cache", "set_device", "manual_seed",
        "manual_seed_all", "seed", "seed_all", "set_rng_state", "set_rng_state_all", "ipc_collect",
        "reset_peak_memory_stats", "reset_accumulated_memory_stats",
        "set_per_process_memory_fraction", "set_stream",
    )  # fmt: skip
    return {
        **dict.fromkeys(quiet, _nothing),
        "_initialized": True,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda *_, **__: major >= 8,
        "is_current_stream_capturing": lambda: False,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "_exchange_device": lambda _: -1,
        "_maybe_exchange_device": lambda _: -1,
        "get_device_name": lambda *_: gpu.name,
        "get_device_capability": lambda *_: gpu.capability,
        "get_device_properties": lambda *_: facts,
        "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8, device="cpu"),
        "get_rng_state_all": lambda: [torch.zeros(16, dtype=torch.uint8, device="cpu")],
        "initial_seed": lambda: 0,
        "memory_allocated": count,
        "max_memory_allocated": count,
        "memory_reserved": count,
        "max_memory_reserved": count,
        "memory_stats": lambda *_, **__: {},
        "mem_get_info": lambda *_: (gpu.total_bytes - allocated(), gpu.total_bytes),
        "current_stream": stream,
        "default_stream": stream,
        "stream": stream,
        "Stream": _FakeStream,
        "Event": _FakeStream,
    }


@contextmanager
def _patched(gpu: SimpleNamespace, allocated: Callable[[], int] = lambda: 0) -> Iterator[None]:
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    with ExitStack() as stack:
        for name, answer in _answers(gpu, allocated).items():
            if hasattr(torch.cuda, name):
                stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        stack.enter_context(mock.patch.object(torch.accelerator, "is_available", _yes))
        stack.enter_context(mock.patch.object(torch.utils, "swap_tensors", _swap_tensors))
        if hasattr(fake_tensor, "init_gpu_context"):
            stack.enter_context(mock.patch.object(fake_tensor, "init_gpu_context", _nothing))
        if hasattr(torch._C, "_conv_determine_backend_memory_format"):
            stack.enter_context(
                mock.patch.object(torch._C, "_conv_determine_backend_memory_format", _layout)
            )
        # On a GPU parameters are plain tensors, for which optimizers take foreach kernels.
        for module in (optimizer, _foreach_utils):
            kinds = getattr(module, "_foreach_supported_types", None)
            if kinds is not None:
                wider = [*kinds, fake_tensor.FakeTensor]
                stack.enter_context(mock.patch.object(module, "_foreach_supported_types", wider))
        # Backward runs in this thread, where the modes are.
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        yield
