"""Limits on the GPU memory of a piece of code, measured by PyTorch's own counters."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

from msgspec import Struct

from fragdoctor.errors import ConfigError
from fragdoctor.units import Amount, format_size, parse_amount


class Kind(Struct, frozen=True):
    """What one of the markers limits.

    Attributes:
        stat: the PyTorch counter that is checked after the test.
        what: what is limited; ``said`` says that there was more of it.
        is_peak: whether its highest value counts.
        is_growth: whether memory from before the test does not count.
        takes_share: whether a percentage of reserved memory is allowed as a limit.
        default: the limit if none is given, or "" if one is required.
    """

    stat: str
    what: str
    said: str
    is_peak: bool = False
    is_growth: bool = False
    takes_share: bool = False
    default: str = ""


KINDS: Final[Mapping[str, Kind]] = {
    "limit_gpu_memory": Kind(
        "allocated_bytes.all.peak", "GPU memory", "used {} at its peak", is_peak=True
    ),
    "limit_gpu_fragmentation": Kind(
        "inactive_split_bytes.all.current", "stranded free GPU memory", "left {}", takes_share=True
    ),
    "limit_gpu_leaks": Kind(
        "allocated_bytes.all.current", "leaked GPU memory", "kept {}", is_growth=True, default="0"
    ),
}


class GpuLimits(Struct, frozen=True):
    """The limits of one test, and whether it is rehearsed, and on which GPU."""

    limits: Sequence[Limit]
    is_rehearsed: bool
    gpu: str | None


def why_not(*, needs_cuda: bool = True) -> str:
    """Return why GPU memory cannot be measured here, or "" if it can."""
    try:
        torch = importlib.import_module("torch")  # found where tests of PyTorch programs run
    except ImportError:
        return "the limit on GPU memory needs PyTorch, which is not installed"
    if needs_cuda and not torch.cuda.is_available():
        return "the limit on GPU memory needs CUDA, which is not available"
    return ""


def limits_of(marks: Sequence[tuple[str, Sequence[Any], Mapping[str, Any]]]) -> GpuLimits:
    """Return the limits for (marker, arguments, keywords); the nearest of each marker counts.

    Raises:
        ValueError: if a marker's arguments are wrong.
    """
    found: dict[str, Limit] = {}
    gpus: dict[str, None] = {}
    is_rehearsed = False
    for name, args, kwargs in marks:
        if name in found:
            continue
        values = dict(kwargs)
        rehearse, gpu = values.pop("rehearse", False), values.pop("gpu", None)
        if not isinstance(rehearse, bool) or not (gpu is None or isinstance(gpu, str)):
            raise ValueError(f'{name} takes rehearse=True and gpu="a100-40g".')
        if gpu is not None and not rehearse:
            raise ValueError(f"{name}: gpu is only for rehearse=True; else the machine's is used.")
        is_rehearsed |= rehearse
        gpus |= {} if gpu is None else {gpu: None}
        found[name] = _limit(name, args, values)
    if len(gpus) > 1:
        raise ValueError(f"a test is rehearsed on one GPU, not on {' and '.join(gpus)}.")
    return GpuLimits(list(found.values()), is_rehearsed, next(iter(gpus), None))


def _limit(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Limit:
    values = dict(zip(("size", "device"), args, strict=False)) | dict(kwargs)
    if len(args) > 2 or not values.keys() <= {"size", "device"}:
        raise ValueError(f"{name} takes a size and device=N.")
    kind = KINDS[name]
    size, device = values.get("size"), values.get("device")
    size = kind.default or None if size is None else size
    if size is None:
        raise ValueError(f'{name} needs a size, for example {name}("8 GiB").')
    if device is not None and (isinstance(device, bool) or not isinstance(device, int)):
        raise ValueError(f"{name}: device is the number of a GPU.")
    try:
        amount = parse_amount(str(size))
    except ConfigError as e:
        raise ValueError(f"{name}: {e.message} {e.hint}") from e
    if amount.share is not None and not kind.takes_share:
        raise ValueError(f"{name} takes a size, not a percentage.")
    return Limit(kind, amount, device)


class Limit(Struct, dict=True):
    """One limit: ``start`` before the code runs, ``finish`` after it.

    Attributes:
        kind: what is limited, and how to say it.
        amount: how much is allowed; a share is relative to reserved memory.
        device: the number of the GPU; None means the current one.
    """

    kind: Kind
    amount: Amount
    device: int | None = None
    _before: int = 0

    def start(self) -> None:
        """Reset the peak, or note the memory that exists before."""
        if self.kind.is_peak:
            self._cuda.reset_peak_memory_stats(self.device)
        if self.kind.is_growth:
            self._settle()
            self._before = self._stat(self.kind.stat)

    def finish(self) -> str:
        """Return one sentence with both numbers if the limit is exceeded, else ""."""
        if not self.kind.is_peak:
            self._settle()
        used = self._stat(self.kind.stat) - self._before
        allowed = self.amount.of(self._stat("reserved_bytes.all.current")) or 0
        if used <= allowed:
            return ""
        share = "" if self.amount.share is None else f" ({self.amount} of reserved)"
        where = "" if self.device is None else f" on GPU {self.device}"
        limited = f"{format_size(allowed)}{share} of {self.kind.what}{where}"
        return f"The test is limited to {limited} but {self.kind.said.format(format_size(used))}."

    @property
    def _cuda(self) -> Any:
        return importlib.import_module("torch").cuda

    def _settle(self) -> None:
        """Let pending work finish: dead cycles hold tensors, and streams hold blocks."""
        gc.collect()
        self._cuda.synchronize(self.device)

    def _stat(self, name: str) -> int:
        return int(self._cuda.memory_stats(self.device).get(name, 0))
