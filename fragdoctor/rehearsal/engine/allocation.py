"""CUDA tensors without memory: creating and resizing them, and the scratch memory of kernels.

They are plain tensors (``type(t) is torch.Tensor``) on device ``cuda``, so everything above the
kernels is PyTorch's own: autograd and its in-place sums, views, version counters, autocast, hooks,
modes, wrapping subclasses. They come in through DLPack, whose deleter tells when a storage dies.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from math import prod
from typing import Any, Final

import torch

from fragdoctor.rehearsal.engine import session
from fragdoctor.rehearsal.engine.marks import in_backward
from fragdoctor.rehearsal.engine.vtables import fields

INT, UINT, FLOAT, BFLOAT, COMPLEX, BOOL = 0, 1, 2, 4, 5, 6
_CODES: Final = {
    torch.float32: FLOAT, torch.float64: FLOAT, torch.float16: FLOAT, torch.bfloat16: BFLOAT,
    torch.int8: INT, torch.int16: INT, torch.int32: INT, torch.int64: INT, torch.uint8: UINT,
    torch.bool: BOOL, torch.complex64: COMPLEX, torch.complex128: COMPLEX,
}  # fmt: skip
"""The codes of dtypes in DLPack."""
_new_capsule: Any = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_from_capsule: Any = torch._C._from_dlpack


def in_engine_thread() -> bool:
    """Return whether, on a GPU, the autograd engine's own thread would be running now.

    A backward pass that compiled autograd took over runs in the thread that called it.
    """
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    return in_backward() and not getattr(compiled, "in_compiled_autograd_region", False)


class BlockLayout:
    """Size, strides and dtype of a new tensor, in the form that the native library takes.

    Attributes:
        n_bytes: bytes to request; more than the storage if a kernel first makes it larger.
        on_cpu: whether the tensor is on the CPU after all, unless a graph is being captured.
    """

    __slots__ = ("_strides", "_viewed_as", "bits", "code", "dtype", "n_bytes", "n_dims",
                 "on_cpu", "shape", "sizes", "strides")  # fmt: skip

    def __init__(
        self, sizes: Sequence[int], strides: Sequence[int] | None, dtype: torch.dtype
    ) -> None:
        self.shape = tuple(sizes)
        self._strides = dense_strides(self.shape) if strides is None else tuple(strides)
        self.n_bytes = storage_bytes(self.shape, self._strides, dtype.itemsize)
        self.dtype = dtype
        self.on_cpu = False
        self._viewed_as: torch.dtype | None = None
        if dtype not in _CODES:  # older versions of DLPack do not know it
            self._viewed_as = dtype
            code, bits = UINT, 8
            dims: tuple[int, ...] = (self.n_bytes,)
            steps: tuple[int, ...] = (1,)
        else:
            code, bits = _CODES[dtype], 8 * dtype.itemsize
            dims, steps = self.shape, self._strides
        self.code, self.bits, self.n_dims = code, bits, len(dims)
        array = ctypes.c_int64 * len(dims)
        self.sizes, self.strides = array(*dims), array(*steps)

    @property
    def has_other_order(self) -> bool:
        """Whether the layout is not contiguous."""
        return self._strides != dense_strides(self.shape)

    def make(self, device: int, stack: int) -> torch.Tensor:
        """Return a new tensor; its memory is requested now.

        Raises:
            torch.OutOfMemoryError: the GPU has no memory left.
        """
        now = session.current()
        if self.on_cpu and not now.captures:
            return torch.zeros(self.shape, dtype=self.dtype, device="cpu")
        if not now.is_started:
            now.start_all()
        now.loops.skipping.n_requests += 1
        managed = now.gpus.new_tensor(
            device, self.n_bytes, self.code, self.bits, self.n_dims, self.sizes, self.strides,
            stack,
        )  # fmt: skip
        if managed is None:
            raise now.out_of_memory(device)
        tensor: torch.Tensor = _from_capsule(_new_capsule(managed, b"dltensor", None))
        now.known.is_new(device, tensor.data_ptr())
        if self._viewed_as is not None:
            tensor = tensor.view(self._viewed_as).as_strided(self.shape, self._strides)
        if not self.n_bytes:
            now.gpus.name(managed, fields().of(tensor))
        return tensor


def dense_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(sizes):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))


def storage_bytes(sizes: Sequence[int], strides: Sequence[int], itemsize: int) -> int:
    """Return the bytes that a strided tensor spans."""
    if not prod(sizes):
        return 0
    return itemsize * (1 + sum((n - 1) * step for n, step in zip(sizes, strides, strict=True)))


def stack_here(note: str | None = None) -> int:
    """Return the number of the current stack for a memory request, noted with the running module.

    A given ``note`` replaces the module; it is "" for what a library keeps for all modules.
    """
    now = session.current()
    note = now.modules.here() if note is None else note
    return now.stacks.here(note, in_backward=in_engine_thread())


def take(device: int, n_bytes: int, stack: int) -> int:
    """Return the address of scratch memory, to be returned with :func:`give`; 0 for no bytes.

    Raises:
        torch.OutOfMemoryError: the GPU has no memory left.
    """
    now = session.current()
    if not now.is_started:
        now.start_all()
    address: int = now.gpus.take(device, n_bytes, stack)
    if not address and n_bytes:
        raise now.out_of_memory(device)
    return address


def give(address: int) -> None:
    """Give scratch memory back."""
    session.current().gpus.give(address)


def take_and_give(device: int, n_bytes: int, note: str | None = None) -> None:
    """Take scratch memory and give it back at once; ``note`` is the note on the request.

    Raises:
        torch.OutOfMemoryError: the GPU has no memory left.
    """
    give(take(device, n_bytes, stack_here(note)))


def resize_storage(storage: int, device: int, n_bytes: int) -> None:
    """Replace the memory of a storage in place: new memory is taken first, then the old is freed.

    Raises:
        torch.OutOfMemoryError: the GPU has no memory left.
        RuntimeError: the storage is not one of ours.
    """
    now = session.current()
    old, _ = fields().read(storage)
    address = ctypes.c_uint64()
    now.known.is_new(device, old)
    result = now.gpus.resize(old, storage, n_bytes, stack_here(), ctypes.byref(address))
    if result < 0:
        raise RuntimeError("this storage cannot be resized: it was not made by PyTorch")
    if not result:
        raise now.out_of_memory(device)
    now.known.is_new(device, address.value)
    fields().write(storage, address.value, n_bytes)


def disown(storage: torch.UntypedStorage) -> None:
    """Free the memory of a storage that may live on; the storage then owns nothing."""
    session.current().gpus.resize(
        storage.data_ptr(), storage._cdata, 0, stack_here(), ctypes.byref(ctypes.c_uint64())
    )
