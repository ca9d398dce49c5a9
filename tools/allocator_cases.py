"""Operation lists for comparing the allocator model with the real allocator.

Scenarios are written by hand, one for each situation that random lists seldom produce; random lists
mix sizes, streams, pending events, fractions and run-time switches under many settings.
Operations are lists in the format that tests/golden/README.md describes.
"""

from __future__ import annotations

import random
from typing import Any, Final

MIB: Final = 1024**2
Op = list[Any]
Case = dict[str, Any]

CONFS: Final = (
    "",
    "expandable_segments:True",
    "max_split_size_mb:20",
    "max_split_size_mb:64",
    "max_split_size_mb:128,expandable_segments:True",
    "garbage_collection_threshold:0.5",
    "garbage_collection_threshold:0.7,expandable_segments:True",
    "garbage_collection_threshold:0.6,max_split_size_mb:64",
    "large_segment_size_mb:64",
    "large_segment_size_mb:32,max_split_size_mb:64",
    "large_segment_size_mb:64,expandable_segments:True",
    "large_segment_size_mb:64,max_split_size_mb:128,max_non_split_rounding_mb:96",
    "max_split_size_mb:32,max_non_split_rounding_mb:48",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:[1:2,16:4,>:8],expandable_segments:True",
    "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]",
    "roundup_power2_divisions:[>:8],max_split_size_mb:48",
    "roundup_power2_divisions:[4:2,64:8,>:1],garbage_collection_threshold:0.6",
)
EMPTY: Final[Op] = ["e"]
END: Final[Op] = ["end"]


def alloc(name: int, mib: float, stream: int = 0) -> Op:
    """Return a request of this many MiB."""
    return ["a", name, int(mib * MIB), stream]


def free(*names: int) -> list[Op]:
    """Return the frees of these requests."""
    return [["f", name] for name in names]


def pool(name: str, *, use_on_oom: bool = False, no_split: bool = False) -> Op:
    """Return the operation that enters a private pool."""
    return ["pool", name, int(use_on_oom), int(no_split)]


def _pool_scenarios() -> dict[str, list[Op]]:
    oom_pools = [op for n in range(5) for op in (pool(str(n), use_on_oom=True), alloc(n, 100), END)]
    return {
        "pool-dropped-empty": [pool("a"), alloc(1, 30), END, *free(1), ["drop", "a"], alloc(2, 30)],
        "pool-oom-inside": [
            *(alloc(1, 600), *free(1), pool("a"), alloc(2, 600), EMPTY, alloc(3, 600), END),
            alloc(4, 600),
        ],
        "pool-default-needs-it": [
            *(pool("a"), alloc(1, 600), END, *free(1), alloc(2, 600), ["drop", "a"], alloc(3, 600)),
        ],
        "pool-use-on-oom": [
            *(pool("a", use_on_oom=True), alloc(1, 600), alloc(5, 300), END, *free(1)),
            *(alloc(2, 500), alloc(3, 50), *free(2), alloc(4, 590), ["drop", "a"], EMPTY),
        ],
        "pool-use-on-oom-order": [
            *(
                *oom_pools,
                *free(0, 1, 2, 3, 4),
                alloc(9, 524),
                *(alloc(10 + n, 90) for n in range(5)),
            ),
        ],
        "pool-use-on-oom-limit": [
            *(["fraction", 0.7], pool("a", use_on_oom=True), alloc(1, 600), END, *free(1)),
            *(alloc(2, 500), alloc(3, 50), *free(2), alloc(4, 590)),
        ],
        "pool-no-split": [
            *(pool("a", no_split=True), alloc(1, 30), *free(1), alloc(2, 20), alloc(3, 0.01)),
            *(*free(3), alloc(4, 0.4), END, *free(2), EMPTY),
        ],
        "pool-nested": [
            *(pool("a"), alloc(1, 30), pool("b"), alloc(2, 30), END, alloc(3, 30), END),
            *(*free(1, 2, 3), pool("a"), alloc(4, 30), END, alloc(5, 30), EMPTY),
        ],
        "pool-message": [pool("a"), alloc(1, 30), alloc(2, 30), END, *free(1), alloc(3, 2000)],
        "pool-empty-cache-inside": [
            *(alloc(1, 30), ["r", 1, 1], *free(1), pool("a"), alloc(2, 30), *free(2), EMPTY, END),
            EMPTY,
        ],
        "pool-streams": [
            *(pool("a"), alloc(1, 30, 1), alloc(2, 30), END, *free(1, 2), pool("a")),
            *(alloc(3, 30), alloc(4, 30, 1), END, EMPTY),
        ],
        "pool-dropped-pending": [
            *(pool("a"), alloc(1, 30), ["r", 1, 1], alloc(2, 30), ["r", 2, 1], END, *free(1)),
            *(["drop", "a"], alloc(4, 30), EMPTY, *free(2), alloc(5, 3), EMPTY),
        ],
    }


