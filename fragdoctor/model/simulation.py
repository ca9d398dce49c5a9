"""Results of replaying a trace: under its own settings (baseline) and under others (what-if).

An :class:`Outlook` says what the run would have done next if its recording ends with a failure.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum, StrEnum

from msgspec import Struct, field


class FidelityReport(Struct, frozen=True):
    """How exactly the model reproduced this file under its recorded settings.

    Attributes:
        share: fidelity, 0..1; None if there was nothing to compare.
        era: tie-breaking era that fits best: ``address``, ``block_counter``, ``segment_counter``.
        reason: why the share is below 1 or was not computed; "" for an exact replay.
    """

    share: float | None = None
    era: str = ""
    reason: str = ""


class OutlookState(StrEnum):
    """Whether the run goes on. The strings are a contract (JSON ``outlook.state``)."""

    HOLDS = "holds"
    """Every request is served to the end of the current step, and in ``steps`` more whole steps."""
    FAILS = "fails"
    OPEN = "open"
    """The outcome cannot be known; ``reason`` says what is missing."""


class OutlookBasis(StrEnum):
    """What the run was continued with. The strings are a contract (JSON ``outlook.basis``)."""

    COMPLETE = "complete"
    """Nothing had to be continued: the recording holds the whole run."""
    REPEATED = "repeated"
    """Complete steps, repeated as recorded."""
    SCALED = "scaled"
    """Complete steps, with sizes scaled to the step that was cut off."""
    LOWER_BOUND = "lower_bound"
    """There is no complete step, so only the memory that must still come."""
    NONE = "none"


class Outlook(Struct, frozen=True):
    """The future of a run under one setting, capacity or change.

    Attributes:
        state: whether the run goes on.
        steps: how many whole steps after the current one were played to see that.
        fails_after_steps: whole steps before the run fails, 0 for the step that the recording cut
            off; None unless it fails.
        needs_bytes: the smallest capacity at which the run would hold; None if not searched.
        peak_reserved_bytes: highest reserved memory of the continued run.
        growth_bytes_per_step: how much allocated memory grows from step to step.
        basis: what the run was continued with.
        reason: what is missing, or why the run fails, in one sentence; or "".
        n_complete_steps: recorded steps that the coming steps were made from; None if there were
            none. They do not contain what a program does for the first time later.
        likely: for an open state, the outcome if coming steps are as expected; None if unknown.
    """

    state: OutlookState
    basis: OutlookBasis = OutlookBasis.NONE
    steps: int | None = None
    fails_after_steps: int | None = None
    needs_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    growth_bytes_per_step: int | None = None
    reason: str = ""
    n_complete_steps: int | None = None
    likely: OutlookState | None = None

    @property
    def fails(self) -> bool:
        """Whether the run is known or expected to fail."""
        return OutlookState.FAILS in {self.state, self.likely}

    @property
    def is_known(self) -> bool:
        """Whether every request of further whole steps was known and served."""
        is_exact = self.basis in (OutlookBasis.COMPLETE, OutlookBasis.REPEATED)
        return self.state is OutlookState.HOLDS and is_exact

    @property
    def ends_step(self) -> bool:
        """Whether the step that the recording cut off fails here too."""
        return self.state is OutlookState.FAILS and not self.fails_after_steps


class Prospect(IntEnum):
    """How well a run that gets past the recorded failure goes on, best first."""

    HOLDS = 0
    LIKELY = 1
    OPEN = 2
    UNLIKELY = 3
    FAILS = 4

    @classmethod
    def of(cls, outlook: Outlook | None) -> Prospect:
        """Return how well a run with this outlook goes on."""
        if outlook is None or (outlook.state is OutlookState.OPEN and outlook.likely is None):
            return cls.OPEN
        if outlook.state is OutlookState.OPEN:
            return cls.UNLIKELY if outlook.fails else cls.LIKELY
        return cls.FAILS if outlook.fails else cls.HOLDS


def room_left(margin_bytes: int | None, peak_bytes: int, outlook: Outlook | None) -> int:
    """Return how much of the capacity is left at the highest known point of a run.

    It is 0 without a limit. The margin and the peak are those of the recorded part, and the outlook
    may know a higher peak.
    """
    later = 0 if outlook is None else outlook.peak_reserved_bytes or 0
    return 0 if margin_bytes is None else margin_bytes - max(0, later - peak_bytes)


class Promise(StrEnum):
    """What a change promises for the whole run. The strings are a contract (JSON)."""

    WILL_FINISH = "will finish"
    LIKELY_FINISHES = "likely finishes"
    GETS_FURTHER = "gets further"
    """The run gets past the recorded failure, but not to its end, or that is open."""
    UNTESTED = "untested"
    STILL_FAILS = "still fails"

    @classmethod
    def of(cls, fits: bool | None, outlook: Outlook | None) -> Promise:
        """Return what the replay of the recorded part, and the outlook after it, promise."""
        if fits is None:
            return cls.UNTESTED
        if not fits:
            return cls.STILL_FAILS
        known = {Prospect.HOLDS: cls.WILL_FINISH, Prospect.LIKELY: cls.LIKELY_FINISHES}
        return known.get(Prospect.of(outlook), cls.GETS_FURTHER)


class ReplayResult(Struct, frozen=True):
    """What the allocator model did with the requests of one trace.

    Attributes:
        conf: the setting string of the replay.
        edit: the replayed code-level change, for people ("" means none).
        capacity_bytes: how much PyTorch could have; None means unlimited.
        fits: whether every request was served (including those that failed in the recorded run).
        oom_event: event row (of the device) of the first failed request, None if none failed.
        oom_bytes: size of that request.
        driver_calls: cudaMalloc, cudaFree, map and unmap calls: a measure of slowdown.
        n_replayed: number of replayed requests.
        is_conclusive: False if the outcome is not known, because the trace begins too late, the
            model serves a request that failed, or a failed request is known only as rounded by the
            recorded settings; ``note`` says why.
        outlook: what the run would do after the recording ends; None if nobody asked.
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
        """Capacity minus peak reserved memory; None if the capacity is unlimited."""
        return (
            None if self.capacity_bytes is None else self.capacity_bytes - self.peak_reserved_bytes
        )

    @property
    def room_bytes(self) -> int:
        """How much of the capacity is left at the highest known point of the run."""
        return room_left(self.margin_bytes, self.peak_reserved_bytes, self.outlook)


class Simulation(Struct, frozen=True):
    """A baseline, its fidelity, and any number of what-ifs against it.

    After a search over settings, ``best`` is the result that goes on best, ``pareto`` has the
    results that no other beats in both peak reserved memory and driver calls, and ``is_fine`` says
    whether the recorded settings fit without retries, and are not expected to fail later.

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
