"""Structure-aware mutations of genuine recordings: what no bit flip would ever reach.

A mutated recording still parses in most cases; what it says no longer makes sense.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any, Final

Data = dict[str, Any]
Mutation = Callable[[Data, random.Random], None]

_EXTREMES: Final = (
    0, 1, 2, -1, -512, 511, 512, 513, 1 << 20, (1 << 20) + 1, 1 << 31, (1 << 32) - 1, 1 << 40,
    1 << 47, 1 << 48, 1 << 52, (1 << 63) - 1, -(1 << 63), 1 << 63, (1 << 64) - 1,
)  # fmt: skip
_ACTIONS: Final = (
    "alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map",
    "segment_unmap", "snapshot", "oom", "free", "unknown_action", "",
)  # fmt: skip
_STATES: Final = (
    "active_allocated", "inactive", "active_pending_free", "active_awaiting_free", "odd",
)  # fmt: skip
_EVENT_NUMBERS: Final = ("addr", "size", "stream", "time_us", "device_free")
_SEGMENT_NUMBERS: Final = (
    "address", "total_size", "allocated_size", "active_size", "requested_size", "stream", "device",
)  # fmt: skip
_BLOCK_NUMBERS: Final = ("address", "size", "requested_size")


def mutated(data: Data, chance: random.Random) -> tuple[Data, tuple[str, ...]]:
    """Return a copy of a recording with one to four mutations, and their names."""
    new = copy.deepcopy(data)
    chosen = [chance.choice(MUTATIONS) for _ in range(chance.choice((1, 1, 2, 2, 3, 4)))]
    for mutation in chosen:
        mutation(new, chance)
    return new, tuple(m.__name__ for m in chosen)


def _trace(data: Data, chance: random.Random) -> list[Any]:
    """Return one device's events, seldom an empty list."""
    traces = data.get("device_traces") or [[]]
    filled = [t for t in traces if t]
    trace: list[Any] = chance.choice(filled if filled and chance.random() < 0.95 else traces)
    return trace


def _span(rows: list[Any], chance: random.Random) -> slice:
    """Return a stretch of rows: one, a few, or a large part."""
    start = chance.randrange(len(rows) + 1)
    return slice(start, start + chance.choice((1, 1, 2, 5, 20, len(rows))))


def _blocks(data: Data) -> Iterator[Data]:
    for segment in data["segments"]:
        yield from segment.get("blocks", ())


