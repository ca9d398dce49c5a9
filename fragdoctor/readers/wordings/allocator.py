"""The caching allocator's message, torch 1.0 to 2.15, on CUDA, ROCm, XPU, NPU and MUSA.

The message is read clause by clause, not by one template: a text that was cut, retyped or
broken by other lines still gives the figures that are left.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from fragdoctor.model.oom import OomMessage, OtherProcess
from fragdoctor.readers.log import Stream
from fragdoctor.readers.wordings import names
from fragdoctor.readers.wordings.base import (
    Fields,
    Hit,
    compile_squeezed,
    is_source,
    located,
    parse_size,
    value_of,
)
from fragdoctor.readers.wordings.versions import dialect

_ABSURD_BYTES: Final = 16 * 2**40  # no device is near; such a size was computed from garbage
_GAP: Final = 700  # squeezed characters between two clauses of one message, at most


@dataclass(frozen=True, slots=True)
class Clause:
    """A part of the message: what stands around ``literal``, ``back`` characters before it on."""

    name: str
    literal: str
    pattern: re.Pattern[str]
    back: int = 0


def _clause(name: str, literal: str, pattern: str, back: int = 0) -> Clause:
    return Clause(name, literal, compile_squeezed(pattern), back)


_NAME: Final = r"(?:gpu|npu|xpu|musa|mlu|gcu|device)"
CLAUSES: Final = (
    _clause("head", "outofmemory", r"(?P<_name>cuda|hip|xpu|npu|musa|mlu|gcu)outofmemory", 4),
    _clause("tried", "triedtoalloc", r"triedtoallocate<requested_bytes>"),
    _clause("huge", "triedtoallocatemorethan", r"triedtoallocatemorethan1ebmemory"),
    _clause("device", "hasatotal", _NAME + r"[-:#]?<device_index>hasatotal", 12),
    _clause("device", ";", r"\(" + _NAME + r"[-:#]?<device_index>;", 12),
    _clause("total", "hasatotalcapa", r"hasatotalcapa[a-z]{1,6}of<total_bytes>"),
    _clause("total", "totalcapa", r"<total_bytes>totalcapa[a-z]{1,6}", 30),
    _clause("free", "ofwhich", r"ofwhich<free_bytes>isfree"),
    _clause("free", "free", r"(?<=[;,)])<free_bytes>free(?=[;,)\s]|$)", 30),
    _clause("process", "memoryinuse", r"process(?P<pid>\d{1,12})has(?P<size>SIZE)memoryinuse", 60),
    _clause("own", "thisprocesshas", r"thisprocesshas<process_bytes>memoryinuse"),
    _clause("limit", "allowed", r"<limit_bytes>allowed(?=[;,)])", 30),
    _clause("allocated", "alreadyallocated", r"<allocated_bytes>alreadyallocated", 30),
    _clause("allocated", "isallocatedbypyt", r"<allocated_bytes>isallocatedbypytorch", 30),
    _clause("active", "currentactive", r"<active_bytes>currentactive", 30),
    _clause("cached", "cached", r"<reserved_unallocated_bytes>cached(?=[;,.)]|$)", 30),
    _clause("reserved", "reservedintotal", r"<reserved_bytes>reservedintotal", 30),
    _clause("private", "allocatedinpriv", r"<private_pools_bytes>allocatedinprivate", 30),
    _clause("unallocated", "isreservedbypyt", r"<reserved_unallocated_bytes>isreservedbypyt", 30),
    _clause("stretch", "cannotspanexp", r"asingleallocationcannotspanexpandablesegments", 20),
    _clause("tail", "ifreserved", r"ifreserved(?:butunallocated)?memoryis"),
    _clause("tail", "expandable_seg", r"expandable_segmentsisenabled"),
    _clause("tail", "pleaseuse`empty", r"pleaseuse`empty_cache`"),
)
_REPEATABLE: Final = frozenset({"process", "tail"})
_FIGURES: Final = frozenset({"total", "free", "allocated", "cached", "reserved", "unallocated"})


@dataclass(slots=True)
class _Draft:
    """A message while its clauses come in."""

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
        """Take one clause in."""
        self.seen.add(clause)
        self.end = max(self.end, match.end())
        groups = match.groupdict()
        if clause == "head":
            self.name = groups["_name"]
        elif clause == "process":
            self.others.append(OtherProcess(int(groups["pid"]), parse_size(groups["size"])))
        else:
            self.fields |= {k: value_of(k, v) for k, v in groups.items() if v is not None}


def hits(stream: Stream) -> Iterator[Hit]:
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


def _clauses(stream: Stream) -> list[tuple[int, str, re.Match[str]]]:
    text = stream.squeezed
    found: list[tuple[int, str, re.Match[str]]] = []
    for clause in CLAUSES:
        position = 0
        while (at := text.find(clause.literal, position)) >= 0:
            position = at + len(clause.literal)
            match = _around(clause, text, at)
            if match is not None:
                found.append((match.start(), clause.name, match))
    return sorted(found, key=lambda item: item[0])


def _around(clause: Clause, text: str, at: int) -> re.Match[str] | None:
    end = at + len(clause.literal)
    for start in range(max(0, at - clause.back), at + 1):
        match = clause.pattern.match(text, start)
        if match is not None and match.end() >= end:
            return match
    return None


def _finished(draft: _Draft, stream: Stream) -> Iterator[Hit]:
    if not _is_message(draft, stream):
        return
    text = stream.squeezed[draft.start : draft.end + 700]
    found = dialect(draft.seen, draft.name, text[: _tail_length(text, draft)])
    fields = draft.fields
    allocated, gap = fields.get("allocated_bytes"), fields.get("reserved_unallocated_bytes")
    reserved = fields.get("reserved_bytes")
    if reserved is None and allocated is not None and gap is not None:
        fields["reserved_bytes"] = allocated + gap
    elif gap is None and allocated is not None and reserved is not None:
        fields["reserved_unallocated_bytes"] = max(0, reserved - allocated)
    message = OomMessage(
        kind=names.ALLOCATOR,
        backend=found.backend,
        is_device_oom=True,
        other_processes=tuple(draft.others),
        variant=found.variant,
        version_low=found.version_low,
        version_high=found.version_high,
        sub_kind=_sub_kind(draft, stream.squeezed[draft.end : draft.end + 8]),
        free_allocated_hint=found.hint,
        expandable_is_on=found.expandable_is_on,
        **fields,
    )
    yield Hit(
        draft.start,
        draft.end,
        located(message, stream, draft.start, draft.end),
        is_whole=bool(draft.seen & {"head", "tried", "huge"}),
    )


def _tail_length(text: str, draft: _Draft) -> int:
    """Return how much of the text belongs to this message: up to the next one, or all."""
    following = text.find("outofmemory", draft.end - draft.start)
    return following if following >= 0 else len(text)


def _is_message(draft: _Draft, stream: Stream) -> bool:
    figures = len(draft.seen & _FIGURES)
    # Program text holds placeholders, not figures: a list's repr in a log looks like source too.
    if figures < 3 and is_source(stream, draft.start):
        return False
    if draft.seen & {"tried", "huge"}:
        return True
    return figures >= 2 or ("head" in draft.seen and figures >= 1)


def _sub_kind(draft: _Draft, after: str) -> str:
    if "huge" in draft.seen or draft.fields.get("requested_bytes", 0) > _ABSURD_BYTES:
        return "size-bug"
    if "stretch" in draft.seen:
        return "not-in-reserve"
    # torch 2.3.0 printed the device number as a raw byte, at which many consoles cut the line
    return "figures-lost" if not draft.seen & _FIGURES and after.startswith(".gpu") else ""
