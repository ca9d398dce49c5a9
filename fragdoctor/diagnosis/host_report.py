"""The host's page-locked memory at the moment that the report describes."""

from __future__ import annotations

import numpy as np

from fragdoctor.analysis.growth import StepEnds
from fragdoctor.analysis.host_memory import host_memory
from fragdoctor.diagnosis.moments import DecidingMoment
from fragdoctor.model.diagnosis import HostMemoryReport
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
    when = step_times = None
    if moment is not None and moment.analysis.capture.has_trace:
        trace = moment.analysis.trace
        times = trace.events.time_us
        rows = StepEnds.of(trace).rows
        step_times = times[np.minimum(rows, len(times) - 1)]
        if moment.failed is not None:
            when = int(times[moment.failed.row - trace.first_row])
    return host_memory(snapshot, when if when is not None and when >= 0 else None, step_times)
