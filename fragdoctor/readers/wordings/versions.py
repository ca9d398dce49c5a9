"""Which PyTorch versions print which form of the caching allocator's message."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final

from fragdoctor.readers.wordings import names

VARIANTS: Final = {
    "torch-1.0": "cached",
    "torch-1.4": "reserved in total by PyTorch",
    "torch-1.10": "the same with advice about max_split_size_mb",
    "torch-2.1": "total capacty, or 2.x sentences with advice about max_split_size_mb",
    "torch-2.2": "2.x sentences, advice with the environment-variables link",
    "torch-2.9": "advice with PYTORCH_ALLOC_CONF",
    "torch-2.10": "advice with the docs.pytorch.org link",
    "torch-2.15": "advice that knows whether expandable segments are on",
    "torch-2": "2.x sentences, cut before what tells the versions apart",
    "torch": "no figure but the request",
    "ipex": "XPU of Intel's extension",
    "xpu-2.4": "XPU without free memory",
    "xpu-2.9": "XPU with free memory",
    "npu": "Ascend",
    "musa": "Moore Threads",
}


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
    for words, row in _TWO:
        if words in text:
            return row
    if not seen & {"total", "free", "allocated", "unallocated", "own", "process"}:
        return "torch", "", ""
    low = "2.5" if "limit" in seen else "2.4" if "private" in seen else "2.2"
    if "environment-variables" in text:
        return "torch-2.2", low, "2.8"
    if "trysettingmax_split_size" in text:
        return "torch-2.1", "2.1", "2.1"
    return "torch-2", low, ""


# Words that settle the version, the latest first.
_TWO: Final = (
    ("expandable_segmentsisenabled", ("torch-2.15", "2.15", "")),
    ("cannotspanexpandable", ("torch-2.15", "2.15", "")),
    ("capactyof", ("torch-2.1", "2.1", "2.1")),
    ("docs.pytorch.org", ("torch-2.10", "2.10", "")),
    ("pytorch_alloc_conf=", ("torch-2.9", "2.9", "2.9")),
)
