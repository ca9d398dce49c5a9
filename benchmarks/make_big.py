"""Makes a large realistic snapshot: the history of an allocator-like program, pickled as usual.

Frames, stacks, keys and action names are shared objects, as PyTorch shares them; pool ids and
compile contexts are new objects in every event, as PyTorch's are. The history is consistent:
addresses do not overlap, every free follows its allocation, blocks tile their segments.

    python benchmarks/make_big.py big.pickle --events 1000000
"""

from __future__ import annotations

import argparse
import pickle
import random
from pathlib import Path
from typing import Any

MIB = 1 << 20
N_STACKS = 300
SMALL, LARGE = (512, 4096, 65536, 262144), (2 * MIB, 6 * MIB, 14 * MIB, 24 * MIB, 96 * MIB)


class Program:
    """Allocates and frees in steps, as a training loop does; keeps the trace."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.stacks = [self._stack(i) for i in range(N_STACKS)]
        self.free: dict[int, list[int]] = {size: [] for size in SMALL + LARGE}
        self.live: list[tuple[int, int, int, list[Any]]] = []
        self.segments: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []
        self.next_address = 0x7F0000000000
        self.time_us = 1_700_000_000_000_000

    def _stack(self, i: int) -> list[dict[str, Any]]:
        depth = self.random.randint(12, 40)
        common = [
            {"name": f"call_{j}", "filename": f"/venv/lib/torch/nn/module_{j % 7}.py", "line": j}
            for j in range(depth)
        ]
        return [{"name": f"forward_{i}", "filename": "/home/me/train.py", "line": 10 + i}, *common]

    def event(self, action: str, address: int, size: int, stack: list[Any]) -> None:
        """Append one event with the keys, and their order, of a recent PyTorch."""
        self.time_us += self.random.randrange(40)
        self.events.append(
            {
                "action": action,
                "addr": address,
                "size": size,
                "stream": 0,
                "frames": stack,
                "time_us": self.time_us,
                "compile_context": "".join(("N", "/A")),  # noqa: FLY002 - a new string each time
                "user_metadata": "",
                "pool_id": tuple([0, 0]),  # noqa: C409 - a new tuple each time
            }
        )

    def grow(self, size: int, stack: list[Any]) -> None:
        """Reserve a segment and cut it into blocks of one size."""
        total = 2 * MIB if size <= MIB else 20 * MIB if size < 10 * MIB else size
        address = self.next_address
        self.next_address += total
        addresses = [address + i * size for i in range(total // size)]
        self.free[size].extend(reversed(addresses))
        self.segments.append({"address": address, "total": total, "size": size, "stack": stack})
        self.event("segment_alloc", address, total, stack)

    def allocate(self) -> None:
        """Serve one request, from the cache where possible."""
        sizes = SMALL if self.random.random() < 0.8 else LARGE
        size = self.random.choice(sizes)
        stack = self.random.choice(self.stacks)
        if not self.free[size]:
            self.grow(size, stack)
        address = self.free[size].pop()
        requested = size - self.random.randrange(256)
        self.live.append((address, size, requested, stack))
        self.event("alloc", address, requested, stack)

    def release(self, at: int) -> None:
        """Free one live block."""
        address, size, requested, stack = self.live[at]
        self.live[at] = self.live[-1]
        self.live.pop()
        self.free[size].append(address)
        self.event("free_requested", address, requested, stack)
        self.event("free_completed", address, requested, stack)

    def run(self, n_events: int) -> None:
        """Run until the trace has at least ``n_events`` events."""
        while len(self.events) < n_events:
            if len(self.live) > 5000 or (self.live and self.random.random() < 0.47):
                self.release(self.random.randrange(len(self.live)))
            else:
                self.allocate()
        del self.events[n_events:]

    def snapshot(self) -> dict[str, Any]:
        """Return what ``torch.cuda.memory._snapshot()`` would."""
        live = {address: (requested, stack) for address, _, requested, stack in self.live}
        return {
            "segments": [self._segment(s, live) for s in self.segments],
            "device_traces": [self.events],
            "allocator_settings": {
                "PYTORCH_CUDA_ALLOC_CONF": "",
                "max_split_size": -1,
                "garbage_collection_threshold": 0.0,
                "expandable_segments": False,
                "roundup_power2_divisions": {str(1 << i): 0 for i in range(16)},
            },
            "external_annotations": [],
        }

    def _segment(self, segment: dict[str, Any], live: dict[int, Any]) -> dict[str, Any]:
        start, total, size = segment["address"], segment["total"], segment["size"]
        blocks = []
        for address in range(start, start + total, size):
            length = min(size, start + total - address)
            requested, stack = live.get(address, (0, []))
            blocks.append(
                {
                    "address": address,
                    "size": length,
                    "requested_size": requested,
                    "state": "active_allocated" if address in live else "inactive",
                    "frames": stack,
                }
            )
        held = sum(b["size"] for b in blocks if b["state"] == "active_allocated")
        return {
            "device": 0,
            "address": start,
            "total_size": total,
            "allocated_size": held,
            "active_size": held,
            "requested_size": sum(b["requested_size"] for b in blocks),
            "stream": 0,
            "segment_type": "small" if size <= MIB else "large",
            "segment_pool_id": (0, 0),
            "is_expandable": False,
            "frames": segment["stack"],
            "blocks": blocks,
        }


def make_big(path: Path, n_events: int = 1_000_000, seed: int = 1) -> None:
    """Write a snapshot of ``n_events`` events to ``path`` (pickle protocol 4)."""
    program = Program(seed)
    program.run(n_events)
    with path.open("wb") as file:
        pickle.dump(program.snapshot(), file, protocol=4)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    make_big(options.path, options.events, options.seed)
