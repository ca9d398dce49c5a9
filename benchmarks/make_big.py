"""Make a large realistic snapshot: a training loop on the allocator model, pickled as usual.

Every address is one that PyTorch's allocator would return (``fragdoctor.Allocator``), so that the
file can be replayed. Batches vary in length, one line keeps a little memory from some steps, and
the last batches grow until a request fails: the trace ends with an ``oom``. As in PyTorch, frames,
stacks, keys and action names are shared objects, and pool ids and compile contexts are new objects
in every event. The file is written while the program runs, so that ten million events need no more
memory than ten thousand; that is why ``device_traces`` comes before ``segments``.

    python benchmarks/make_big.py big.pickle --events 1000000
"""

from __future__ import annotations

import argparse
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from fragdoctor import Allocator
from fragdoctor.errors import OutOfMemory
from fragdoctor.trace.allocator import Segment

KIB, MIB = 1 << 10, 1 << 20
VERSION = "2.13.0"  # the oldest to write the keys of `Writer.event` and to order blocks as it does
CAPACITY_BYTES = 6 << 30
N_LAYERS = 64
N_LEAKS, LEAK_BYTES = 96, 3 * MIB
LAST_EVENTS = 5_000  # number of final events in which each batch is longer than the one before
BATCH = 1000
MEMOIZE = b"\x94"


class Stack(list[dict[str, Any]]):
    """Frames, innermost first; a stack and each of its frames is pickled once, then referred to."""


class Writer:
    """Makes a pickle of protocol 4 piece by piece, numbering the memo like Python's own pickler."""

    def __init__(self, sink: Callable[[bytes], object]) -> None:
        self.sink = sink
        self.n_memo = 0
        self.known: dict[str | int, bytes] = {}

    def value(self, value: Any) -> bytes:
        """Return the pickle of a value; a text or stack pickled before becomes a reference."""
        if isinstance(value, str):
            return self.known.get(value) or self.text(value)
        if isinstance(value, Stack):
            return self.known.get(id(value)) or self.stack(value)
        if isinstance(value, int | float):
            return number(value)
        return self.container(value)

    def container(self, value: tuple[int, int] | dict[str, Any] | list[Any]) -> bytes:
        """Return the pickle of a container that occurs only once."""
        self.n_memo += 1
        if isinstance(value, tuple):
            # A tuple is memoized after its items, which are numbers.
            return b"".join((self.value(value[0]), self.value(value[1]), b"\x86", MEMOIZE))
        if isinstance(value, dict):
            parts = [self.value(part) for item in value.items() for part in item]
            return b"".join((b"}", MEMOIZE, *((b"(", *parts, b"u") if parts else ())))
        parts = [self.value(item) for item in value]
        return b"".join((b"]", MEMOIZE, *((b"(", *parts, b"e") if parts else ())))

    def remember(self, key: str | int) -> None:
        """Store the reference to the object that is memoized next."""
        index = self.n_memo
        self.n_memo += 1
        self.known[key] = b"h" + bytes((index,)) if index < 256 else b"j" + struct.pack("<I", index)

    def text(self, text: str) -> bytes:
        """Return the pickle of a text that was not pickled before."""
        self.remember(text)
        data = text.encode()
        return b"\x8c" + bytes((len(data),)) + data + MEMOIZE

    def stack(self, stack: Stack) -> bytes:
        """Return the pickle of a stack that was not pickled before."""
        self.remember(id(stack))
        parts = []
        for frame in stack:
            if id(frame) not in self.known:
                self.remember(id(frame))
                items = [self.value(part) for item in frame.items() for part in item]
                parts.append(b"".join((b"}", MEMOIZE, b"(", *items, b"u")))
            else:
                parts.append(self.known[id(frame)])
        return b"".join((b"]", MEMOIZE, b"(", *parts, b"e"))

    def event(self, action: str, address: int, size: int, stack: Stack, time_us: int) -> bytes:
        """Return the pickle of one event, with the keys of a recent PyTorch in the same order."""
        get = self.value
        self.n_memo += 1  # the event itself
        where = "device_free" if action == "oom" else "addr"
        head = (b"}", MEMOIZE, b"(", get("action"), get(action), get(where), number(address))
        middle = (get("size"), number(size), get("stream"), b"K\x00", get("frames"), get(stack))
        time = (get("time_us"), number(time_us), get("compile_context"), b"\x8c\x03N/A", MEMOIZE)
        self.n_memo += 1  # a new string each time
        tail = (get("user_metadata"), get(""), get("pool_id"), b"K\x00K\x00\x86", MEMOIZE, b"u")
        self.n_memo += 1  # a new tuple each time
        return b"".join((*head, *middle, *time, *tail))


