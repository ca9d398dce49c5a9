"""A list of allocations and frees, and what follows from it: peaks by phase, reserved memory.

Every estimate plays a training step as such a list, tensor by tensor, so that a peak is the sum of
what is alive at one moment and not the sum of separate maxima. Reserved memory comes from driving
the exact model of the caching allocator with the same list.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from fragdoctor.model.estimate import PhaseName, PhasePeak, Share
from fragdoctor.trace.allocator import Allocator

ROUNDING: Final = 512
# A mixture of experts has tens of thousands of equal tensors: beyond this many requests, equal
# tensors that come and go together are given to the allocator as one.
MAX_EXPANDED: Final = 20_000
# No device has a thousandth of it: the allocator's part does not matter then.
ABSURD_BYTES: Final = 2**50


@dataclass(frozen=True, slots=True)
class Event:
    """One step of the list; ``n_bytes`` is of one tensor, before rounding."""

    kind: str  # alloc, free, phase, moment
    handle: int = 0
    tag: str = ""
    n_bytes: int = 0
    count: int = 1


def rounded(n_bytes: int) -> int:
    """Return what the allocator hands out for a request: a multiple of 512 bytes."""
    return -(-n_bytes // ROUNDING) * ROUNDING


class Tape:
    """Collects events."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._tensors: list[tuple[str, int, int]] = []

    def alloc(self, tag: str, n_bytes: float, count: int = 1) -> int:
        """Allocate ``count`` equal tensors and return their handle; -1 for nothing."""
        size = int(n_bytes)
        if size <= 0 or count <= 0:
            return -1
        handle = len(self._tensors)
        self._tensors.append((tag, size, count))
        self.events.append(Event("alloc", handle, tag, size, count))
        return handle

    def free(self, *handles: int) -> None:
        """Free what the handles stand for, in this order."""
        for handle in handles:
            if handle >= 0:
                tag, size, count = self._tensors[handle]
                self.events.append(Event("free", handle, tag, size, count))

    def phase(self, name: PhaseName) -> None:
        """Begin a phase."""
        self.events.append(Event("phase", tag=name.value))

    def moment(self, text: str) -> None:
        """Name what happens from here on."""
        self.events.append(Event("moment", tag=text))


def most_of_each(tape: Tape) -> Mapping[str, int]:
    """Return the most that each tag ever holds."""
    live: defaultdict[str, int] = defaultdict(int)
    most: defaultdict[str, int] = defaultdict(int)
    for event in tape.events:
        size = rounded(event.n_bytes) * event.count
        if event.kind == "alloc":
            live[event.tag] += size
            most[event.tag] = max(most[event.tag], live[event.tag])
        elif event.kind == "free":
            live[event.tag] -= size
    return most


def phases_of(tape: Tape) -> list[PhasePeak]:
    """Return the peak of each phase, in the order in which they first begin."""
    live: defaultdict[str, int] = defaultdict(int)
    best: dict[str, tuple[int, dict[str, int], str]] = {}
    total, phase, moment, grew = 0, "", "", False

    def settle() -> None:
        # The highest point lies before a free that follows an allocation: looked at only there.
        nonlocal grew
        if phase and grew and total > best.get(phase, (-1,))[0]:
            best[phase] = (total, dict(live), moment)
        grew = False

    for event in tape.events:
        if event.kind == "alloc":
            size = rounded(event.n_bytes) * event.count
            live[event.tag] += size
            total, grew = total + size, True
        else:
            settle()
            if event.kind == "free":
                size = rounded(event.n_bytes) * event.count
                live[event.tag] -= size
                total -= size
            elif event.kind == "phase":
                phase, grew = event.tag, True
            else:
                moment = event.tag
    settle()
    return [
        PhasePeak(
            name=PhaseName(name),
            n_bytes=n_bytes,
            shares=tuple(Share(tag, n) for tag, n in shares.items() if n > 0),
            moment=where,
        )
        for name, (n_bytes, shares, where) in best.items()
    ]


def reserved_of(tape: Tape) -> int:
    """Return the most that the caching allocator reserves for the list, with default settings."""
    requests = [e for e in tape.events if e.kind == "alloc"]
    if any(e.n_bytes * e.count > ABSURD_BYTES for e in requests):
        return max((phase.n_bytes for phase in phases_of(tape)), default=0)
    allocator = Allocator()
    n_tensors = sum(e.count for e in requests)
    merges = n_tensors > MAX_EXPANDED
    addresses: dict[int, Sequence[int]] = {}
    for event in tape.events:
        if event.kind == "alloc":
            addresses[event.handle] = _served(allocator, event, merges=merges)
        elif event.kind == "free":
            for address in addresses.pop(event.handle):
                allocator.free(address)
    return allocator.peak_reserved_bytes


def _served(allocator: Allocator, event: Event, *, merges: bool) -> Sequence[int]:
    if merges and event.count > 1:
        return [allocator.malloc(rounded(event.n_bytes) * event.count)]
    return [allocator.malloc(event.n_bytes) for _ in range(event.count)]
