"""One recording as a point of a fit: its peaks, its lines, and its batch size."""

from __future__ import annotations

import itertools
import math
import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from fragdoctor.analysis.device import analyze_trace
from fragdoctor.analysis.result import DeviceAnalysis
from fragdoctor.errors import ConfigError
from fragdoctor.model.batch_fit import BatchSource
from fragdoctor.model.finding import Location
from fragdoctor.model.snapshot import I64, Action, Snapshot
from fragdoctor.trace.lives import Lives, Totals
from fragdoctor.trace.stacks import Stacks
from fragdoctor.trace.trace import Trace
from fragdoctor.units import format_size

# A line of the program: file name without its directory, line number, function. Recordings of one
# program made in different directories have the same lines.
LineKey = tuple[str, int, str]
NO_LINE: LineKey = ("", 0, "")


@dataclass(frozen=True)
class Recording:
    """One snapshot with a trace.

    Attributes:
        line_of: ``int64[b]``, index into ``keys`` for each lifetime.
    """

    source: str
    snapshot: Snapshot
    analysis: DeviceAnalysis
    totals: Totals
    lives: Lives
    line_of: I64
    keys: Sequence[LineKey]
    locations: Mapping[LineKey, Location]

    @property
    def ran_out(self) -> bool:
        """Whether the recorded run ended in an OOM (one that was caught and passed does not)."""
        ooms = self.analysis.ooms
        return bool(ooms) and ooms[-1].row >= self.analysis.n_events * 0.98

    @cached_property
    def peaks(self) -> tuple[int, int, int]:
        """Peak allocated, active and reserved bytes; of a failed run with what it still asked."""
        t = self.totals
        peaks = (t.peak_allocated_bytes, t.peak_active_bytes, t.peak_reserved_bytes)
        if not self.ran_out:
            return peaks
        oom = self.analysis.ooms[-1]
        return (
            max(peaks[0], oom.allocated_bytes + oom.rounded_bytes),
            max(peaks[1], oom.active_bytes + oom.rounded_bytes),
            max(peaks[2], oom.active_bytes + oom.rounded_bytes),
        )

    @cached_property
    def moments(self) -> Mapping[LineKey, tuple[int, int]]:
        """Highest allocated bytes just after a request of each line, and the state it is in."""
        born = np.flatnonzero(self.lives.start >= 0)
        state = self.lives.start[born] + 1
        line = self.line_of[born]
        order = np.lexsort((self.totals.allocated_bytes[state], line))
        last = np.append(line[order][1:] != line[order][:-1], True) if len(order) else order
        found = order[np.flatnonzero(last)]
        return {
            self.keys[int(line[i])]: (
                int(self.totals.allocated_bytes[state[i]]),
                int(state[i]),
            )
            for i in found
        }

    @cached_property
    def peak_key(self) -> LineKey:
        """The line that reaches the peak."""
        if not self.moments:
            return NO_LINE
        return max(self.moments, key=lambda key: self.moments[key][0])

    def held_at(self, state: int) -> dict[LineKey, int]:
        """Return what each line holds after so many events."""
        rows = self.lives.allocated_at(state)
        total = np.zeros(len(self.keys), np.int64)
        np.add.at(total, self.line_of[rows], self.lives.size_bytes[rows])
        return {self.keys[int(i)]: int(total[i]) for i in np.flatnonzero(total)}

    @property
    def has_lines(self) -> bool:
        """Whether most requests have a line of the user's program."""
        return self.analysis.capture.has_stacks > 0.5 and any(k != NO_LINE for k in self.keys)