def number(value: float) -> bytes:
    """Return the pickle of a number or bool, as short as Python's pickler makes it."""
    if isinstance(value, bool):
        return b"\x88" if value else b"\x89"
    if isinstance(value, float):
        return b"G" + struct.pack(">d", value)
    if 0 <= value < 256:
        return b"K" + bytes((value,))
    if 0 <= value < 65536:
        return b"M" + struct.pack("<H", value)
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes((len(data),)) + data


class Program:
    """A training loop that writes its allocator's events while it runs."""

    def __init__(self, writer: Writer, seed: int) -> None:
        self.random = random.Random(seed)
        self.writer = writer
        self.allocator = Allocator("", CAPACITY_BYTES, VERSION)
        self.n_events = 0
        self.time_us = 1_700_000_000_000_000
        self.batch: list[bytes] = []
        self.live: dict[int, tuple[int, Stack]] = {}
        self.segments: dict[int, tuple[Segment, Stack]] = {}
        self.n_driver_calls = 0
        self.common = [
            {"name": f"call_{j}", "filename": f"/venv/lib/torch/nn/module_{j % 7}.py", "line": j}
            for j in range(30)
        ]
        self.loop = {"name": "main", "filename": "/home/me/train.py", "line": 88}

    def stack(self, name: str, line: int) -> Stack:
        """Return a stack with the user's line, between library frames, down to the loop."""
        own = {"name": name, "filename": "/home/me/train.py", "line": line}
        depth = self.random.randint(8, 30)
        return Stack([*self.common[:3], own, *self.common[3:depth], self.loop])

    def event(self, action: str, address: int, size: int, stack: Stack) -> None:
        """Write one event."""
        self.time_us += self.random.randrange(40)
        self.batch.append(self.writer.event(action, address, size, stack, self.time_us))
        self.n_events += 1
        if len(self.batch) == BATCH:
            self.flush()

    def flush(self) -> None:
        """Write the collected events."""
        self.writer.sink(b"".join((b"(", *self.batch, b"e")) if self.batch else b"")
        self.batch.clear()

    def allocate(self, size: int, stack: Stack) -> int:
        """Make one request."""
        try:
            address = self.allocator.malloc(size)
        except OutOfMemory as error:
            self.compare_segments(stack)
            self.event("oom", error.free_bytes, -(-size // 512) * 512, stack)
            raise
        if self.allocator.driver_calls != self.n_driver_calls:
            self.compare_segments(stack)
        self.live[address] = (size, stack)
        self.event("alloc", address, size, stack)
        return address

    def free(self, address: int) -> None:
        """Free one block."""
        self.allocator.free(address)
        size, stack = self.live.pop(address)
        self.event("free_requested", address, size, stack)
        self.event("free_completed", address, size, stack)

    def compare_segments(self, stack: Stack) -> None:
        """Write events for the segments that were freed or allocated since the last call."""
        self.n_driver_calls = self.allocator.driver_calls
        now = {s.address: s for s in self.allocator.segments()}
        old = {a: s for a, (s, _) in self.segments.items()}
        is_gone = [s for a, s in old.items() if a not in now or now[a].total_bytes != s.total_bytes]
        # A flush frees the large pool first, each pool by size, equal segments as they were made.
        for s in sorted(is_gone, key=lambda s: (s.segment_type, s.total_bytes)):
            del self.segments[s.address]
            self.event("segment_free", s.address, s.total_bytes, stack)
        for address, s in now.items():
            if address not in self.segments:
                self.segments[address] = (s, stack)
                self.event("segment_alloc", address, s.total_bytes, stack)

    def run(self, n_events: int) -> None:
        """Train for about ``n_events`` events; the last batches get longer until one fails."""
        parameters = [self.stack("build", 10 + i) for i in range(N_LAYERS)]
        for i, stack in enumerate(parameters):
            for _ in range(4):  # weights, gradients and the optimizer's two averages
                self.allocate((1 + i % 4) * MIB, stack)
        layers = [
            (self.stack("forward", 100 + 4 * i), self.stack("scratch", 101 + 4 * i))
            for i in range(N_LAYERS)
        ]
        keep = self.stack("log_metrics", 400)
        next_leak, length = 0, 0.0
        while True:
            is_last = self.n_events >= n_events - LAST_EVENTS
            length = max(1.0, length) * 1.25 if is_last else self.random.uniform(0.3, 1.0)
            try:
                self.step(length, layers)
                if self.n_events >= next_leak:
                    self.allocate(LEAK_BYTES, keep)
                    next_leak += n_events // N_LEAKS
            except OutOfMemory:
                return

    def step(self, length: float, layers: list[tuple[Stack, ...]]) -> None:
        """Run one step: allocate activations forward, and their gradients backward."""
        made = []
        for i, (forward, scratch) in enumerate(layers):
            work = self.allocate(int(length * (200 + 37 * (i % 5)) * KIB), scratch)
            made.append(self.allocate(int(length * (3 + i % 6) * 2 * MIB), forward))
            made.append(self.allocate(int(length * (1 + i % 3) * 300 * KIB), forward))
            self.free(work)
        for i in range(len(made) - 1, -1, -1):
            gradient = self.allocate(self.live[made[i]][0], layers[i // 2][1])
            self.free(made[i])
            self.free(gradient)

    def segment_values(self) -> list[dict[str, Any]]:
        """Return the segments in the format of ``torch.cuda.memory._snapshot()``."""
        return [self.segment(s, self.segments[s.address][1]) for s in self.allocator.segments()]

    def segment(self, s: Segment, stack: Stack) -> dict[str, Any]:
        """Return one segment in that format."""
        held = [b for b in s.blocks if b.state == "active_allocated"]
        blocks = [
            {
                "address": b.address,
                "size": b.size_bytes,
                "requested_size": b.requested_bytes,
                "state": b.state,
                "frames": self.live[b.address][1] if b.address in self.live else [],
            }
            for b in s.blocks
        ]
        return {
            "device": 0,
            "address": s.address,
            "total_size": s.total_bytes,
            "allocated_size": sum(b.size_bytes for b in held),
            "active_size": sum(b.size_bytes for b in held),
            "requested_size": sum(b.requested_bytes for b in held),
            "stream": 0,
            "segment_type": s.segment_type,
            "segment_pool_id": (0, 0),
            "is_expandable": False,
            "frames": stack,
            "blocks": blocks,
        }


SETTINGS: dict[str, Any] = {
    "PYTORCH_CUDA_ALLOC_CONF": "",
    "max_split_size": -1,
    "garbage_collection_threshold": 0.0,
    "expandable_segments": False,
    "roundup_power2_divisions": {str(1 << i): 0 for i in range(16)},
}


def make_big(path: Path, n_events: int = 1_000_000, seed: int = 1) -> int:
    """Write a snapshot of about ``n_events`` events to ``path``; return their number."""
    with path.open("wb") as file:
        return _write(file, n_events, seed)


def _write(file: BinaryIO, n_events: int, seed: int) -> int:
    writer = Writer(file.write)
    program = Program(writer, seed)
    writer.n_memo = 1  # the snapshot itself
    file.write(b"\x80\x04}" + MEMOIZE + b"(" + writer.value("device_traces"))
    writer.n_memo += 2  # the list of devices, and the list of the first device's events
    file.write(b"]" + MEMOIZE + b"(]" + MEMOIZE)
    program.run(n_events)
    program.flush()
    file.write(b"e")
    rest = {
        "segments": program.segment_values(),
        "allocator_settings": SETTINGS,
        "external_annotations": [],
    }
    file.writelines(writer.value(part) for item in rest.items() for part in item)
    file.write(b"u.")
    return program.n_events


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    print(f"{make_big(options.path, options.events, options.seed):,} events")
