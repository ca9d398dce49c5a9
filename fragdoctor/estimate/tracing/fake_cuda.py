"""A process without a GPU in which fake CUDA tensors behave as CUDA tensors, autograd included.

Fake tensors carry the device ``cuda`` through the dispatcher in any build of PyTorch, so that
autocast, fused dropout, attention kernels and foreach optimizers are chosen as on a GPU. Two
things stand in the way without one, and both are put aside for this process alone:

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
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, Self
from unittest import mock

import torch
from torch._subclasses import fake_tensor

from fragdoctor.errors import ConfigError
from fragdoctor.estimate.tracing import attention
from fragdoctor.units import GIB

CUDA: Final = 1
TABLE_HEAD: Final = 2  # before the methods: offset to top, and type information
TABLE_LENGTH: Final = 128
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


@cache
def prepare() -> None:
    """Make autograd on fake CUDA tensors work in this process. Cannot be undone; done once.

    Raises:
        ConfigError: this build of PyTorch does not have what is needed.
    """
    try:
        # Dispatch modes import it sooner or later, and it must not see patched functions.
        import torch._dynamo

        _install_guard()
        _install_hooks()
        _KEPT.append(attention.install())
    except (AttributeError, OSError, ValueError) as err:
        raise ConfigError(
            f"This build of PyTorch ({torch.__version__}) cannot run a model on fake CUDA tensors.",
            hint="Use PyTorch 2.6 or newer on Linux, or estimate by formula: --config, --params.",
        ) from err


def _library(name: str) -> ctypes.CDLL:
    folder = Path(torch.__file__).parent / "lib"
    return ctypes.CDLL(str(next(iter(sorted(folder.glob(f"lib{name}.*"))), folder / name)))


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _install_guard() -> None:
    guards = (ctypes.c_void_p * (CUDA + 1)).in_dll(
        _library("c10"), "_ZN3c104impl26device_guard_impl_registryE"
    )
    if guards[CUDA] is None:
        table = (ctypes.c_void_p * TABLE_LENGTH)(*[_address(_ANSWER_0)] * TABLE_LENGTH)
        stand_in = (ctypes.c_void_p * 1)(ctypes.addressof(table))
        _KEPT.extend([table, stand_in])
        guards[CUDA] = ctypes.addressof(stand_in)
        torch._C._ensureCUDADeviceGuardSet()
        if guards[CUDA] == ctypes.addressof(stand_in):
            guards[CUDA] = None
            raise ValueError("the guard was not replaced")
    torch._C._ensureCUDADeviceGuardSet()


def _install_hooks() -> None:
    get_hooks = _library("torch_cpu")["_ZN2at6detail12getCUDAHooksEv"]
    get_hooks.restype = ctypes.c_void_p
    methods = ctypes.c_void_p.from_address(get_hooks())
    original = methods.value or 0
    head = TABLE_HEAD * ctypes.sizeof(ctypes.c_void_p)
    table_type = ctypes.c_void_p * TABLE_LENGTH
    table = table_type(*table_type.from_address(original - head))
    _KEPT.append(table)
    methods.value = ctypes.addressof(table) + head
    try:
        _answer_yes(table, _cuda_is_built)
        _answer_yes(table, _backward_works)
    except ValueError:
        methods.value = original
        raise


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
    prepare()
    attention.set_capability(capability)
    gpu = SimpleNamespace(total_bytes=total_bytes, name=name, capability=capability)
    with _patched(gpu, allocated):
        yield


def _swap_tensors(first: torch.Tensor, second: torch.Tensor) -> None:
    """Swap as PyTorch does; the memory of the fake mode does not count as somebody who looks on.

    ``Module.to`` of a fake module swaps, and refuses where weak references are around.
    """
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    if mode is not None:
        mode.fake_tensor_converter.meta_converter.tensor_memo.clear()
    _SWAP(first, second)  # type: ignore[no-untyped-call]


_SWAP: Final = torch.utils.swap_tensors


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
        # On a GPU parameters are plain tensors, for which optimizers take foreach kernels.
        for module in (optimizer, _foreach_utils):
            kinds = getattr(module, "_foreach_supported_types", None)
            if kinds is not None:
                wider = [*kinds, fake_tensor.FakeTensor]
                stack.enter_context(mock.patch.object(module, "_foreach_supported_types", wider))
        # Backward runs in this thread, where the modes are.
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        yield