def recording_of(source: str, snapshot: Snapshot, device: int | None = None) -> Recording:
    """Return a snapshot as a point of a fit.

    It is about one device: the one with the highest peak where None.

    Raises:
        ConfigError: the snapshot has no trace, so that its peak is not known.
    """
    devices = snapshot.devices if device is None else (device,)
    stacks = Stacks(snapshot)
    found = [analyze_trace(Trace.of(snapshot, d, stacks=stacks)) for d in devices]
    traced = [a for a in found if a.timeline is not None]
    if not traced:
        held = sum(a.reserved_bytes for a in found)
        raise ConfigError(
            f"{source} has no trace, so its peak is not known (it ends with {format_size(held)} "
            "reserved).",
            hint="Record with torch.cuda.memory._record_memory_history() before the run.",
        )
    analysis = max(traced, key=_peak)
    trace = analysis.trace
    frames, member = np.unique(stacks.lines_of(trace.lives.stack), return_inverse=True)
    located = [_line(snapshot, int(f)) for f in frames]
    keys = list(dict.fromkeys(key for key, _ in located))
    index = np.array([keys.index(key) for key, _ in located], np.int64)
    return Recording(
        source=source,
        snapshot=snapshot,
        analysis=analysis,
        totals=trace.totals,
        lives=trace.lives,
        line_of=index[member.reshape(-1)] if len(index) else np.zeros(0, np.int64),
        keys=keys,
        locations={key: place for key, place in located if place is not None},
    )


def _peak(analysis: DeviceAnalysis) -> int:
    return 0 if analysis.timeline is None else analysis.timeline.peak_reserved_bytes


def _line(snapshot: Snapshot, frame: int) -> tuple[LineKey, Location | None]:
    if frame < 0:
        return NO_LINE, None
    text = snapshot.frame(frame)
    name = posixpath.basename(text.filename.replace("\\", "/"))
    return (name, text.line, text.name), Location(text.filename, text.line, text.name)


def stack_keys(snapshot: Snapshot) -> list[int]:
    """Return for each stack a number that is the same for the same stack in another recording.

    It is a hash over file names without directories, lines and functions, of this process only.
    """
    table, strings = snapshot.frames, snapshot.strings
    frames = [
        hash(
            (
                posixpath.basename(strings[int(f)].replace("\\", "/")) if f >= 0 else "",
                int(line),
                strings[int(n)] if n >= 0 else "",
            )
        )
        for f, line, n in zip(table.filename, table.line, table.name, strict=True)
    ]
    offsets, members = snapshot.stacks.offsets.tolist(), snapshot.stacks.frames.tolist()
    return [
        hash(tuple(frames[f] for f in members[low:high]))
        for low, high in itertools.pairwise(offsets)
    ]


MAX_BATCH: Final = 1e9
_NAMED: Final = re.compile(
    r"(?<![a-z0-9])(?:(?:micro|mini|global|train|per[-_]?device)?[-_]?batch(?:[-_]?size)?|mbs|bs|b)"
    r"[-_=]?(\d{1,9})(?![a-z0-9])|(?<![a-z0-9])(\d{1,9})[-_]?(?:batch|bs)(?![a-z0-9])",
    re.IGNORECASE,
)
# Share of the bytes of growing requests that must agree on one ratio before it is believed.
AGREED_SHARE: Final = 0.6
RATIO_STEP: Final = 1.02
# Requests below this are counters, losses and the like.
MIN_REQUEST_BYTES: Final = 4096
HINT: Final = "Give them in the order of the files, as in: --batches 4,8,16"


def parse_batches(text: str) -> tuple[float, ...]:
    """Return the batch sizes of ``4,8,16``.

    Raises:
        ConfigError: the text is not a list of positive whole numbers.
    """
    parts = [p.strip() for p in text.replace(";", ",").split(",") if p.strip()]
    if not parts or not all(p.isascii() and p.isdigit() and 0 < int(p) < MAX_BATCH for p in parts):
        raise ConfigError(
            f"{text!r} is not a list of batch sizes.", hint="Write for example --batches 4,8,16."
        )
    return tuple(float(p) for p in parts)


def batch_in_name(source: str) -> float | None:
    """Return the batch size in a file name, or else in the name of its directory."""
    path = Path(source)
    for name in (path.name, path.parent.name):
        stem = re.sub(r"\.(?:pickle|pkl|json|html|gz|zst|zip)", "", name, flags=re.IGNORECASE)
        found = [int(m.group(1) or m.group(2)) for m in _NAMED.finditer(stem)]
        if len(set(found)) == 1 and found[0] > 0:
            return float(found[0])
    return None


