"""What one run says, ready to be compared: its diagnosis, its steps, the memory of every line.

A line is the user's own line of a stack (``analysis.attribution``). For each line all blocks of
the trace are kept as sums: bytes at the peak and now, the sizes asked for, the stacks behind it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from fragdoctor.analysis.attribution import USER, frame_classes, frames_of, user_frames
from fragdoctor.analysis.columns import device_columns
from fragdoctor.analysis.device import analyze_device
from fragdoctor.analysis.lifetimes import Lifetimes
from fragdoctor.analysis.result import CaptureQuality, DeviceAnalysis, Timeline
from fragdoctor.analysis.timeline import undo
from fragdoctor.diagnosis.contexts import primary_message
from fragdoctor.diagnosis.pipeline import diagnose
from fragdoctor.model.case import Case
from fragdoctor.model.diagnosis import Diagnosis
from fragdoctor.model.finding import Location
from fragdoctor.model.settings import AllocatorSettings
from fragdoctor.model.snapshot import I32, I64, U8, Action, Snapshot

MAX_LINES: Final = 2000
"""Lines looked at one by one; what the smaller ones hold is summed up."""

MAX_SIZES: Final = 64
MAX_STACKS: Final = 32
MAX_FRAMES: Final = 12

_FEATURES: Final = re.compile(
    r"[/\\]torch[/\\](?:utils[/\\](checkpoint)|optim[/\\]((?!optimizer|lr_scheduler|__)\w+))\.py$"
)


@dataclass(frozen=True, slots=True)
class StackUse:
    """Memory of one whole stack: ``peak`` and ``now`` are bytes at those moments."""

    frames: tuple[Location, ...]
    peak: int
    now: int


@dataclass(frozen=True, slots=True)
class LineUse:
    """Everything that one source line asked for.

    Attributes:
        place: the line; None for blocks without a stack, and for the sum of the smallest lines.
        is_user: it is the user's own code (not a library that stands for it).
        peak_bytes, n_peak, now_bytes, n_now: live blocks at the two moments.
        n_requests: blocks in all.
        sizes: (requested size, number of requests), those with most bytes first.
        n_sizes: distinct sizes in all.
        callees: functions between the line and the allocation: what the line calls.
        stacks: whole stacks, most bytes first.
    """

    place: Location | None
    is_user: bool
    peak_bytes: int
    n_peak: int
    now_bytes: int
    n_now: int
    n_requests: int
    sizes: tuple[tuple[int, int], ...]
    n_sizes: int
    callees: frozenset[str]
    stacks: tuple[StackUse, ...] = ()

    def bytes_at(self, *, peak: bool) -> int:
        """Return the live bytes at the peak, or now."""
        return self.peak_bytes if peak else self.now_bytes

    def blocks_at(self, *, peak: bool) -> int:
        """Return the live blocks at the peak, or now."""
        return self.n_peak if peak else self.n_now


@dataclass(frozen=True, slots=True)
class GrowingLine:
    """A line that keeps memory step by step within one run."""

    place: Location | None
    slope_bytes: int
    n_steps: int


@dataclass(frozen=True, slots=True, eq=False)
class DeviceReading:
    """One device of one run.

    Attributes:
        peak_row: events until the peak; None without a trace.
        requests: ``int64``, sizes asked for, in the order of the trace; failed requests are not
            among them.
        request_rows: ``int64``, the event row (within the device) of each request.
        features: library parts that the requests went through: ``checkpoint``, optimizers.
        capacity_bytes: what PyTorch could have, where a failed request shows it.
    """

    device: int
    capture: CaptureQuality
    timeline: Timeline | None
    peak_row: int | None
    n_steps: int | None
    lines: tuple[LineUse, ...]
    n_lines_merged: int
    growth: tuple[GrowingLine, ...]
    requests: I64
    request_rows: I64
    features: frozenset[str]
    peak_place: Location | None
    capacity_bytes: int | None


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """One run: its diagnosis, and its devices where it has a snapshot.

    The diagnosis is kept without the snapshot, so that a long series fits into memory.
    """

    name: str
    diagnosis: Diagnosis
    devices: dict[int, DeviceReading]
    settings: AllocatorSettings | None
    torch_version: str
    conf: str | None


def read_run(case: Case, name: str) -> Reading:
    """Return what one run says."""
    snapshot = case.snapshot
    devices: dict[int, DeviceReading] = {}
    analyses: dict[int, DeviceAnalysis] = {}
    if snapshot is not None:
        wanted = case.overrides.device
        classes = frame_classes(snapshot)
        lines = user_frames(snapshot, classes)
        for d in snapshot.devices:
            if wanted in (None, d):
                devices[d], analyses[d] = read_device(snapshot, d, classes, lines)
    diagnosis = diagnose(case, analyses=analyses)
    is_recorded = snapshot is not None and snapshot.settings.is_recorded
    return Reading(
        name=name,
        diagnosis=replace(diagnosis, case=replace(case, snapshot=None)),
        devices=devices,
        settings=snapshot.settings if snapshot is not None and is_recorded else None,
        torch_version=_version(case),
        conf=snapshot.settings.conf if snapshot is not None and is_recorded else None,
    )


def _version(case: Case) -> str:
    """Return the PyTorch versions that fit the inputs: ``2.12``, ``2.4 to 2.6``, or ""."""
    told = case.overrides.torch_version
    if told:
        return told
    message = primary_message(case)
    low = high = ""
    if case.snapshot is not None and case.snapshot.provenance.version_low:
        origin = case.snapshot.provenance
        low, high = origin.version_low, origin.version_high
    elif message is not None:
        low, high = message.version_low, message.version_high
    if not low or low == high:
        return low or high
    return f"{low} to {high}" if high else f"{low} or newer"


def read_device(
    snapshot: Snapshot, device: int, classes: U8, lines: I32
) -> tuple[DeviceReading, DeviceAnalysis]:
    """Return what one device of a snapshot says, and its analysis for the diagnosis.

    Args:
        snapshot: the columns of a file.
        device: number of the device.
        classes: class of each frame (``attribution.frame_classes``).
        lines: user frame of each stack (``attribution.user_frames``).
    """
    columns = device_columns(snapshot, device)
    undone = undo(columns, snapshot.settings)
    analysis = analyze_device(snapshot, device, undone=undone)
    timeline = analysis.timeline
    peak = None if timeline is None else int(timeline.allocated_bytes.argmax())
    growing = tuple(
        GrowingLine(_location(snapshot, g.frame), g.slope_bytes, g.n_steps) for g in analysis.growth
    )
    uses, n_merged = line_uses(snapshot, undone.lifetimes, peak, classes, lines)
    asked = np.flatnonzero(columns.action == Action.ALLOC)
    reading = DeviceReading(
        device=device,
        capture=analysis.capture,
        timeline=timeline,
        peak_row=peak,
        n_steps=None if timeline is None else int(analysis.extras["n_steps"]) or None,
        lines=uses,
        n_lines_merged=n_merged,
        growth=growing,
        requests=columns.size[asked],
        request_rows=asked,
        features=_features(snapshot, undone.lifetimes.stack),
        peak_place=_peak_place(snapshot, columns.stack, peak, lines),
        capacity_bytes=analysis.capacity_estimate_bytes,
    )
    return reading, analysis


def line_uses(
    snapshot: Snapshot, lifetimes: Lifetimes, peak: int | None, classes: U8, lines: I32
) -> tuple[tuple[LineUse, ...], int]:
    """Return the memory of every source line, largest first, and how many were merged into one."""
    frame = frames_of(lifetimes.stack, lines).astype(np.int64)
    groups, member = np.unique(frame, return_inverse=True)
    member = member.reshape(-1)
    n = len(groups)
    now = np.flatnonzero(lifetimes.survives)
    at_peak = now if peak is None else lifetimes.allocated_at(peak)
    sums = _Sums(
        peak=_totals(member[at_peak], lifetimes.size[at_peak], n),
        now=_totals(member[now], lifetimes.size[now], n),
        asked=_totals(member, lifetimes.requested, n),
    )
    weight = np.maximum(np.maximum(sums.peak[0], sums.now[0]), 1) * 2**20 + np.minimum(
        sums.asked[0] >> 10, 2**20 - 1
    )
    order = np.argsort(-weight, kind="stable")
    sizes = _sizes(member, lifetimes.requested, n)
    stacks = _stacks(snapshot, lifetimes, member, at_peak, now)
    kept = [
        LineUse(
            place=_location(snapshot, int(groups[g])),
            is_user=bool(groups[g] >= 0 and classes[groups[g]] == USER),
            peak_bytes=int(sums.peak[0][g]),
            n_peak=int(sums.peak[1][g]),
            now_bytes=int(sums.now[0][g]),
            n_now=int(sums.now[1][g]),
            n_requests=int(sums.asked[1][g]),
            sizes=sizes[g][0],
            n_sizes=sizes[g][1],
            callees=_callees(snapshot, stacks.of_line.get(g, ()), int(groups[g])),
            stacks=stacks.uses(snapshot, g, int(groups[g])),
        )
        for g in order[:MAX_LINES].tolist()
    ]
    rest = order[MAX_LINES:]
    if len(rest):
        kept.append(_rest(sums, rest))
    return tuple(kept), len(rest)


@dataclass(frozen=True, slots=True)
class _Sums:
    """(bytes, blocks) of each group at the peak, now, and over all requests."""

    peak: tuple[I64, I64]
    now: tuple[I64, I64]
    asked: tuple[I64, I64]


def merged(lines: Sequence[LineUse]) -> LineUse:
    """Return all lines as one without a place: what is left where a run has no stacks."""
    sizes: Counter[int] = Counter()
    for use in lines:
        sizes.update(dict(use.sizes))
    ranked = sorted(sizes.items(), key=lambda sn: -sn[0] * sn[1])
    return LineUse(
        place=None,
        is_user=False,
        peak_bytes=sum(use.peak_bytes for use in lines),
        n_peak=sum(use.n_peak for use in lines),
        now_bytes=sum(use.now_bytes for use in lines),
        n_now=sum(use.n_now for use in lines),
        n_requests=sum(use.n_requests for use in lines),
        sizes=tuple(ranked[:MAX_SIZES]) or ((0, 0),),
        n_sizes=len(ranked),
        callees=frozenset(),
    )


def _rest(sums: _Sums, rest: I64) -> LineUse:
    """Return the smallest lines as one without a place."""
    return LineUse(
        place=None,
        is_user=False,
        peak_bytes=int(sums.peak[0][rest].sum()),
        n_peak=int(sums.peak[1][rest].sum()),
        now_bytes=int(sums.now[0][rest].sum()),
        n_now=int(sums.now[1][rest].sum()),
        n_requests=int(sums.asked[1][rest].sum()),
        sizes=(),
        n_sizes=0,
        callees=frozenset(),
    )


def _totals(member: I64, size: I64, n: int) -> tuple[I64, I64]:
    total = np.zeros(n, np.int64)
    np.add.at(total, member, size)
    return total, np.bincount(member, minlength=n)


def _sizes(member: I64, requested: I64, n: int) -> list[tuple[tuple[tuple[int, int], ...], int]]:
    """Return for each group its sizes with their numbers, and how many there are."""
    values, rank = np.unique(requested, return_inverse=True)
    width = max(1, len(values))
    keys, count = np.unique(member * width + rank.reshape(-1), return_counts=True)
    group, size = keys // width, values[keys % width] if len(values) else keys
    order = np.lexsort((-size * count, group))
    group, size, count = group[order], size[order], count[order]
    start = np.searchsorted(group, np.arange(n + 1))
    result = []
    for g in range(n):
        low, high = int(start[g]), int(start[g + 1])
        top = slice(low, min(high, low + MAX_SIZES))
        pairs = zip(size[top].tolist(), count[top].tolist(), strict=True)
        result.append((tuple(pairs), high - low))
    return result


@dataclass(frozen=True, slots=True)
class _Stacks:
    """Stacks of each group, most bytes first, with their bytes at the peak and now."""

    of_line: dict[int, list[int]]
    peak: dict[int, int]
    now: dict[int, int]

    def uses(self, snapshot: Snapshot, group: int, frame: int) -> tuple[StackUse, ...]:
        """Return the stacks of a group that hold memory at either moment."""
        found = [s for s in self.of_line.get(group, []) if s in self.peak or s in self.now]
        found.sort(key=lambda s: -max(self.peak.get(s, 0), self.now.get(s, 0)))
        return tuple(
            StackUse(_outwards(snapshot, s, frame), self.peak.get(s, 0), self.now.get(s, 0))
            for s in found[:MAX_STACKS]
        )


def _stacks(
    snapshot: Snapshot, lifetimes: Lifetimes, member: I64, at_peak: I64, now: I64
) -> _Stacks:
    n = len(snapshot.stacks)
    has = np.flatnonzero(lifetimes.stack >= 0)
    of_stack = np.full(n, -1, np.int64)
    of_stack[lifetimes.stack[has]] = member[has]
    of_line: dict[int, list[int]] = {}
    for s in np.flatnonzero(of_stack >= 0).tolist():
        of_line.setdefault(int(of_stack[s]), []).append(s)
    return _Stacks(of_line, _by_stack(lifetimes, at_peak, n), _by_stack(lifetimes, now, n))


def _by_stack(lifetimes: Lifetimes, rows: I64, n: int) -> dict[int, int]:
    rows = rows[lifetimes.stack[rows] >= 0]
    total = np.zeros(n, np.int64)
    np.add.at(total, lifetimes.stack[rows], lifetimes.size[rows])
    used = np.flatnonzero(total)
    return dict(zip(used.tolist(), total[used].tolist(), strict=True))


def _outwards(snapshot: Snapshot, stack: int, frame: int) -> tuple[Location, ...]:
    """Return a stack from the line's own frame outwards."""
    offsets = snapshot.stacks.offsets
    ids = snapshot.stacks.frames[int(offsets[stack]) : int(offsets[stack + 1])].tolist()
    start = ids.index(frame) if frame in ids else 0
    places = [_location(snapshot, i) for i in ids[start : start + MAX_FRAMES]]
    return tuple(p for p in places if p is not None)


