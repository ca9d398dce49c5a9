"""The table of all wordings, and which hit counts where several match."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final

from fragdoctor.inputs.log_streams import Stream
from fragdoctor.inputs.wordings.allocator_message import VARIANTS, hits
from fragdoctor.inputs.wordings.backends import CUDA_ASYNC, JAX_AND_TENSORFLOW, MPS
from fragdoctor.inputs.wordings.driver import DRIVERS, LIBRARIES
from fragdoctor.inputs.wordings.frameworks import FRAMEWORKS, KV_CACHE_CHECKS
from fragdoctor.inputs.wordings.not_device import HOST_MEMORY, NOT_DEVICE_MEMORY
from fragdoctor.inputs.wordings.wording import Hit, Wording
from fragdoctor.model.case import OomMessage

# Earlier families win where two match the same words.
WORDINGS: Final[tuple[Wording, ...]] = (
    *MPS,
    *CUDA_ASYNC,
    *KV_CACHE_CHECKS,
    *JAX_AND_TENSORFLOW,
    *FRAMEWORKS,
    *LIBRARIES,
    *HOST_MEMORY,
    *DRIVERS,
    *NOT_DEVICE_MEMORY,
)
_GROUP_GAP: Final = 900  # squeezed characters between the parts of one report, at most


def variants() -> tuple[str, ...]:
    """Return the names of all wordings that stand in the table, sorted."""
    return tuple(sorted({w.variant for w in WORDINGS} | set(VARIANTS)))


def hits_of(stream: Stream) -> Iterator[Hit]:
    """Yield the hits of a stream in order; where they overlap, the one of the first family."""
    ranked: list[tuple[int, int, Hit]] = [(-1, hit.start, hit) for hit in hits(stream)]
    for priority, wording in enumerate(WORDINGS):
        ranked.extend((priority, hit.start, hit) for hit in wording.hits(stream))
    taken = _without_overlaps(ranked)
    yield from _grouped(taken)


def _without_overlaps(ranked: Iterable[tuple[int, int, Hit]]) -> list[Hit]:
    kept: list[tuple[int, Hit]] = []
    for priority, _start, hit in sorted(ranked, key=lambda item: (item[1], item[0])):
        if kept and hit.start < kept[-1][1].end:
            # MPS and cudaMallocAsync also say "Tried to allocate": the specific family wins
            if kept[-1][0] == -1 and priority >= 0 and hit.start <= kept[-1][1].start:
                kept[-1] = (priority, hit)
            continue
        kept.append((priority, hit))
    return [hit for _priority, hit in kept]


def _grouped(hits: Iterable[Hit]) -> Iterator[Hit]:
    """Yield hits, parts of one report merged into its first."""
    last: Hit | None = None
    for hit in hits:
        if last and hit.group and hit.group == last.group and hit.start - last.end < _GROUP_GAP:
            last = replace(last, end=hit.end, message=_filled(last.message, hit.message))
            continue
        if last:
            yield last
        last = hit
    if last:
        yield last


_FILLABLE: Final = (
    "device_index", "requested_bytes", "total_bytes", "free_bytes", "allocated_bytes",
    "reserved_bytes", "limit_bytes",
)  # fmt: skip


def _filled(first: OomMessage, second: OomMessage) -> OomMessage:
    missing = {name: getattr(second, name) for name in _FILLABLE if getattr(first, name) is None}
    return replace(first, **missing)
