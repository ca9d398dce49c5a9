"""Makes the seeds of ``fuzz_reader``: little snapshots of every writer and schema.

    python tests/native/make_seeds.py

They are stored in the repository, so that the native tests need no Python.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
from builders import (
    BASE,
    MIB,
    alloc,
    block,
    cpp_pickled,
    event,
    frame,
    free,
    oom,
    pickled,
    segment,
    snapshot,
)

SEEDS = Path(__file__).parent / "seeds"


def varied_events() -> list[dict[str, Any]]:
    """Return events of every kind, their stacks and pools shared, repeated, empty or absent."""
    frames = [frame("train.py", i, f"f{i}") for i in range(4)]
    shared = frames[:2]
    events: list[dict[str, Any]] = []
    for i in range(12):
        at = BASE + i * 512
        stack = [shared, frames[: i % 5], [], None][i % 4]
        more = {"category": "weights"} if i % 3 == 0 else {}
        events.append(alloc(at, 512, frames=stack, time_us=10 * i, **more))
        events += free(at, 512, frames=stack, time_us=10 * i + 5, pool=(0, i % 2))
    events.append(event("annotate", 0, 0, time_us=500, user_metadata="step 3 of an epoch"))
    events.append(event("brand_new", -1, 70_000, time_us=501, new_key=[1, (2, 3)]))
    events.append(oom(64 * MIB, 3 * MIB, frames=shared, time_us=502))
    return events


def modern() -> dict[str, Any]:
    stack = [frame("a.py", 2**64 - 1, "\u00fc"), frame()]
    return snapshot(
        segment(BASE, block(512, "active_allocated", frames=stack), block(2 * MIB - 512)),
        segment(BASE + 32 * MIB, block(20 * MIB, frames=stack), frames=[], is_expandable=True),
        traces=[varied_events(), [], varied_events()[:3]],
        external_annotations=[{"stage": "START", "device": 0, "time_us": 7, "name": "epoch"}],
        host_segments=[{"address": 1, "size": 2, "allocated": True}],
    )


def old() -> list[dict[str, Any]]:
    """Return the list of segments of PyTorch 1.13, with the history of 2.0."""
    history = [{"addr": BASE, "real_size": 500, "frames": [frame()]}]
    row = segment(BASE, block(512, "active_allocated", history=history), block(1024))
    for b in row["blocks"]:
        for key in ("address", "requested_size", "frames"):
            del b[key]
    return [row]


def main() -> None:
    """Write the seeds."""
    SEEDS.mkdir(exist_ok=True)
    for protocol in (2, 4, 5):
        (SEEDS / f"python_{protocol}.pickle").write_bytes(pickled(modern(), protocol))
    (SEEDS / "cpp.pickle").write_bytes(cpp_pickled(modern()))
    (SEEDS / "old.pickle").write_bytes(pickled(old()))
    (SEEDS / "old_cpp.pickle").write_bytes(cpp_pickled(old()))
    (SEEDS / "modern.json").write_text(json.dumps(modern()) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
