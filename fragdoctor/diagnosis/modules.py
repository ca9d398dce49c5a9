"""Which parts of the model held a device's memory at its peak."""

from __future__ import annotations

from collections.abc import Sequence

from fragdoctor.analysis.modules import ModulePaths, module_table
from fragdoctor.analysis.owners import module_parts
from fragdoctor.analysis.result import DeviceAnalysis
from fragdoctor.model.census import Census
from fragdoctor.model.modules import ModuleMemory


def module_memory(
    analysis: DeviceAnalysis, censuses: Sequence[Census] = ()
) -> tuple[ModuleMemory, ...]:
    """Return the outermost modules with what they held at the peak of allocated bytes.

    The result is empty if no module is recorded.
    """
    trace, totals, phases = analysis.trace, analysis.timeline, analysis.phases
    state = analysis.n_events if totals is None else totals.peak_allocated_state
    paths = module_parts(trace, ModulePaths.of(trace), censuses)
    return module_table(trace, state, paths, None if phases is None else phases.category)
