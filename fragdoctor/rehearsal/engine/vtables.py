"""PyTorch's own tables, changed for a process without a GPU. Nothing else here touches its memory.

PyTorch is built to run without CUDA, so most of what a CUDA tensor needs is there in any build: the
dispatcher knows the key, autograd and autocast have their kernels for it, and a tensor on device
``cuda`` can be made from any memory through DLPack. Four things are missing, each in one table:

* **The guard.** C++ asks the table of device guards which device and stream are current, and the
  autograd engine asks how many devices there are. Without CUDA the entry is empty; with CUDA but no
  GPU it calls a driver that is missing. An object with our functions is put in its place.
* **The hooks.** Code that is common to all builds asks ``CUDAHooksInterface`` whether CUDA and
  cuDNN are present, and takes pinned memory from it. The object's method table is replaced with a
  copy in which these questions have our answers.
* **Kernels that C++ calls without the dispatcher** (``DispatchStub``): which one attention takes,
  and what is launched by code that is one for CPU and GPU. Their pointers for CUDA are replaced.
* **A tensor's storage, and its address and size**, for programs that resize a storage in place.
  They are fields of ``TensorImpl`` and ``StorageImpl``.

The first three are laid out according to the headers that come with every PyTorch. The fields are
found by looking for known values in a tensor made for the purpose. :func:`install` tests the method
tables before leaving them in effect.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch

from fragdoctor.errors import ConfigError
from fragdoctor.rehearsal.engine import nothing
from fragdoctor.rehearsal.engine.gpu import Gpus

CUDA: Final = 1  # c10::DeviceType
POINTER: Final = ctypes.sizeof(ctypes.c_void_p)
HEAD: Final = 2  # words before the first method: offset to top, type information
DESTRUCTORS: Final = 2  # slots of a virtual destructor
N_SLOTS: Final = 160  # more than any of the tables have
STORAGE_WORDS: Final = 16
SILENT: Final = (
    "cdist_stub", "fake_quant_grad_learnable_channel_stub",
    "fake_quant_grad_learnable_tensor_stub", "fake_quant_per_channel_cachemask_stub",
    "fake_quant_tensor_cachemask_stub", "fake_quant_tensor_cachemask_tensor_qparams_stub",
    "huber_stub", "index_put_stub", "renorm_scale_factor_stub",
    "scatter_reduce_two_stub",
)  # fmt: skip
"""Kernels that code for CPU and GPU calls without the dispatcher, and that request no memory."""
PROOF: Final = 3  # a GPU number to test with
_COMMENT: Final = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_DIRECTIVE: Final = re.compile(r"^[ \t]*#(?:[^\n\\]|\\.|\\\n)*", re.MULTILINE)
_NAME: Final = re.compile(r"(~?\w+)\s*\(")
_POINTER: Final = re.compile(r"\b([a-z0-9]+)_dispatch_ptr\s*[{=;]")


def _header(path: str) -> str:
    file = Path(torch.__file__).parent / "include" / path
    text = _COMMENT.sub(" ", file.read_text(encoding="utf-8", errors="replace"))
    return _DIRECTIVE.sub("", text)


def slots_of(*classes: tuple[str, str]) -> dict[str, int]:
    """Return the positions of virtual methods in the method table of the last class.

    Each class is given as its header's text without comments and its name, the base class first.
    """
    slots: dict[str, int] = {}
    n = 0
    for text, name in classes:
        for declaration in re.split(r"[;{]", _body(text, name)):
            match = _NAME.search(declaration)
            if match is None or not re.search(r"\b(?:virtual|override)\b", declaration):
                continue
            method = "~" if match[1].startswith("~") else match[1]
            if method not in slots:
                slots[method] = n
                n += DESTRUCTORS if method == "~" else 1
    return slots


def _body(text: str, name: str) -> str:
    """Return the inside of a class, with the bodies of its functions emptied."""
    start = re.search(rf"\b(?:struct|class)\s+(?:\w+\s+)?{name}\b[^;{{]*{{", text)
    if start is None:
        raise ValueError(f"{name} is not declared as expected")
    depth, out = 1, []
    for char in text[start.end() :]:
        if char == "{":
            depth += 1
            if depth == 2:
                out.append("{")
        elif char == "}":
            depth -= 1
            if depth == 0:
                break
        elif depth == 1:
            out.append(char)
    return "".join(out)


def _library(name: str) -> ctypes.CDLL:
    folder = Path(torch.__file__).parent / "lib"
    return ctypes.CDLL(str(next(iter(sorted(folder.glob(f"lib{name}.*"))), folder / name)))


def _table_with(
    slots: dict[str, int], method: Callable[[bytes], int | None], original: int | None
) -> Any:
    """Return a method table: a copy of one, or zeros, with every function that exists for it."""
    kind = ctypes.c_void_p * N_SLOTS
    table = kind(*kind.from_address(original - HEAD * POINTER)) if original else kind()
    for name, slot in slots.items():
        function = method(name.encode())
        if function:
            table[HEAD + slot] = function
    return _leaked(table)


def _leaked(memory: Any) -> Any:
    """Keep what C++ points to forever: it is used until the last storage has died."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))
    return memory


