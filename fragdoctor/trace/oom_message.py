"""The text of PyTorch's out-of-memory error for each version, from the model's figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from fragdoctor.model.conf_keys import Version
from fragdoctor.units import GIB, KIB, MIB

_OLD_HINT: Final = (
    " If reserved memory is >> allocated memory try setting max_split_size_mb to avoid "
    "fragmentation.  See documentation for Memory Management and PYTORCH_CUDA_ALLOC_CONF"
)
_HINT_21: Final = (
    " If reserved but unallocated memory is large try setting max_split_size_mb to avoid "
    "fragmentation.  See documentation for Memory Management and PYTORCH_CUDA_ALLOC_CONF"
)
_HINT: Final = (
    " If reserved but unallocated memory is large try setting {variable}=expandable_segments:True "
    "to avoid fragmentation.  See documentation for Memory Management  ({url})"
)
_OLD_URL: Final = "https://pytorch.org/docs/stable/notes/cuda.html#environment-variables"
_URL: Final = (
    "https://docs.pytorch.org/docs/stable/notes/cuda.html"
    "#optimizing-memory-usage-with-pytorch-cuda-alloc-conf"
)
_HINT_EXPANDABLE: Final = (
    " expandable_segments is enabled. If instead the process is running out of virtual address "
    "space (VSZ), expandable segments may be over-reserving VA (each segment reserves ~9/8 of "
    "device memory, times the number of streams); reduce it via PYTORCH_CUDA_ALLOC_CONF "
    "expandable_segments_reserve / expandable_segments_reserve_by_class."
)

_HINT_RESERVE: Final = (
    " This allocation exceeds the expandable-segment reserve of {reserve} for this stream, and a "
    "single allocation cannot span expandable segments. Raise PYTORCH_CUDA_ALLOC_CONF "
    "expandable_segments_reserve or expandable_segments_reserve_by_class (or unset it) so that a "
    "segment is at least {least}."
)


def format_size(n_bytes: int) -> str:
    """Return a size as PyTorch's ``format_size`` prints it (the unit changes above 1024)."""
    if n_bytes <= KIB:
        return f"{n_bytes} bytes"
    for limit, factor, unit in ((MIB, KIB, "KiB"), (GIB, MIB, "MiB")):
        if n_bytes <= limit:
            return f"{n_bytes / factor:.2f} {unit}"
    return f"{n_bytes / GIB:.2f} GiB"


def oom_message(figures: Mapping[str, int | None], version: Version, *, device: int = 0) -> str:
    """Return a version's message for the figures of the native model's ``last_oom()``."""
    release = version[:2]
    sizes = {key: format_size(value) for key, value in figures.items() if value is not None}
    limit = sizes.get("allowed_bytes")
    if release < (2, 1):
        allowed = f"{limit} allowed; " if limit and release >= (1, 8) else ""
        hint = _OLD_HINT if release >= (1, 10) else ""
        return (
            f"CUDA out of memory. Tried to allocate {sizes['alloc_bytes']} (GPU {device}; "
            f"{sizes['total_bytes']} total capacity; {sizes['allocated_bytes']} already allocated; "
            f"{sizes['free_bytes']} free; {allowed}{sizes['reserved_bytes']} reserved in total by "
            f"PyTorch){hint}"
        )
    # Up to 2.3, the cache of private pools is part of the unallocated figure; from 2.4 on, PyTorch
    # calls it "allocated in private pools" and adds it to the allocated figure.
    private = (figures["private_free_bytes"] or 0) if release >= (2, 4) else 0
    used = (figures["allocated_bytes"] or 0) + private
    unallocated = (figures["reserved_bytes"] or 0) - used
    process = (figures["total_bytes"] or 0) - (figures["free_bytes"] or 0)
    allowed = f"{limit} allowed; " if limit and release >= (2, 5) else ""
    pools = (
        f"with {format_size(private)} allocated in private pools (e.g., CUDA Graphs), "
        if private
        else ""
    )
    return (
        f"CUDA out of memory. Tried to allocate {sizes['alloc_bytes']}. GPU {device} has a total "
        f"{'capacty' if release == (2, 1) else 'capacity'} of {sizes['total_bytes']} of which "
        f"{sizes['free_bytes']} is free. Including non-PyTorch memory, this process has "
        f"{format_size(process)} memory in use. {allowed}Of the allocated memory "
        f"{format_size(used)} is allocated by PyTorch, {pools}and {format_size(unallocated)} is "
        f"reserved by PyTorch but unallocated.{_hint(figures, version)}"
    )


def _hint(figures: Mapping[str, int | None], version: Version) -> str:
    release = version[:2]
    if release == (2, 1):
        return _HINT_21
    reserve = figures["reserve_bytes"] or 0
    alloc = figures["alloc_bytes"] or 0
    if release >= (2, 15) and reserve:
        if reserve < alloc <= (figures["total_bytes"] or 0):
            return _HINT_RESERVE.format(reserve=format_size(reserve), least=format_size(alloc))
        return _HINT_EXPANDABLE
    variable = "PYTORCH_ALLOC_CONF" if release == (2, 9) else "PYTORCH_CUDA_ALLOC_CONF"
    return _HINT.format(variable=variable, url=_URL if release >= (2, 10) else _OLD_URL)
