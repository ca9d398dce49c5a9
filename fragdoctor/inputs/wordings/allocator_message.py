"""The caching allocator's message in torch 1.0 to 2.15, on CUDA, ROCm, XPU, NPU and MUSA."""

from __future__ import annotations

import re
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from typing import Final

from msgspec import Struct, field

from fragdoctor.inputs.log_streams import LogStream
from fragdoctor.inputs.wordings.wording import (
    ABSURD_BYTES,
    ALLOCATOR,
    BACKEND_OF_WORD,
    Fields,
    Hit,
    is_source,
    located,
    matches,
    printed_bytes,
    value_of,
)
from fragdoctor.model.case import OomMessage, OtherProcess

_GAP: Final = 700  # the most squeezed characters between two clauses of one message


_NAME: Final = r"(?:gpu|npu|xpu|musa|mlu|gcu|device)"
_PROCESS: Final = r"[;,.):]{0,4}process(?P<pid>\d{1,12})has(?P<size>SIZE)"
_GOES_ON: Final = rf"\.?\(?{_NAME}\d{{1,3}}(?:hasatotal|;)"
_HINT: Final = (
    r"ifreserved(?:butunallocated)?memoryis(?:large|>>allocatedmemory)?"
    r"(?:trysetting[\w:=]{1,60}toavoidfragmentation\.?)?"
    r"(?:seedocumentationformemorymanagement(?:and\w{1,30})?)?(?:\(https?://[^()]{1,120}\))?"
)
CLAUSES: Final = (  # name and pattern of each part of the message
    ("head", r"(?P<_name>cuda|hip|xpu|npu|musa|mlu|gcu)outofmemory"),
    ("tried", r"triedtoallocate<requested_bytes>"),
    ("tried", r"(?<!tried)toallocate<requested_bytes>(?=" + _GOES_ON + ")"),
    ("huge", r"triedtoallocatemorethan1ebmemory"),
    ("device", _NAME + r"[-:#]?<device_index>hasatotal"),
    ("device", r"\(" + _NAME + r"[-:#]?<device_index>[;,]"),
    ("total", r"hasatotalcapa[a-z]{1,6}of<total_bytes>"),
    # where people retype it, a comma or nothing parts the size from the number of the GPU
    ("total", r"(?:gpu\d(?:\d?[;,])?)?<total_bytes>totalcapa[a-z]{1,6}"),
    ("free", r"(?:of<total_bytes>)?ofwhich<free_bytes>isfree"),
    ("free", r"(?:(?<=[;,)])|(?<=allocated))<free_bytes>free(?=[;,)\s\d]|$)"),
    ("process", _PROCESS),
    ("own", r"thisprocesshas<process_bytes>"),
    ("limit", r"<limit_bytes>allowed(?=[;,)\d])"),
    ("allocated", r"<allocated_bytes>alreadyallocated"),
    ("allocated", r"oftheallocatedmemory<allocated_bytes>"),
    ("active", r"<active_bytes>currentactive"),
    ("cached", r"<reserved_unallocated_bytes>cached(?=[;,.)]|$)"),
    ("reserved", r"<reserved_bytes>reserved(?=intotal|\W|$)"),
    ("private", r"<private_pools_bytes>allocatedinprivate"),
    ("unallocated", r"<reserved_unallocated_bytes>isreservedbypyt"),
    ("stretch", r"asingleallocationcannotspanexpandablesegments"),
    ("tail", _HINT),
    ("tail", r"expandable_segmentsisenabled"),
    ("tail", r"pleaseuse`empty_cache`"),
)
_REPEATABLE: Final = frozenset({"process", "tail"})
_FIGURES: Final = frozenset(
    {"total", "free", "limit", "allocated", "cached", "reserved", "unallocated"}
)


class _Draft(Struct):
    """A message whose clauses are still being collected."""

    start: int
    end: int
    name: str = ""
    seen: set[str] = field(default_factory=set)
    fields: Fields = field(default_factory=dict)
    others: list[OtherProcess] = field(default_factory=list)

    def takes(self, clause: str, start: int) -> bool:
        """Return whether a clause continues this message instead of beginning another."""
        if start - self.end > _GAP or (clause in self.seen and clause not in _REPEATABLE):
            return False
        is_second_start = clause in {"tried", "huge"} and bool(self.seen - {"head"})
        return clause != "head" and not is_second_start

    def add(self, clause: str, match: re.Match[str]) -> None:
        """Add one clause to the message."""
        self.seen.add(clause)
        self.end = max(self.end, match.end())
        groups = match.groupdict()
        if clause == "head":
            self.name = groups["_name"]
        elif clause == "process":
            self.others.append(OtherProcess(int(groups["pid"]), printed_bytes(groups["size"])))
        else:
            self.fields |= {k: value_of(k, v) for k, v in groups.items() if v is not None}


def hits(stream: LogStream) -> Iterator[Hit]:
    """Yield the allocator's messages of a stream in order."""
    draft: _Draft | None = None
    for start, clause, match in _clauses(stream):
        if draft is None or not draft.takes(clause, start):
            if draft is not None:
                yield from _finished(draft, stream)
            draft = None if clause in {"tail", "stretch"} else _Draft(start, match.end())
        if draft is not None:
            draft.add(clause, match)
    if draft is not None:
        yield from _finished(draft, stream)