def _put_guard(gpus: Gpus) -> None:
    name = "DeviceGuardImplInterface"
    slots = slots_of((_header(f"c10/core/impl/{name}.h"), name))
    registry = ctypes.addressof(
        ctypes.c_void_p.in_dll(_library("c10"), "_ZN3c104impl26device_guard_impl_registryE")
    )
    table = _table_with(slots, gpus.guard_method, None)
    guard = _leaked((ctypes.c_void_p * 1)(ctypes.addressof(table) + HEAD * POINTER))
    _exchange(registry + CUDA * POINTER, ctypes.addressof(guard))


def _put_hooks(gpus: Gpus) -> None:
    base = ("ATen/detail/AcceleratorHooksInterface.h", "AcceleratorHooksInterface")
    derived = ("ATen/detail/CUDAHooksInterface.h", "CUDAHooksInterface")
    slots = slots_of(*((_header(file), name) for file, name in (base, derived)))
    get_hooks = _library("torch_cpu")["_ZN2at6detail12getCUDAHooksEv"]
    get_hooks.restype = ctypes.c_void_p
    place = get_hooks()
    original = ctypes.c_void_p.from_address(place).value or 0
    get_allocator = _library("c10")["_ZN3c1015GetCPUAllocatorEv"]
    get_allocator.restype = ctypes.c_void_p
    gpus.set_pinned_allocator(get_allocator())
    table = _table_with(slots, gpus.hook_method, original)
    _exchange(place, ctypes.addressof(table) + HEAD * POINTER)


def _exchange(place: int, value: int) -> None:
    word = ctypes.c_void_p.from_address(place)
    word.value = value


def put_stub(name: str, function: Any) -> None:
    """Put a function in place of a GPU's kernel that C++ calls without the dispatcher."""
    kinds = _POINTER.findall(_header("ATen/native/DispatchStub.h"))
    stub = ctypes.c_void_p.in_dll(_library("torch_cpu"), f"_ZN2at6native{len(name)}{name}E")
    address = ctypes.cast(_leaked(function), ctypes.c_void_p).value or 0
    _exchange(ctypes.addressof(stub) + kinds.index("cuda") * POINTER, address)


_launch_nothing: Final = ctypes.CFUNCTYPE(None)(nothing)


class StorageFields:
    """Where a tensor keeps its storage, and a storage its address and its size.

    Asking for a storage in Python leaves an object on it that counts as a user from then on, and
    autograd sums gradients in place only where there is one user.
    """

    def __init__(self) -> None:
        sample = torch.empty(1003, dtype=torch.uint8, device="cpu")
        storage = sample.untyped_storage()
        places = [i for i, word in enumerate(_words(sample._cdata)) if word == storage._cdata]
        words = _words(storage._cdata)
        addresses = [i for i, word in enumerate(words) if word == storage.data_ptr()]
        sizes = [i for i, word in enumerate(words) if word == storage.nbytes()]
        if not places or not addresses or len(sizes) != 1 or sizes[0] < addresses[0]:
            raise ValueError("the fields of a storage are not where they were")
        self._place, self._address, self._size = places[0], addresses[0], sizes[0]

    def of(self, tensor: torch.Tensor) -> int:
        """Return where a tensor's storage is; 0 for a tensor without one."""
        return _words(tensor._cdata)[self._place]

    def read(self, storage: int) -> tuple[int, int]:
        """Return the address and the size of a storage."""
        words = _words(storage)
        return words[self._address], words[self._size]

    def write(self, storage: int, address: int, n_bytes: int) -> None:
        """Give a storage an address and a size."""
        words = _words(storage)
        words[self._address], words[self._size] = address, n_bytes


fields: Final = cache(StorageFields)


def _words(place: int) -> ctypes.Array[ctypes.c_uint64]:
    return (ctypes.c_uint64 * STORAGE_WORDS).from_address(place)


def install(gpus: Gpus) -> None:
    """Replace the tables.

    Raises:
        ConfigError: this build of PyTorch is not laid out as its versions from 2.6 on are.
    """
    try:
        _put_guard(gpus)
        _put_hooks(gpus)
        for name in SILENT:
            put_stub(name, _launch_nothing)
        _prove(gpus)
    except (AttributeError, OSError, ValueError, RuntimeError) as err:
        raise ConfigError(
            f"This build of PyTorch ({torch.__version__}) cannot be prepared for a rehearsal: "
            f"{str(err).splitlines()[0]}.",
            hint="Use a build of PyTorch 2.6 or newer from pip or conda, on Linux or macOS.",
        ) from err


def _prove(gpus: Gpus) -> None:
    """Ask PyTorch questions that only the replaced tables can answer."""
    if str(torch._C._accelerator_getAccelerator()) != "cuda":
        raise ValueError("CUDA is not taken for built in")
    torch._C._accelerator_getDeviceIndex()  # the first question starts CUDA
    gpus.set_device(PROOF)
    try:
        if torch._C._accelerator_getDeviceIndex() != PROOF:
            raise ValueError("the current device is not ours")
    finally:
        gpus.set_device(0)
    torch.empty(1, pin_memory=True, device="cpu")
