"""One recording as a point of a fit: its peaks, and memory by line of the program."""

from __future__ import annotations

import itertools
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fragdoctor.analysis.attribution import frame_classes, frames_of, user_frames
from fragdoctor.analysis.columns import device_columns
from fragdoctor.analysis.device import analyze_device
from fragdoctor.analysis.lifetimes import Lifetimes
from fragdoctor.analysis.result import DeviceAnalysis, Timeline
from fragdoctor.analysis.timeline import undo
from fragdoctor.errors import ConfigError
from fragdoctor.model.finding import Location
from fragdoctor.model.snapshot import I64, Snapshot
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
    timeline: Timeline
    lifetimes: Lifetimes
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
        t = self.timeline
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
        born = np.flatnonzero(self.lifetimes.start >= 0)
        state = self.lifetimes.start[born] + 1
        line = self.line_of[born]
        order = np.lexsort((self.timeline.allocated_bytes[state], line))
        last = np.append(line[order][1:] != line[order][:-1], True) if len(order) else order
        found = order[np.flatnonzero(last)]
        return {
            self.keys[int(line[i])]: (
                int(self.timeline.allocated_bytes[state[i]]),
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
        rows = self.lifetimes.allocated_at(state)
        total = np.zeros(len(self.keys), np.int64)
        np.add.at(total, self.line_of[rows], self.lifetimes.size[rows])
        return {self.keys[int(i)]: int(total[i]) for i in np.flatnonzero(total)}

    @property
    def has_lines(self) -> bool:
        """Whether most requests have a line of the user's program."""
        return self.analysis.capture.has_stacks > 0.5 and any(k != NO_LINE for k in self.keys)


def recording_of(source: str, snapshot: Snapshot, device: int | None = None) -> Recording:
    """Return a snapshot as a point of a fit.

    Args:
        source: name for people.
        snapshot: with a trace.
        device: whose memory; the one with the highest peak where None.

    Raises:
        ConfigError: the snapshot has no trace, so that its peak is not known.
    """
    devices = snapshot.devices if device is None else (device,)
    found = [analyze_device(snapshot, d) for d in devices]
    traced = [a for a in found if a.timeline is not None]
    if not traced:
        held = sum(a.reserved_bytes for a in found)
        raise ConfigError(
            f"{source} has no trace, so its peak is not known (it ends with {format_size(held)} "
            "reserved).",
            hint="Record with torch.cuda.memory._record_memory_history() before the run.",
        )
    analysis = max(traced, key=_peak)
    columns = device_columns(snapshot, analysis.device)
    undone = undo(columns, snapshot.settings)
    lines = user_frames(snapshot, frame_classes(snapshot))
    frames, member = np.unique(frames_of(undone.lifetimes.stack, lines), return_inverse=True)
    located = [_line(snapshot, int(f)) for f in frames]
    keys = list(dict.fromkeys(key for key, _ in located))
    index = np.array([keys.index(key) for key, _ in located], np.int64)
    return Recording(
        source=source,
        snapshot=snapshot,
        analysis=analysis,
        timeline=undone.timeline,
        lifetimes=undone.lifetimes,
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
