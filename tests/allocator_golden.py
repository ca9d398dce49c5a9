"""Golden cases: operation lists that were run on the real allocator, and their replay.

A case is a dict; tests/golden/README.md explains its keys.
"""

from __future__ import annotations

import gzip
import json
import lzma
from typing import TYPE_CHECKING, Any

from fragdoctor._native import _ext
from fragdoctor.model.conf_keys import parse_version
from fragdoctor.model.settings import era_of, parse_conf
from fragdoctor.trace.allocator import native_config
from fragdoctor.trace.oom_message import oom_message

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MIB = 1024**2
STATES = _ext.STATE_NAMES
FIGURES = ("reserved", "allocated", "active", "requested", "retries", "ooms")
ATTRIBUTES = (
    "reserved_bytes",
    "allocated_bytes",
    "active_bytes",
    "requested_bytes",
    "alloc_retries",
    "ooms",
)


def cases_of(path: Path) -> Iterator[dict[str, Any]]:
    decompress = lzma.decompress if path.suffix == ".xz" else gzip.decompress
    for line in decompress(path.read_bytes()).splitlines():
        yield json.loads(line)


class Replay:
    """Runs the operations of one case through the native model."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.version = case["torch"]
        self.settings = parse_conf(case["conf"], self.version)
        total = case["device_total"]
        config = native_config(
            self.settings,
            era=era_of(self.version),
            capacity_bytes=total - case.get("context_mb", 0) * MIB,
            device_total_bytes=total,
            memory_fraction=case.get("fraction"),
        )
        config.event_delay = case.get("event_delay", 0)
        config.fraction_of_one_counts = parse_version(self.version) < (2, 10, 0)
        self.core = _ext.AllocatorCore(config)
        self.live: dict[Any, int] = {}
        self.handles = {0: 0}  # stream handles are numbered in the order of first use
        self.pools: dict[str, int] = {}
        self.addresses: list[int | None] = []
        self.messages: list[str] = []

    def handle(self, stream: int) -> int:
        return self.handles.setdefault(stream, len(self.handles))

    def run(self, op: list[Any]) -> None:
        getattr(self, {"a": "alloc", "f": "free", "e": "empty", "r": "record"}.get(op[0], op[0]))(
            *op[1:]
        )

    def alloc(self, name: Any, size: int, stream: int = 0) -> None:
        address = self.core.malloc(size, self.handle(stream))
        self.addresses.append(address)
        if address is None:
            self.messages.append(oom_message(self.core.last_oom(), parse_version(self.version)))
        else:
            self.live[name] = address

    def free(self, name: Any) -> None:
        address = self.live.pop(name, None)
        assert address is None or self.core.free(address)

    def record(self, name: Any, stream: int) -> None:
        if name in self.live:
            assert self.core.record_stream(self.live[name], self.handle(stream))

    def empty(self) -> None:
        self.core.empty_cache()

    def sync(self) -> None:
        self.core.synchronize()

    def fraction(self, value: float) -> None:
        self.core.set_fraction(value)

    def settings_change(self, *, expandable_segments: bool) -> None:
        settings = parse_conf(f"expandable_segments:{expandable_segments}", self.version)
        self.core.set_settings(native_config(settings, era=era_of(self.version)))

    def expandable(self, on: bool) -> None:
        self.settings_change(expandable_segments=on)

    def pool(self, name: str, use_on_oom: int, no_split: int) -> None:
        if name not in self.pools:
            self.pools[name] = self.core.pool_create(bool(use_on_oom), bool(no_split))
        self.core.context_begin(self.pools[name])

    def end(self) -> None:
        self.core.context_end()

    def drop(self, name: str) -> None:
        if name in self.pools:
            self.core.pool_release(self.pools.pop(name), flush=True)

    def figures(self) -> dict[str, int]:
        return {k: getattr(self.core, a) for k, a in zip(FIGURES, ATTRIBUTES, strict=True)}


def _comparable(segments: list[list[Any]]) -> list[list[Any]]:
    """Number the streams by first appearance, and drop the old requests of inactive blocks."""
    numbers = {0: 0}
    return [
        [
            address,
            size,
            bool(expandable),
            numbers.setdefault(stream, len(numbers)),
            kind,
            [[b[0], b[1] if b[2] != "inactive" else None, b[2]] for b in blocks],
        ]
        for address, size, expandable, stream, kind, blocks in sorted(segments, key=lambda s: s[0])
    ]


def difference(case: dict[str, Any]) -> str | None:
    """Return the first figure in which the model differs from the real allocator, or None."""
    expect = case["expect"]
    replay = Replay(case)
    for i, op in enumerate(case["ops"]):
        replay.run(op)
        got = replay.figures()
        for key in FIGURES:
            if key in expect and got[key] != expect[key][i]:
                return f"op {i} {op}: {key} is {got[key]}, not {expect[key][i]}"
        n = len(replay.addresses)
        if op[0] == "a" and replay.addresses[-1] != expect["addr"][n - 1]:
            return f"op {i} {op}: address {replay.addresses[-1]}, not {expect['addr'][n - 1]}"
    wrong = replay.core.check()
    if wrong is not None:
        return wrong
    if "messages" in expect and replay.messages != expect["messages"]:
        return f"messages {replay.messages}, not {expect['messages']}"
    layout = [
        [
            a,
            size,
            x,
            stream,
            "small" if small else "large",
            [[b[1], b[2], STATES[b[3]]] for b in bs],
        ]
        for a, size, x, stream, _, small, bs in replay.core.layout()
    ]
    if _comparable(layout) != _comparable(expect["segments"]):
        return "the final layout differs"
    return None
