"""Allocations: each block's whole life as one row, with its true size."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fragdoctor.model.snapshot import I32, I64, Snapshot
from fragdoctor.trace.lives import BEFORE, NEVER, Lives, Totals
from fragdoctor.trace.trace import Trace


@dataclass(frozen=True, slots=True)
class DeviceLife:
    """What happened on one device.

    Attributes:
        first_row: row of the device's first event in the snapshot.
        clock_us: a time for each state, n_events + 1 of them, never going back: the recorded
            times from the first one on, or the event's number where the file has none.
        has_times: whether the clock is a recorded one.
    """

    device: int
    first_row: int
    n_events: int
    lives: Lives
    totals: Totals
    clock_us: I64
    has_times: bool

    def time_of(self, rows: I32 | I64) -> I64:
        """Return the time of each event; the first one for ``BEFORE``, the last for ``NEVER``."""
        if not self.n_events:
            return np.zeros(len(rows), np.int64)
        state = np.where(rows == BEFORE, 0, np.minimum(rows, self.n_events - 1) + 1)
        result: I64 = self.clock_us[np.where(rows == NEVER, self.n_events, state)]
        return result


def device_life(snapshot: Snapshot, device: int) -> DeviceLife:
    """Return the lives of all blocks of one device and its timeline."""
    trace = Trace.of(snapshot, device)
    times = trace.events.time_us
    clock = np.zeros(trace.n_events + 1, np.int64)
    has_times = bool(len(times)) and int(times.min()) >= 0 and int(times.max()) > int(times.min())
    if has_times:
        clock[1:] = np.maximum.accumulate(times) - int(times[0])
    else:
        clock[1:] = np.arange(1, trace.n_events + 1)
    return DeviceLife(
        device, trace.first_row, trace.n_events, trace.lives, trace.totals, clock, has_times,
    )  # fmt: skip
