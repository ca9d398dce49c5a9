"""Which PyTorch versions print which form of the caching allocator's message.

Variants: ``torch-1.0`` (cached), ``torch-1.4`` (reserved in total), ``torch-1.10`` (the same
with advice), ``torch-2.1`` (capacty), ``torch-2.2``, ``torch-2.9``, ``torch-2.10``,
``torch-2.15``, ``torch-2`` (2.x, cut before what tells them apart), ``torch`` (no figures but the
request), ``ipex``, ``xpu-2.4``, ``xpu-2.9``, ``npu``, ``musa``.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from fragdoctor.readers.wordings import names


@dataclass(frozen=True, slots=True)
class Dialect:
    """What the form of a message tells beside its figures; fields as in ``OomMessage``."""

    backend: str
    variant: str
    version_low: str = ""
    version_high: str = ""
    hint: str = ""
    expandable_is_on: bool | None = None


def dialect(seen: AbstractSet[str], name: str, text: str) -> Dialect:
    """Return backend, variant and versions of a message.

    Args:
        seen: names of its clauses.
        name: the device word of its head (``cuda``, ``hip``, ...), or "".
        text: the message squeezed, with its tail.
    """
    backend = _backend(seen, name, text)
    hint = _hint(text)
    expandable = True if "expandable_segmentsisenabled" in text else None
    if backend == "xpu":
        variant, low, high = _xpu(seen)
    elif backend == "npu":
        variant, low, high = "npu", "", ""
    elif seen & {"cached"}:
        variant, low, high = "torch-1.0", "1.0", "1.3"
    elif seen & {"reserved"} or (seen & {"allocated"} and "alreadyallocated" in text):
        variant, low, high = _one(text)
    else:
        variant, low, high = _two(seen, text)
    if backend == "musa":
        variant = "musa"
    return Dialect(backend, variant, low, high, hint, expandable)


def _backend(seen: AbstractSet[str], name: str, text: str) -> str:
    if name and name != "cuda":
        return names.BACKEND_OF_WORD[name]
    if "active" in seen or "(npu" in text:
        return "npu"
    if "pleaseuse`empty_cache`" in text:
        return "xpu"
    if "pytorch_hip_alloc_conf" in text:
        return "rocm"
    if "pytorch_musa_alloc_conf" in text:
        return "musa"
    return "cuda"


def _hint(text: str) -> str:
    for words, hint in (
        ("expandable_segments_reserve", "expandable_segments_reserve"),
        ("conf=expandable_segments:true", "expandable_segments:True"),
        ("trysettingmax_split_size_mb", "max_split_size_mb"),
        ("`empty_cache`", "empty_cache"),
    ):
        if words in text:
            return hint
    return ""


def _xpu(seen: AbstractSet[str]) -> tuple[str, str, str]:
    if "reserved" in seen:
        return "ipex", "", ""
    return ("xpu-2.9", "2.9", "") if seen & {"free", "limit"} else ("xpu-2.4", "2.4", "2.8")


def _one(text: str) -> tuple[str, str, str]:
    if "trysettingmax_split_size" in text:
        return "torch-1.10", "1.10", "2.0"
    return "torch-1.4", "1.4", "1.9" if "reservedintotalbypytorch)" in text else "2.0"


def _two(seen: AbstractSet[str], text: str) -> tuple[str, str, str]:
    if "expandable_segmentsisenabled" in text or "cannotspanexpandable" in text:
        return "torch-2.15", "2.15", ""
    if "capactyof" in text:
        return "torch-2.1", "2.1", "2.1"
    if "docs.pytorch.org" in text:
        return "torch-2.10", "2.10", ""
    if "pytorch_alloc_conf=" in text:
        return "torch-2.9", "2.9", "2.9"
    if not seen & {"total", "free", "allocated", "unallocated", "own", "process"}:
        return "torch", "", ""
    low = "2.5" if "limit" in seen else "2.4" if "private" in seen else "2.2"
    if "environment-variables" in text:
        return "torch-2.2", low, "2.8"
    if "trysettingmax_split_size" in text:
        return "torch-2.1", "2.1", "2.1"
    return "torch-2", low, ""