def _clauses(stream: LogStream) -> list[tuple[int, str, re.Match[str]]]:
    found = [
        (match.start(), name, match)
        for name, pattern in CLAUSES
        for match in matches(pattern, stream.squeezed)
    ]
    return sorted(found, key=lambda item: item[0])


def _finished(draft: _Draft, stream: LogStream) -> Iterator[Hit]:
    if not _is_message(draft, stream):
        return
    text = stream.squeezed[draft.start : draft.end + 700]
    following = text.find("outofmemory", draft.end - draft.start)  # where the next message starts
    fields = draft.fields | _dialect(
        draft.seen, draft.name, text[: following if following >= 0 else None]
    )
    allocated, gap = fields.get("allocated_bytes"), fields.get("reserved_unallocated_bytes")
    reserved, total = fields.get("reserved_bytes"), fields.get("total_bytes")
    whole = (allocated or 0) + (gap or 0)
    if "cached" in draft.seen and whole > (total or whole) > (allocated or whole):
        # Builds between 1.3 and 1.4 print all that is reserved in the words for what is unused.
        fields["reserved_bytes"] = reserved = fields.pop("reserved_unallocated_bytes")
        gap = None
    if reserved is None and allocated is not None and gap is not None:
        fields["reserved_bytes"] = allocated + gap
    elif gap is None and allocated is not None and reserved is not None:
        fields["reserved_unallocated_bytes"] = max(0, reserved - allocated)
    message = OomMessage(
        kind=ALLOCATOR,
        is_device_oom=True,
        other_processes=tuple(draft.others),
        sub_kind=_sub_kind(draft, stream.squeezed[draft.end : draft.end + 8]),
        **fields,
    )
    yield Hit(
        draft.start,
        draft.end,
        located(message, stream, draft.start, draft.end),
        is_whole=bool(draft.seen & {"head", "tried", "huge"}),
    )


def _is_message(draft: _Draft, stream: LogStream) -> bool:
    figures = len(draft.seen & _FIGURES)
    # Source code holds placeholders instead of figures; a list's repr in a log also looks like
    # source code, but has the figures.
    if figures < 3 and is_source(stream, draft.start):
        return False
    if draft.seen & {"tried", "huge"}:
        return True
    return figures >= 2 or ("head" in draft.seen and figures >= 1)


def _sub_kind(draft: _Draft, after: str) -> str:
    if "huge" in draft.seen or draft.fields.get("requested_bytes", 0) > ABSURD_BYTES:
        return "size-bug"
    if "stretch" in draft.seen:
        return "not-in-reserve"
    # torch 2.3.0 printed the device number as a raw byte, and many consoles cut the line there
    return "figures-lost" if not draft.seen & _FIGURES and after.startswith(".gpu") else ""


def _dialect(seen: AbstractSet[str], name: str, text: str) -> Fields:
    """Return what the form of a message shows besides its figures: backend, variant and versions.

    ``seen`` has the names of the message's clauses, ``name`` is the device word of its head
    (``cuda``, ``hip``, ...) or "", and ``text`` is the squeezed message with its tail.
    """
    backend = _backend(seen, name, text)
    if backend == "xpu" and "reserved" in seen:
        variant, low, high = "ipex", "", ""
    elif backend == "xpu":
        has_free = bool(seen & {"free", "limit"})
        variant, low, high = ("xpu-2.9", "2.9", "") if has_free else ("xpu-2.4", "2.4", "2.8")
    elif backend == "npu":
        variant, low, high = "npu", "", ""
    elif seen & {"cached"}:
        variant, low, high = "torch-1.0", "1.0", "1.3"
    elif "reserved" in seen or "alreadyallocated" in text or "(gpu" in text:
        variant, low = "torch-1.4", "1.4"
        high = "1.9" if "reservedintotalbypytorch)" in text else "2.0"
        if "trysettingmax_split_size" in text:
            variant, low, high = "torch-1.10", "1.10", "2.0"
    else:
        variant, low, high = _two(seen, text)
    return {
        "backend": backend,
        "variant": "musa" if backend == "musa" else variant,
        "version_low": low,
        "version_high": high,
        "free_allocated_hint": next((hint for words, hint in _HINTS if words in text), ""),
        "expandable_is_on": True if "expandable_segmentsisenabled" in text else None,
    }


_HINTS: Final = (
    ("expandable_segments_reserve", "expandable_segments_reserve"),
    ("conf=expandable_segments:true", "expandable_segments:True"),
    ("trysettingmax_split_size_mb", "max_split_size_mb"),
    ("`empty_cache`", "empty_cache"),
)


def _backend(seen: AbstractSet[str], name: str, text: str) -> str:
    if name and name != "cuda":
        return BACKEND_OF_WORD[name]
    if "active" in seen or "(npu" in text:
        return "npu"
    if "pleaseuse`empty_cache`" in text:
        return "xpu"
    if "pytorch_hip_alloc_conf" in text:
        return "rocm"
    if "pytorch_musa_alloc_conf" in text:
        return "musa"
    return "cuda"


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


# Words that settle the version, latest version first.
_TWO: Final = (
    ("expandable_segmentsisenabled", ("torch-2.15", "2.15", "")),
    ("cannotspanexpandable", ("torch-2.15", "2.15", "")),
    ("capactyof", ("torch-2.1", "2.1", "2.1")),
    ("docs.pytorch.org", ("torch-2.10", "2.10", "")),
    ("pytorch_alloc_conf=", ("torch-2.9", "2.9", "2.9")),
)
