"""The CPU's side of CUDA: pinned memory, storages, compilation, kernels, and new models' weights.

A program creates its model on the CPU and moves it to the GPU; a model of 70 billion parameters
would need 140 GB on the machine that rehearses. Its values are lost on the way anyway. So the pages
of large parameters are returned to the system: they read as zeros, and operations that would fill
them only draw their random numbers. Up to a limit, parameters keep their values.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch

from fragdoctor.rehearsal.engine import allocation, put, session, when_imported, wrap
from fragdoctor.units import KIB, MIB

KEPT_BYTES: Final = 128 * MIB
"""Total size of the parameters created on the CPU that keep their values. A rehearsal of a model of
14 GB takes 305 MiB without any of them (``bench_rehearse.py``) and is to stay below 400 MB."""
LARGE_BYTES: Final = 1 * MIB
"""Parameters of at least this size lose their values beyond that limit."""
MOST_DRAWN: Final = 1024**3
"""The most random numbers drawn for skipped operations, to keep later random numbers the same."""
_DRAWN_AT_ONCE: Final = 64 * KIB
_DRAWN: Final = {"uniform_": 1, "normal_": 16}
"""Size of the groups that the CPU's kernel fills; ``normal_`` fills the last one twice."""
_PAGE: Final = 4 * KIB
_DONTNEED: Final = 4  # Linux's MADV_DONTNEED
_LEFT_OUT: Final = (
    "add_", "clamp_", "copy_", "div_", "erfinv_", "fill_", "mul_", "sub_", "zero_",
)  # fmt: skip
_CONVERSIONS: Final = {
    "to": None, "half": torch.float16, "bfloat16": torch.bfloat16, "float": torch.float32,
    "double": torch.float64,
}  # fmt: skip


def release(tensor: torch.Tensor) -> bool:
    """Return the pages of a CPU tensor to the system: it reads as zeros then. False if it stays."""
    if not sys.platform.startswith("linux"):
        return False
    storage = tensor.untyped_storage()
    n_bytes = storage.nbytes()
    if n_bytes < LARGE_BYTES or tensor.numel() * tensor.element_size() != n_bytes:
        return False
    if storage.is_shared() or storage.filename is not None:
        return False
    first = -(-storage.data_ptr() // _PAGE) * _PAGE
    last = (storage.data_ptr() + n_bytes) // _PAGE * _PAGE
    if ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _DONTNEED):
        return False
    for start, end in ((storage.data_ptr(), first), (last, storage.data_ptr() + n_bytes)):
        ctypes.memset(start, 0, end - start)
    return True