def batches_of(
    recordings: Sequence[Recording], given: Sequence[float] | None
) -> tuple[tuple[float, ...], BatchSource]:
    """Return the batch size of each recording and where they come from.

    Raises:
        ConfigError: they are not known, not one for each recording, or all the same.
    """
    if given is not None:
        if len(given) != len(recordings):
            raise ConfigError(
                f"There are {len(recordings)} recordings and {len(given)} batch sizes.", hint=HINT
            )
        return _distinct(given, "given"), BatchSource.GIVEN
    named = [batch_in_name(r.source) for r in recordings]
    known = [b for b in named if b is not None]
    if len(known) == len(recordings):
        return _distinct(known, "in the file names"), BatchSource.NAME
    ratios = relative_batches(recordings)
    if ratios is None:
        missing = recordings[named.index(None)].source
        raise ConfigError(
            f"The batch size of {missing} is not known: neither its name nor the sizes of its "
            "requests say it.",
            hint=HINT,
        )
    return _distinct(ratios, "that the requests show"), BatchSource.TRACE


def _distinct(batches: Sequence[float], where: str) -> tuple[float, ...]:
    if len(set(batches)) < 2:
        raise ConfigError(
            f"All batch sizes {where} are the same: {batches[0]:g}.",
            hint="A trend needs recordings at two or more batch sizes.",
        )
    return tuple(batches)


def relative_batches(recordings: Sequence[Recording]) -> tuple[float, ...] | None:
    """Return each batch as a multiple of the smallest; None where requests do not agree on it.

    Requests of the same stack are compared by the largest size they ask for. Parameters and
    optimizer states keep their size; what grows does so by one ratio if only the batch changed.
    """
    tables = [_largest_requests(r) for r in recordings]
    totals = [sum(t.values()) for t in tables]
    base = tables[totals.index(min(totals))]
    ratios = [_ratio(base, table) for table in tables]
    known = [r for r in ratios if r is not None]
    if len(known) < len(ratios):
        return None
    low = min(known)
    return tuple(round(r / low, 4) for r in known)


def _largest_requests(recording: Recording) -> dict[int, int]:
    events = recording.snapshot.events
    rows = events.device_slice(recording.analysis.device)
    is_request = (events.action[rows] == Action.ALLOC) & (events.stack[rows] >= 0)
    stack = events.stack[rows][is_request].astype(np.int64)
    size: I64 = np.minimum(events.size_bytes[rows][is_request], 2**60).astype(np.int64)
    top = np.zeros(len(recording.snapshot.stacks), np.int64)
    np.maximum.at(top, stack, size)
    keys = stack_keys(recording.snapshot)
    table: dict[int, int] = {}
    for i in np.flatnonzero(top >= MIN_REQUEST_BYTES).tolist():
        table[keys[i]] = max(table.get(keys[i], 0), int(top[i]))
    return table


def _ratio(base: dict[int, int], table: dict[int, int]) -> float | None:
    """Return the ratio that most of the growing bytes agree on; 1 where nothing differs."""
    shared = base.keys() & table.keys()
    if not shared or len(shared) < 0.5 * len(base):
        return None
    old = np.array([base[k] for k in shared], np.float64)
    new = np.array([table[k] for k in shared], np.float64)
    changed = new != old
    if not changed.any():
        return 1.0
    ratio: npt.NDArray[np.float64] = new[changed] / old[changed]
    weight = new[changed]
    bins = np.rint(np.log(ratio) / math.log(RATIO_STEP)).astype(np.int64)
    bins -= bins.min()
    votes = np.bincount(bins, weights=weight)
    near = np.convolve(votes, np.ones(3), "same")
    best = int(near.argmax())
    if near[best] < AGREED_SHARE * weight.sum():
        return None
    chosen = np.abs(bins - best) <= 1
    return float(np.median(np.repeat(ratio[chosen], 1)))
