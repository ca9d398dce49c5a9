"""The host's page-locked memory at the moment that the report describes."""

from __future__ import annotations

import numpy as np

from fragdoctor.analysis.growth import StepEnds
from fragdoctor.analysis.host_memory import host_memory
from fragdoctor.diagnosis.moments import DecidingMoment
from fragdoctor.model.diagnosis import HostGrowth, HostMemoryReport, Moment
from fragdoctor.model.snapshot import Snapshot


def host_report(
    snapshot: Snapshot | None, moment: DecidingMoment | None
) -> HostMemoryReport | None:
    """Return the page-locked memory of a snapshot, or None if it has none.

    ``moment`` belongs to the device that the verdict is about. If nothing failed on that device,
    or its failure has no time, the holders are those at the end of the file.
    """
    if snapshot is None:
        return None
    known = [segment for segment in snapshot.host_segments if segment.size_bytes > 0]
    reserved = sum(segment.size_bytes for segment in known)
    cached = sum(segment.size_bytes for segment in known if segment.allocated is False)
    when = step_times = None
    if moment is not None and moment.analysis.capture.has_trace:
        trace = moment.analysis.trace
        times = trace.events.time_us
        rows = StepEnds.of(trace).rows
        step_times = times[np.minimum(rows, len(times) - 1)]
        if moment.failed is not None:
            when = int(times[moment.failed.row - trace.first_row])
    at_failure = when is not None and when >= 0
    host = host_memory(snapshot, when if at_failure else None, step_times)
    if host is None or not host.peak_bytes:
        return HostMemoryReport(reserved, cached) if reserved else None
    return HostMemoryReport(
        reserved,
        cached,
        Moment.FAILURE if at_failure else Moment.END,
        host.held_bytes,
        host.peak_bytes,
        tuple(host.holders),
        tuple(HostGrowth(place, g.slope_bytes, g.survivor_bytes) for place, g in host.growth),
    )