class Weights:
    """The parameters on the CPU that have no values."""

    def __init__(self) -> None:
        self._made_bytes = 0
        self._n_drawn = 0
        self._empty: set[int] = set()  # addresses of storages

    def has(self, tensor: Any) -> bool:
        """Return whether a tensor has no values because it belongs to such a parameter."""
        return bool(
            self._empty
            and isinstance(tensor, torch.Tensor)
            and tensor.device.type == "cpu"
            and tensor.layout is torch.strided
            and tensor.untyped_storage()._cdata in self._empty
        )

    def make(self, make: Any, cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        """Make a parameter of a tensor, which may lose its values first."""
        if (
            isinstance(data, torch.Tensor)
            and data.layout is torch.strided
            and data.device.type == "cpu"
            and data.is_floating_point()
            and not self.has(data)
        ):
            n_bytes = data.numel() * data.element_size()
            self._made_bytes += n_bytes
            if self._made_bytes > KEPT_BYTES and n_bytes >= LARGE_BYTES:
                self.empty(data)
        return make(cls, data, requires_grad)

    def empty(self, tensor: torch.Tensor) -> None:
        """Discard the values of a tensor on the CPU."""
        if type(tensor.untyped_storage()) is not torch.UntypedStorage or not release(tensor):
            return
        for gone in [s for s in self._empty if torch.UntypedStorage._expired(s)]:
            self._empty.remove(gone)
            torch.UntypedStorage._free_weak_ref(gone)
        storage = tensor.untyped_storage()
        storage._weak_ref()  # its address is not reused until the reference is freed
        self._empty.add(storage._cdata)
        session.note(
            f"Parameters created on the CPU after the first {KEPT_BYTES // MIB} MiB have no values."
        )

    def draw(self, n: int, dtype: torch.dtype, generator: torch.Generator | None) -> None:
        """Draw the random numbers that a kernel would have used."""
        self._n_drawn += n
        if self._n_drawn > MOST_DRAWN:
            session.note(
                "Random numbers drawn on the CPU after the model was built differ from a real run."
            )
            return
        # A double-precision number uses two of the generator's numbers, as a 64-bit integer does.
        n_pairs, n_single = (n, 0) if dtype is torch.float64 else divmod(n, 2)
        buffer = torch.empty(min(n_pairs, _DRAWN_AT_ONCE), dtype=torch.int64, device="cpu")
        for begin in range(0, n_pairs, _DRAWN_AT_ONCE):
            buffer[: n_pairs - begin].random_(generator=generator)
        if n_single:
            torch.rand(1, dtype=torch.float32, device="cpu", generator=generator)


def _leave_out(
    weights: Weights, group: int, fill: Any, self: torch.Tensor, /, *args: Any, **kwargs: Any
) -> Any:
    """Do nothing to such parameters except draw random numbers in groups."""
    if not weights.has(self):
        return fill(self, *args, **kwargs)
    if group:
        n = self.numel()
        weights.draw(n + group if n % group else n, self.dtype, kwargs.get("generator"))
    return self


def _convert(
    weights: Weights, dtype: Any, convert: Any, self: torch.Tensor, /, *args: Any, **kwargs: Any
) -> Any:
    """Convert to a dtype; None = the one in the arguments."""
    is_free = not (torch.is_grad_enabled() and self.requires_grad)
    if dtype != self.dtype and is_free and weights.has(self):
        device, wanted = None, dtype
        if dtype is None:
            device, wanted, _, _ = torch._C._nn._parse_to(*args, **kwargs)
        if (device is None or device.type == "cpu") and wanted not in {None, self.dtype}:
            made = torch.empty_like(self.detach(), dtype=wanted)
            weights.empty(made)
            return made
    return convert(self, *args, **kwargs)


def _pin_memory(self: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Return a copy that counts as pinned; on the CPU nothing else differs."""
    if hasattr(self, "_is_pinned_here"):
        return self
    pinned = self.clone() if not self.is_cuda else self
    pinned._is_pinned_here = True  # type: ignore[attr-defined]
    return pinned


def _resize(resize: Any, self: torch.UntypedStorage, size: int) -> Any:
    """Replace a storage's memory in place."""
    if self.device.type != "cuda":
        return resize(self, size)
    allocation.resize_storage(self._cdata, self.device.index, int(size))
    return self


def _make(make: Any, kind: Any, size: Any = 0, *, device: Any = None, **how: Any) -> Any:
    """Make a storage of a number of bytes, or of values."""
    if device is None or torch.device(device).type != "cuda":
        return make(kind, size, device=device, **how)
    values: Any = torch.empty if isinstance(size, int) else torch.tensor
    return values(size, dtype=torch.uint8, device=device).untyped_storage()


def _copy(copy: Any, self: torch.UntypedStorage, *device: Any, **how: Any) -> Any:
    """Return a storage's copy, as needed by deep copies and ``torch.load``."""
    place = torch.device(device[0]) if device else self.device
    if place.type != "cuda":
        return copy(self, *device, **how)
    return torch.empty(self.nbytes(), dtype=torch.uint8, device=place).untyped_storage()


def _launcher(_kernel: Any, _grid: Any) -> Callable[..., None]:
    """``kernel[grid]`` that launches nothing."""
    session.note(
        "Triton kernels were skipped: what they write is not computed. They work in memory that "
        "the program allocates."
    )
    return lambda *_args, **_kwargs: None


def install() -> None:
    """Patch pinned and resized memory, compilation, kernels, and weights on the CPU."""
    when_imported(
        {"triton.runtime.jit": lambda m: put(m.KernelInterface, "__getitem__", _launcher)}
    )
    put(torch.Tensor, "pin_memory", _pin_memory)
    put(torch.Tensor, "is_pinned", lambda self, *_, **__: hasattr(self, "_is_pinned_here"))
    wrap(torch.storage, "_to", _copy)
    wrap(torch.UntypedStorage, "__new__", _make)
    wrap(torch.UntypedStorage, "clone", _copy)
    wrap(torch.UntypedStorage, "resize_", _resize)
    weights = Weights()
    wrap(torch.nn.Parameter, "__new__", weights.make)
    for name in (*_LEFT_OUT, *_DRAWN):
        wrap(torch.Tensor, name, partial(_leave_out, weights, _DRAWN.get(name, 0)))
    for name, dtype in _CONVERSIONS.items():
        wrap(torch.nn.Parameter, name, partial(_convert, weights, dtype))