def _event_scenarios() -> dict[str, list[Op]]:
    shared = [op for n in range(1, 13) for op in (alloc(n, 3), ["r", n, 1 + n % 4])]
    return {
        "event-reused": [alloc(1, 30), ["r", 1, 1], *free(1), alloc(2, 30)],
        "event-own-stream": [alloc(1, 30), ["r", 1, 0], *free(1), alloc(2, 30)],
        "event-flush-no-second-look": [
            *(alloc(0, 1), *free(0), alloc(1, 450), alloc(2, 2), alloc(3, 450), ["r", 1, 1]),
            *(["r", 3, 1], *free(1, 3), alloc(4, 800), alloc(5, 400)),
        ],
        "event-split": [
            *(alloc(1, 900), *free(1), alloc(2, 2), alloc(3, 800), ["r", 3, 1], *free(3)),
            *(alloc(4, 700), alloc(5, 700)),
        ],
        "event-streams-flushed": [*shared, *free(1, 2, 3, 5, 6, 8, 9, 10, 12), EMPTY, alloc(20, 9)],
        "event-freed-inside-pool": [
            *(alloc(1, 30), ["r", 1, 1], pool("a"), *free(1), alloc(2, 30), END, alloc(3, 30)),
            EMPTY,
        ],
        "event-pending-inside-pool": [
            *(alloc(1, 30), ["r", 1, 1], *free(1), pool("a"), alloc(2, 30), END, alloc(3, 30)),
            EMPTY,
        ],
        "event-synchronised": [alloc(1, 30), ["r", 1, 1], *free(1), ["sync"], alloc(2, 30)],
    }


def _expandable_scenarios() -> dict[str, list[Op]]:
    return {
        "reserve-exceeded": [alloc(1, 1900), alloc(2, 0.001), alloc(3, 1100), alloc(4, 3, 1)],
        "page-rounding": [alloc(1, 986), alloc(2, 24), alloc(3, 20), *free(1), EMPTY, alloc(4, 24)],
        "slivers": [alloc(1, 16), alloc(2, 5), alloc(3, 30), *free(1, 2), EMPTY, alloc(4, 900)],
        "switched": [
            *(alloc(1, 30), ["expandable", True], alloc(2, 30), alloc(3, 30, 1), *free(1, 2)),
            *(["expandable", False], alloc(4, 25), *free(3), alloc(5, 25, 1), EMPTY, alloc(6, 900)),
        ],
    }


def scenarios() -> list[Case]:
    """Return every scenario under the settings and event delays that may matter to it."""
    cases = []
    groups = (
        (_pool_scenarios(), (0, 2)),
        (_event_scenarios(), (0, 2)),
        (_expandable_scenarios(), (0,)),
    )
    for group, delays in groups:
        for name, ops in group.items():
            for conf in ("", "expandable_segments:True", "max_split_size_mb:64"):
                cases += [
                    {"name": f"{name}-{delay}", "family": "scenario", "conf": conf,
                     "total_mb": 1024, "event_delay": delay, "ops": ops}
                    for delay in delays
                ]  # fmt: skip
    for reserve in ("0.25", "1G", "0.9", "64M", "3"):
        conf = f"expandable_segments:True,expandable_segments_reserve:{reserve}"
        ops = [alloc(1, 100), alloc(2, 400), alloc(3, 500), alloc(4, 0.001, 1), alloc(5, 3, 1)]
        cases.append(
            {"name": "reserve", "family": "scenario", "conf": conf, "total_mb": 1024, "ops": ops}
        )
    return cases


def _size(rng: random.Random, *, equal: bool) -> int:
    if equal:
        near = 0 if rng.random() < 0.7 else rng.choice([-512, 512, 1, -1])
        return int(rng.choice([0.3, 0.5, 3, 8, 12, 30, 64]) * MIB) + near
    low, high = rng.choices([(0, 20.2), (20, 24), (23, 27.5), (26, 29)], [30, 30, 35, 5])[0]
    return int(2 ** rng.uniform(low, high))


def random_case(seed: int) -> Case:
    """Return a random operation list that depends only on the seed."""
    rng = random.Random(seed)
    conf = rng.choice(CONFS)
    case: Case = {
        "name": f"random-{seed}",
        "family": "events",
        "conf": conf,
        "total_mb": rng.choice([256, 512, 1000, 1024, 2122]),
        "event_delay": rng.choice([0, 0, 0, 0, 1, 2, 5]),
        "context_mb": rng.choice([0, 0, 0, 0, 0, 100, 111]),
    }
    equal = rng.random() < 0.35
    n_streams = rng.choice([1, 1, 2, 3, 4])
    records = rng.random() < 0.4
    limited = "garbage" in conf or rng.random() < 0.2
    ops: list[Op] = [["fraction", rng.choice([0.3, 0.5, 0.8, 0.95, 0.99, 1.0])]] if limited else []
    live: list[int] = []
    for n in range(rng.choice([60, 150, 300])):
        p = rng.random()
        if p < 0.52 or not live:
            ops.append(["a", n, _size(rng, equal=equal), rng.randrange(n_streams)])
            live.append(n)
        elif p < 0.93:
            name = live.pop(rng.randrange(len(live)) if rng.random() < 0.7 else -1)
            if records:
                uses = rng.choices([0, 1, 2], [5, 3, 2])[0]
                ops += [["r", name, rng.randrange(n_streams + 1)] for _ in range(uses)]
            ops.append(["f", name])
        elif p < 0.96:
            ops.append(EMPTY)
        elif p < 0.97 and records:
            ops.append(["sync"])
        elif p < 0.975 and limited:
            ops.append(["fraction", rng.choice([0.3, 0.5, 0.8, 0.95])])
        elif p < 0.98 and conf in {"", "expandable_segments:True"}:
            ops.append(["expandable", rng.random() < 0.5])
        else:
            cut = rng.randrange(1, max(2, len(live) // 2 + 1))
            ops += free(*live[:cut])
            live = live[cut:]
    return {**case, "ops": ops}
