"""GpuLimits on the GPU memory of a piece of code, measured by PyTorch's own counters."""

from __future__ import annotations

import gc
import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from fragdoctor.errors import ConfigError
from fragdoctor.units import Amount, format_size, parse_amount


@dataclass(frozen=True, slots=True)
class GpuLimits:
    """The limits of one test, and whether it is rehearsed, on which GPU."""

    limits: Sequence[Limit]
    is_rehearsed: bool
    gpu: str | None


def why_not(*, needs_cuda: bool = True) -> str:
    """Return why GPU memory cannot be measured here, "" where it can."""
    try:
        torch = importlib.import_module("torch")  # found where tests of PyTorch programs run
    except ImportError:
        return "the limit on GPU memory needs PyTorch, which is not installed"
    if needs_cuda and not torch.cuda.is_available():
        return "the limit on GPU memory needs CUDA, which is not available"
    return ""


def limits_of(marks: Sequence[tuple[str, Sequence[Any], Mapping[str, Any]]]) -> GpuLimits:
    """Return the limits of (marker, arguments, keywords); the nearest of each marker counts.

    Raises:
        ValueError: a marker's arguments are wrong.
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
            raise ValueError(f"{name}: gpu is for rehearse=True; else it is the GPU that is there.")
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
    size, device = values.get("size"), values.get("device")
    if size is None:
        if name != "limit_gpu_leaks":
            raise ValueError(f'{name} needs a size, for example {name}("8 GiB").')
        size = "0"
    if device is not None and (isinstance(device, bool) or not isinstance(device, int)):
        raise ValueError(f"{name}: device is the number of a GPU.")
    try:
        amount = parse_amount(str(size))
    except ConfigError as e:
        raise ValueError(f"{name}: {e.message} {e.hint}") from e
    kind = {limit.marker: limit for limit in (PeakLimit, FragmentationLimit, LeakLimit)}[name]
    if amount.share is not None and kind is not FragmentationLimit:
        raise ValueError(f"{name} takes a size, not a percentage.")
    return kind(amount, device)


class Limit(ABC):
    """One limit: ``start`` before the code runs, ``finish`` after it.

    ``device`` is the number of the GPU; None is the current one.
    """

    marker: ClassVar[str]

    def __init__(self, amount: Amount, device: int | None = None) -> None:
        self.amount = amount
        self.device = device

    @abstractmethod
    def start(self) -> None:
        """Note what is there before, and reset the counters."""

    @abstractmethod
    def finish(self) -> str:
        """Return one sentence with both numbers where the limit is broken, else ""."""

    @property
    def _cuda(self) -> Any:
        return importlib.import_module("torch").cuda

    def _settle(self) -> None:
        """Let what is on its way finish: dead cycles hold tensors, streams hold blocks."""
        gc.collect()
        self._cuda.synchronize(self.device)

    def _stat(self, name: str) -> int:
        return int(self._cuda.memory_stats(self.device).get(name, 0))

    @property
    def _where(self) -> str:
        return "" if self.device is None else f" on GPU {self.device}"


class PeakLimit(Limit):
    """At no time may more be allocated."""

    marker = "limit_gpu_memory"

    def start(self) -> None:
        """Reset the peak."""
        self._cuda.reset_peak_memory_stats(self.device)

    def finish(self) -> str:
        """Return what is wrong with the peak."""
        allowed = self.amount.of(None) or 0
        used = self._stat("allocated_bytes.all.peak")
        if used <= allowed:
            return ""
        return (
            f"The test is limited to {format_size(allowed)} of GPU memory{self._where} but used "
            f"{format_size(used)} at its peak."
        )


class FragmentationLimit(Limit):
    """After the test live blocks may not strand more free memory."""

    marker = "limit_gpu_fragmentation"

    def start(self) -> None:
        """Do nothing: only what is there after the test counts."""

    def finish(self) -> str:
        """Return what is wrong with the layout."""
        self._settle()
        reserved = self._stat("reserved_bytes.all.current")
        stranded = self._stat("inactive_split_bytes.all.current")
        allowed = self.amount.of(reserved) or 0
        if stranded <= allowed:
            return ""
        share = "" if self.amount.share is None else f" ({self.amount} of reserved)"
        return (
            f"The test is limited to {format_size(allowed)}{share} of stranded free GPU memory"
            f"{self._where} but left {format_size(stranded)}."
        )


class LeakLimit(Limit):
    """After the test not more may be allocated than before."""

    marker = "limit_gpu_leaks"

    def __init__(self, amount: Amount, device: int | None = None) -> None:
        super().__init__(amount, device)
        self._before = 0

    def start(self) -> None:
        """Note what is allocated."""
        self._settle()
        self._before = self._stat("allocated_bytes.all.current")

    def finish(self) -> str:
        """Return what is wrong with what stays."""
        self._settle()
        allowed = self.amount.of(None) or 0
        kept = self._stat("allocated_bytes.all.current") - self._before
        if kept <= allowed:
            return ""
        return (
            f"The test is limited to {format_size(allowed)} of leaked GPU memory{self._where} but "
            f"kept {format_size(kept)}."
        )
