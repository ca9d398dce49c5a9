"""Where in the model the memory of a device was at its peak."""

from __future__ import annotations

from fragdoctor.analysis.modules import module_paths, module_table
from fragdoctor.model.modules import ModuleMemory
from fragdoctor.rules.rule import Context


def module_memory(context: Context) -> tuple[ModuleMemory, ...]:
    """Return the outermost modules with what they held at the peak of allocated bytes.

    Empty where no module is recorded.
    """
    a = context.analysis
    if a is None:
        return ()
    state = a.n_events if a.timeline is None else a.timeline.peak_allocated_state
    category = None if a.phases is None else a.phases.category
    return module_table(a.trace, state, module_paths(a.trace), category)