def _number(old: Any, chance: random.Random) -> Any:
    base = old if isinstance(old, int) else 0
    near = base + chance.choice((-512, -1, 1, 512, 1 << 20))
    return chance.choice((*_EXTREMES, near, -base, base * 2, base // 2))


def _change_number(rows: list[Data], keys: tuple[str, ...], chance: random.Random) -> None:
    if not rows:
        return
    key = chance.choice(keys)
    value = _number(chance.choice(rows).get(key, 0), chance)
    for row in chance.sample(rows, min(len(rows), chance.choice((1, 1, 3, len(rows))))):
        if key in row or chance.random() < 0.2:
            row[key] = value


def drop_events(data: Data, chance: random.Random) -> None:
    trace = _trace(data, chance)
    del trace[_span(trace, chance)]


def double_events(data: Data, chance: random.Random) -> None:
    trace = _trace(data, chance)
    at = _span(trace, chance)
    trace[at.stop : at.stop] = copy.deepcopy(trace[at])


def move_events(data: Data, chance: random.Random) -> None:
    trace = _trace(data, chance)
    at = _span(trace, chance)
    moved = trace[at]
    del trace[at]
    to = chance.randrange(len(trace) + 1)
    trace[to:to] = moved


def reverse_events(data: Data, chance: random.Random) -> None:
    trace = _trace(data, chance)
    at = _span(trace, chance)
    trace[at] = trace[at][::-1]


def shuffle_events(data: Data, chance: random.Random) -> None:
    trace = _trace(data, chance)
    at = _span(trace, chance)
    part = trace[at]
    chance.shuffle(part)
    trace[at] = part


def keep_one_action(data: Data, chance: random.Random) -> None:
    trace = _trace(data, chance)
    action = chance.choice(_ACTIONS[:9])
    trace[:] = [e for e in trace if e["action"] == action]


def lose_one_action(data: Data, chance: random.Random) -> None:
    trace = _trace(data, chance)
    action = chance.choice(_ACTIONS[:9])
    trace[:] = [e for e in trace if e["action"] != action]


def rename_actions(data: Data, chance: random.Random) -> None:
    trace = _trace(data, chance)
    action = chance.choice(_ACTIONS)
    for event in trace[_span(trace, chance)]:
        event["action"] = action


def renumber_events(data: Data, chance: random.Random) -> None:
    trace = _trace(data, chance)
    _change_number(trace[_span(trace, chance)], _EVENT_NUMBERS, chance)


def equal_events(data: Data, chance: random.Random) -> None:
    trace = _trace(data, chance)
    key = chance.choice(_EVENT_NUMBERS)
    rows = [e for e in trace if key in e]
    for event in rows:
        event[key] = rows[0][key]


def scale_sizes(data: Data, chance: random.Random) -> None:
    factor = chance.choice((0, 2, 1 << 10, 1 << 20, 1 << 30))
    for event in _trace(data, chance):
        event["size"] = min(event["size"] * factor, (1 << 63) - 1)


def times_backwards(data: Data, chance: random.Random) -> None:
    trace = _trace(data, chance)
    times = [e.get("time_us", 0) for e in trace]
    for event, time_us in zip(trace, reversed(times), strict=True):
        event["time_us"] = time_us


def drop_segments(data: Data, chance: random.Random) -> None:
    del data["segments"][_span(data["segments"], chance)]


def double_segments(data: Data, chance: random.Random) -> None:
    data["segments"] += copy.deepcopy(data["segments"][_span(data["segments"], chance)])


def renumber_segments(data: Data, chance: random.Random) -> None:
    _change_number(data["segments"], _SEGMENT_NUMBERS, chance)


def equal_segments(data: Data, chance: random.Random) -> None:
    key = chance.choice(_SEGMENT_NUMBERS)
    for segment in data["segments"]:
        segment[key] = data["segments"][0].get(key, 0)


def change_segments(data: Data, chance: random.Random) -> None:
    key, values = chance.choice(
        (
            ("segment_type", ("small", "large", "odd")),
            ("is_expandable", (True, False)),
            ("segment_pool_id", ((0, 0), (0, 1), (1, 0), (7, 7), (-1, 1 << 62))),
            ("frames", ([],)),
        )
    )
    for segment in data["segments"]:
        if chance.random() < 0.5:
            segment[key] = chance.choice(values)


def renumber_blocks(data: Data, chance: random.Random) -> None:
    _change_number(list(_blocks(data)), _BLOCK_NUMBERS, chance)


def change_states(data: Data, chance: random.Random) -> None:
    states = chance.choice((_STATES, (chance.choice(_STATES),)))
    for block in _blocks(data):
        block["state"] = chance.choice(states)


def drop_blocks(data: Data, chance: random.Random) -> None:
    for segment in data["segments"]:
        if chance.random() < 0.4:
            del segment["blocks"][_span(segment["blocks"], chance)]


def double_blocks(data: Data, chance: random.Random) -> None:
    for segment in data["segments"]:
        if chance.random() < 0.4:
            segment["blocks"] = segment["blocks"] + copy.deepcopy(segment["blocks"])


def change_frames(data: Data, chance: random.Random) -> None:
    trace = _trace(data, chance)
    stacks = [e["frames"] for e in trace if e.get("frames")] or [[]]
    other = chance.choice(stacks)
    odd = {"name": "", "filename": "", "line": 0}
    frames = chance.choice(
        ([], other, other * 3, other[:1], other[::-1], [odd], [*other, odd], [odd] * 40)
    )
    for event in trace[_span(trace, chance)]:
        event["frames"] = frames


def rename_frames(data: Data, chance: random.Random) -> None:
    names = ("step", "backward", "zero_grad", "forward", "loss_fn", "", "\x1b[31m", "x" * 3000)
    files = (
        "", "??", "/a/torch/optim/adamw.py", "/a/torch/_tensor.py", "train.py", "<frozen x>",
        "/site-packages/torch/nn/modules/module.py", "/site-packages/torch/autograd/graph.py",
    )  # fmt: skip
    name, file, line = chance.choice(names), chance.choice(files), _number(1, chance)
    for event in _trace(data, chance):
        for frame in event.get("frames", ()):
            if chance.random() < 0.3:
                frame["name"], frame["filename"] = name, file
                frame["line"] = line if chance.random() < 0.2 else frame["line"]


def empty_table(data: Data, chance: random.Random) -> None:
    key = chance.choice(("segments", "device_traces", "external_annotations"))
    if chance.random() < 0.5:
        data[key] = []
    elif key == "device_traces":
        data[key] = [[] for _ in data[key]]
    elif key == "segments":
        data[key] = data[key][:1]
    else:
        data.pop(key, None)


def change_devices(data: Data, chance: random.Random) -> None:
    traces = data["device_traces"]
    kind = chance.randrange(4)
    if kind == 0:
        traces.insert(chance.randrange(len(traces) + 1), [])
    elif kind == 1:
        traces.append(copy.deepcopy(_trace(data, chance)))
    elif kind == 2:
        traces.reverse()
    else:
        for segment in data["segments"]:
            segment["device"] = chance.choice((0, 1, 2, 7, 200))


def change_annotations(data: Data, chance: random.Random) -> None:
    times = [e.get("time_us", 0) for t in data["device_traces"] for e in t] or [0]
    names = ("ProfilerStep#1", "Optimizer.step#AdamW.step", "Optimizer.zero_grad#SGD", "", "epoch")
    notes = data.setdefault("external_annotations", [])
    for _ in range(chance.choice((1, 5, 60))):
        notes.append(
            {
                "device": chance.choice((0, 0, 0, 1, 99)),
                "time_us": abs(chance.choice(times) + chance.choice((-1, 0, 1))),
                "name": chance.choice(names),
                "stage": chance.choice(("START", "END", "START", "ODD")),
            }
        )


def change_settings(data: Data, chance: random.Random) -> None:
    settings = data.setdefault("allocator_settings", {})
    key, values = chance.choice(
        (
            ("PYTORCH_CUDA_ALLOC_CONF", ("", "expandable_segments:True", "max_split_size_mb:20",
             "garbage_collection_threshold:0.6", "backend:cudaMallocAsync", "odd:[1,", ",,::")),
            ("max_split_size", (-1, 0, 1, 20 << 20, (1 << 63) - 1, -5)),
            ("garbage_collection_threshold", (0.0, 0.5, 1.0, 7.5, -1.0)),
            ("expandable_segments", (True, False)),
            ("roundup_power2_divisions", ({}, {"1": 0}, {"256": 8}, {"1": 3, "2": 1 << 40})),
        )
    )  # fmt: skip
    settings[key] = chance.choice(values)


def change_pools(data: Data, chance: random.Random) -> None:
    pools = ((0, 0), (0, 1), (1, 0), (3, 1 << 40), (-1, -1))
    for event in _trace(data, chance):
        if chance.random() < 0.3:
            event["pool_id"] = chance.choice(pools)


def change_notes(data: Data, chance: random.Random) -> None:
    for event in _trace(data, chance):
        event["user_metadata"] = chance.choice(("", "a", "{}", "step=1", "\u202e"))
        event["compile_context"] = chance.choice(("N/A", "0/0", "1/2", "x"))


def fail_anywhere(data: Data, chance: random.Random) -> None:
    trace = _trace(data, chance)
    row = {"action": "oom", "device_free": _number(0, chance), "size": _number(512, chance),
           "stream": 0, "time_us": 5, "frames": []}  # fmt: skip
    trace.insert(chance.randrange(len(trace) + 1), row)


MUTATIONS: Final[tuple[Mutation, ...]] = (
    drop_events, double_events, move_events, reverse_events, shuffle_events, keep_one_action,
    lose_one_action, rename_actions, renumber_events, renumber_events, equal_events, scale_sizes,
    times_backwards, drop_segments, double_segments, renumber_segments, renumber_segments,
    equal_segments, change_segments, renumber_blocks, change_states, drop_blocks, double_blocks,
    change_frames, rename_frames, empty_table, change_devices, change_annotations,
    change_settings, change_pools, change_notes, fail_anywhere,
)  # fmt: skip
