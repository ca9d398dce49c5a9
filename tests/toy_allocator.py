"""A small, slow, obvious caching allocator that writes snapshots and remembers the truth.

It has ordinary segments only, with best fit, splitting and merging by the rules in the allocator's
documentation, so that the states that the analysis reconstructs can be compared with the real ones.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from builders import BASE, MIB, block, event, frame, segment, snapshot


@dataclass
class Block:
    address: int
    size: int
    state: str = "inactive"
    requested: int = 0
    line: int = 0


@dataclass
class Segment:
    address: int
    size: int
    stream: int
    blocks: list[Block]

    @property
    def is_small(self) -> bool:
        return self.size == 2 * MIB


@dataclass
class ToyAllocator:
    """Allocates and frees; ``states`` holds (allocated, active, reserved) after each event."""

    segments: list[Segment] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    states: list[tuple[int, int, int]] = field(default_factory=lambda: [(0, 0, 0)])
    layouts: list[list[tuple[int, int]]] = field(default_factory=lambda: [[]])

    def malloc(self, requested: int, stream: int = 0, line: int = 1) -> Block:
        size = max(512, -(-requested // 512) * 512)
        is_small = size <= MIB
        fits = [
            (b.size, b.address, s, b)
            for s in self.segments
            if s.stream == stream and s.is_small == is_small
            for b in s.blocks
            if b.state == "inactive" and b.size >= size
        ]
        if fits:
            _, _, owner, found = min(fits, key=lambda f: f[:2])
        else:
            owner = self._new_segment(size, stream)
            found = owner.blocks[0]
        rest = found.size - size
        if rest >= 512 if is_small else rest > MIB:
            i = owner.blocks.index(found)
            owner.blocks.insert(i + 1, Block(found.address + size, rest))
            found.size = size
        found.state, found.requested, found.line = "active_allocated", requested, line
        self._log("alloc", found.address, requested, stream, line)
        return found

    def free(self, chosen: Block, *, pending: bool = False) -> None:
        chosen.state = "active_pending_free"
        self._log("free_requested", chosen.address, chosen.requested, 0, chosen.line)
        if not pending:
            self.complete(chosen)

    def complete(self, chosen: Block) -> None:
        owner = next(s for s in self.segments if chosen in s.blocks)
        chosen.state = "inactive"
        i = owner.blocks.index(chosen)
        if i + 1 < len(owner.blocks) and owner.blocks[i + 1].state == "inactive":
            chosen.size += owner.blocks.pop(i + 1).size
        if i > 0 and owner.blocks[i - 1].state == "inactive":
            owner.blocks[i - 1].size += owner.blocks.pop(i).size
        self._log("free_completed", chosen.address, chosen.requested, 0, chosen.line)

    def empty_cache(self) -> None:
        for s in list(self.segments):
            if all(b.state == "inactive" for b in s.blocks):
                self.segments.remove(s)
                self._log("segment_free", s.address, s.size, s.stream, 0)

    def refuse(self, requested: int, device_free: int, line: int = 1) -> None:
        """Log a request that failed while the driver had ``device_free`` bytes."""
        self._log("oom", 0, requested, 0, line)
        del self.events[-1]["addr"]
        self.events[-1]["device_free"] = device_free

    def _new_segment(self, size: int, stream: int) -> Segment:
        total = 2 * MIB if size <= MIB else 20 * MIB
        if size >= 10 * MIB:
            total = -(-size // (2 * MIB)) * 2 * MIB
        address = BASE
        for s in sorted(self.segments, key=lambda s: s.address):
            if s.address - address >= total:
                break
            address = s.address + s.size
        made = Segment(address, total, stream, [Block(address, total)])
        self.segments.append(made)
        self._log("segment_alloc", address, total, stream, 0)
        return made

    def _log(self, action: str, address: int, size: int, stream: int, line: int) -> None:
        frames = [frame(line=line)] if line else None
        self.events.append(event(action, address, size, stream=stream, frames=frames))
        blocks = [b for s in self.segments for b in s.blocks]
        active = [b for b in blocks if b.state != "inactive"]
        self.states.append(
            (
                sum(b.size for b in blocks if b.state == "active_allocated"),
                sum(b.size for b in active),
                sum(s.size for s in self.segments),
            )
        )
        self.layouts.append(sorted((b.address, b.size) for b in blocks if b.state == "inactive"))

    def data(self, first_event: int = 0) -> dict[str, Any]:
        """Return the snapshot with the events from ``first_event`` on."""
        segments = [
            segment(
                s.address,
                *(
                    block(
                        b.size,
                        b.state,
                        address=b.address,
                        requested=b.requested,
                        frames=[frame(line=b.line)] if b.line else None,
                    )
                    for b in s.blocks
                ),
                stream=s.stream,
                kind="small" if s.is_small else "large",
            )
            for s in sorted(self.segments, key=lambda s: s.address)
        ]
        return snapshot(*segments, events=self.events[first_event:])


SIZES = (1, 700, 4096, 300_000, MIB, MIB + 1, 3 * MIB, 9 * MIB + 5, 10 * MIB, 11 * MIB, 19 * MIB)


def random_run(seed: int, n_ops: int) -> ToyAllocator:
    """Return an allocator after a random program on two streams, with pending frees."""
    rng = random.Random(seed)
    toy = ToyAllocator()
    live: list[Block] = []
    pending: list[Block] = []
    for _ in range(n_ops):
        choice = rng.random()
        if choice < 0.5 or not live:
            size = rng.choice(SIZES) + rng.choice((0, 0, rng.randrange(MIB)))
            live.append(toy.malloc(size, rng.choice((0, 0, 0, 7)), rng.randrange(1, 5)))
        elif choice < 0.85:
            toy.free(live.pop(rng.randrange(len(live))))
        elif choice < 0.93:
            pending.append(live.pop(rng.randrange(len(live))))
            toy.free(pending[-1], pending=True)
        elif choice < 0.97 and pending:
            toy.complete(pending.pop(0))
        else:
            toy.empty_cache()
    return toy