def _callees(snapshot: Snapshot, stacks: Sequence[int], frame: int) -> frozenset[str]:
    """Return the names of functions between a line and its allocations."""
    found: set[str] = set()
    offsets, table = snapshot.stacks.offsets, snapshot.frames
    for s in list(stacks)[:MAX_STACKS]:
        ids = snapshot.stacks.frames[int(offsets[s]) : int(offsets[s + 1])].tolist()
        inner = ids[: ids.index(frame)] if frame in ids else []
        found |= {snapshot.strings[int(table.name[i])][:200] for i in inner[:64]}
    return frozenset(found)


def _location(snapshot: Snapshot, frame: int) -> Location | None:
    if frame < 0:
        return None
    f = snapshot.frame(frame)
    return Location(f.filename, f.line, f.name)


def _features(snapshot: Snapshot, stack: I32) -> frozenset[str]:
    """Return the library parts that requests went through."""
    used = np.unique(stack[stack >= 0])
    if not len(used):
        return frozenset()
    offsets = snapshot.stacks.offsets
    mark = np.zeros(len(snapshot.stacks.frames) + 1, np.int64)
    np.add.at(mark, offsets[used], 1)
    np.add.at(mark, offsets[used + 1], -1)
    inside = np.cumsum(mark[:-1]) > 0
    names = np.unique(snapshot.frames.filename[np.unique(snapshot.stacks.frames[inside])])
    found = (_FEATURES.search(snapshot.strings[int(i)][-500:]) for i in names if i >= 0)
    return frozenset(m.group(1) or f"optim.{m.group(2)}" for m in found if m is not None)


def _peak_place(snapshot: Snapshot, stack: I32, peak: int | None, lines: I32) -> Location | None:
    """Return the line whose request made the peak."""
    if not peak:
        return None
    at = int(stack[peak - 1])
    return None if at < 0 else _location(snapshot, int(lines[at]))
