"""Results of replaying a trace: under its own settings (baseline) and under others (what-if)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fragdoctor.model.diagnosis import FidelityReport
from fragdoctor.model.outlook import Outlook


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """What the allocator model did with the requests of one trace.

    Attributes:
        conf: the setting string replayed under.
        edit: the code-level change replayed, for people ("" = none).
        capacity_bytes: what PyTorch could have; None = unlimited.
        fits: every request was served (those that the recorded run lost included).
        oom_event: event row (of the device) of the first request that failed, None if none did.
        oom_bytes: size of that request.
        driver_calls: cudaMalloc, cudaFree, map and unmap calls: a measure of slow-down.
        n_replayed: requests replayed.
        is_conclusive: False where the trace begins so late that the outcome is not known, or has a
            failed request only as the recorded settings rounded it; ``note`` says why.
        outlook: what the run would do after the recording ends; None where nobody asked.
    """

    conf: str
    capacity_bytes: int | None
    fits: bool
    oom_event: int | None
    peak_reserved_bytes: int
    peak_allocated_bytes: int
    final_reserved_bytes: int
    retries: int
    ooms: int
    driver_calls: int
    edit: str = ""
    peak_active_bytes: int = 0
    oom_bytes: int | None = None
    n_replayed: int = 0
    memory_fraction: float | None = None
    torch_version: str = ""
    smallest_capacity_bytes: int | None = None
    smallest_capacity_note: str = ""
    note: str = ""
    is_conclusive: bool = True
    outlook: Outlook | None = None

    @property
    def margin_bytes(self) -> int | None:
        """Capacity less peak reserved; None where the capacity is unlimited."""
        return (
            None if self.capacity_bytes is None else self.capacity_bytes - self.peak_reserved_bytes
        )


@dataclass(frozen=True, slots=True)
class Simulation:
    """A baseline, its fidelity, and any number of what-ifs against it.

    After a search over settings, ``best`` is the cheapest that fits with margin, ``pareto`` are
    those that no other beats in both peak reserved memory and driver calls, and ``is_fine`` says
    whether the recorded settings fit with margin anyway.

    ``method`` is ``replay`` (exact baseline) or ``estimate`` (the baseline could not be
    reproduced; ``fidelity.reason`` says why).
    """

    device: int
    baseline: ReplayResult
    fidelity: FidelityReport
    results: Sequence[ReplayResult] = ()
    method: str = "replay"
    lower_bound_bytes: int = 0
    notes: Sequence[str] = field(default_factory=tuple)
    best: ReplayResult | None = None
    pareto: Sequence[ReplayResult] = ()
    is_fine: bool = False
