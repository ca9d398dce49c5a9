"""The recorded run reproduced, and what-ifs replayed against it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field
from msgspec.structs import replace

from fragdoctor.analysis.attention_scores import find_attention_scores
from fragdoctor.analysis.result import KeptMemory, KeptPattern
from fragdoctor.analysis.training_run import NO_ROW, TrainingRequests
from fragdoctor.errors import ConfigError, SimulationError
from fragdoctor.future.edits import Edit, leak_removed
from fragdoctor.future.search import usual_candidates
from fragdoctor.future.simulator import continued_with, simulation_of
from fragdoctor.future.steps import StepKind, Steps
from fragdoctor.future.whatif import N_THREADS, FairReplay, WhatIf
from fragdoctor.model.diagnosis import Predicted
from fragdoctor.model.finding import Confidence
from fragdoctor.model.hooks import report_progress
from fragdoctor.model.simulation import (
    FidelityReport,
    Outlook,
    OutlookBasis,
    OutlookState,
    ReplayResult,
    Simulation,
)
from fragdoctor.model.snapshot import Snapshot
from fragdoctor.rules.failed_request import rounding_bytes
from fragdoctor.rules.growth.growing_line import filling_container
from fragdoctor.rules.rule import Context
from fragdoctor.trace.operations import NativeOps, Operations, OpKind, is_free
from fragdoctor.trace.replay import Reproduction
from fragdoctor.trace.reproduction import reproduce
from fragdoctor.trace.trace import return_free_memory

LONG_TRACE_OPERATIONS = 300_000
OPERATIONS_BEFORE_PEAK = 100_000
OPERATIONS_AFTER_PEAK = 50_000
# An edit makes its own request list, which takes 24 bytes per request and as much again while it
# is made; lists longer than this are made one at a time.
MAX_CONCURRENT_OPERATIONS = 500_000
ENDLESS = WhatIf(capacity_bytes=2**50)


class Attempt(Struct, frozen=True):
    """One way to try a remedy on the recorded trace.

    Attributes:
        what_if: settings and capacity to replay under.
        edit: the change to the recorded requests, or None if they stay as they are.
        is_saving: whether the attempt measures how much lower the peak gets, enough or not.
    """

    what_if: WhatIf
    edit: Edit | None = None
    is_saving: bool = False

    @classmethod
    def of_edit(cls, edit: Edit, *, is_saving: bool = False) -> Attempt:
        """Return the attempt with a change of the code under the recorded settings."""
        return cls(WhatIf(edit=edit.name), edit, is_saving=is_saving)


def without(kept: KeptMemory) -> list[Attempt]:
    """Return the attempt that frees kept memory at the end of the step that made it.

    There is none for a buffer, which should stay but not grow.
    """
    if kept.pattern is KeptPattern.BUFFER or not len(kept.rows):
        return []
    return [Attempt.of_edit(leak_removed(kept.rows, kept.ends))]


class Effect(Struct, frozen=True):
    """The outcome of an attempt.

    ``peak_bytes`` is the peak of live memory with unlimited capacity, or None unless the attempt
    asks for it.
    """

    attempt: Attempt
    result: ReplayResult
    peak_bytes: int | None = None


class Bench(Struct, frozen=True, dict=True):
    """A reproduced run to try things on; ``kept`` is what grows in it from step to step.

    The outcomes of attempts are kept; those of edits that save cover only the recorded part, and
    ``_looked_on`` has the results of edited what-ifs that are continued past it.
    """

    reproduction: Reproduction
    simulation: Simulation
    fair_replay: FairReplay
    kept: KeptMemory | None = None
    _tried: dict[Attempt, Effect | None] = field(default_factory=dict)
    _looked_on: dict[Attempt, ReplayResult] = field(default_factory=dict)

    @property
    def is_exact(self) -> bool:
        """Whether what-ifs are replays rather than estimates."""
        return self.simulation.method == "replay"

    @property
    def is_usable(self) -> bool:
        """Whether the model follows the recorded run: it fails where the recording does."""
        found = self.reproduction.comparison
        return self.is_exact or found["n_failed_equal"] == found["n_failed"]

    @property
    def recorded(self) -> ReplayResult:
        """The recorded run as the model reproduces it."""
        return self.simulation.baseline

    @property
    def has_trouble(self) -> bool:
        """Whether a request failed, or needed a flush of the cache."""
        return not self.recorded.fits or self.recorded.retries > 0

    @cached_property
    def let_go(self) -> Attempt | None:
        """The attempt that frees growing memory at the end of the step that made it."""
        return next(iter(() if self.kept is None else without(self.kept)), None)

    @property
    def refutes_leak(self) -> bool:
        """Whether the recorded request fails even if none of the growing memory is kept."""
        if self.let_go is None or not self.is_exact or self.recorded.fits:
            return False
        found = self.tried(self.let_go)
        return found is not None and found.result.is_conclusive and not found.result.fits

    @cached_property
    def n_operations(self) -> int:
        """Number of recorded operations."""
        return int(self.reproduction.operations.facts()["n_ops"])

    @property
    def is_long(self) -> bool:
        """Whether the trace is too long to be continued after each edit."""
        return self.n_operations > LONG_TRACE_OPERATIONS

    @cached_property
    def around_peak(self) -> Operations:
        """The recorded operations on which savings are tried.

        For a long trace these are the operations around its peak, preceded by the requests for
        what was live before: a dozen edits and replays of a million operations would take longer
        than everything else.
        """
        ops = Operations.of(self.reproduction.operations)
        if len(ops) <= LONG_TRACE_OPERATIONS:
            return ops
        totals, failed = self.reproduction.trace.totals, self.recorded.oom_event
        peak_row = totals.peak_allocated_state - 1 if failed is None else failed
        at = int(ops.positions(np.array([peak_row]))[0])
        low, high = max(0, at - OPERATIONS_BEFORE_PEAK), at + OPERATIONS_AFTER_PEAK
        allocation, kind = ops.allocation[:low].copy(), ops.kind[:low].copy()
        is_over = np.zeros(int(allocation.max(initial=0)) + 1, np.bool_)
        is_over[allocation[is_free(kind)]] = True
        keeps = np.flatnonzero((kind <= OpKind.COMPLETE) & ~is_over[allocation])
        chosen = np.concatenate((keeps, np.arange(low, min(high, len(ops)))))
        return _renumbered(ops.table[chosen], self.reproduction.trace.lives.n_initial)

    @cached_property
    def peak_bytes(self) -> int:
        """The recorded peak of live memory if all failed requests had been served."""
        if self.recorded.fits:
            return self.recorded.peak_allocated_bytes
        operations = self.around_peak.native(self.reproduction.operations)
        return self._endless(operations).peak_allocated_bytes

    def _endless(self, operations: NativeOps) -> ReplayResult:
        return self.fair_replay.replay(ENDLESS, operations, looks_on=False)

    def run(self, attempts: Sequence[Attempt]) -> list[Effect | None]:
        """Return an outcome per attempt, or None if the trace does not say enough for it."""
        outcomes: list[Effect | None] = []
        report_progress("Replaying", 0, len(attempts))
        return_free_memory(self.reproduction.trace)
        # One thread makes all edits in turn, beside the thread for other attempts.
        is_apart = self.n_operations > MAX_CONCURRENT_OPERATIONS
        with ThreadPoolExecutor(N_THREADS - is_apart) as replays, ThreadPoolExecutor(1) as alone:
            edits = alone if is_apart else replays
            begun = [
                (replays if attempt.edit is None else edits).submit(self.tried, attempt)
                for attempt in attempts
            ]
            try:
                for i, outcome in enumerate(begun, start=1):
                    outcomes.append(outcome.result())
                    report_progress("Replaying", i, len(attempts))
            finally:  # after an interrupt, start no more attempts
                for outcome in begun:
                    outcome.cancel()
        return outcomes

    def looked_on(self, outcome: Effect) -> Effect:
        """Return an outcome that is continued past the recorded part.

        The outcome is returned as it is if the recorded part already fails or is too long to be
        continued after each edit, or if the run did not fail.
        """
        attempt, is_known = outcome.attempt, outcome.result.outlook is not None
        if is_known or self.is_long or self.recorded.fits or not outcome.result.fits:
            return outcome
        if attempt not in self._looked_on:
            try:
                result = self.fair_replay.replay(attempt.what_if, self._edited(attempt))
            except (SimulationError, ConfigError):
                result = outcome.result
            self._looked_on[attempt] = result
        return replace(outcome, result=self._looked_on[attempt])

    def tried(self, attempt: Attempt) -> Effect | None:
        """Return the outcome of an attempt, or None if the trace does not say enough for it."""
        if attempt not in self._tried:
            self._tried[attempt] = self._run(attempt)
        return self._tried[attempt]

    def _run(self, attempt: Attempt) -> Effect | None:
        try:
            if attempt.edit is None:
                return Effect(attempt, self.fair_replay.replay(attempt.what_if))
            operations = self._edited(attempt)
            looks_on = not (attempt.is_saving or self.is_long)
            result = self.fair_replay.replay(attempt.what_if, operations, looks_on=looks_on)
            peak = None
            if attempt.is_saving:
                served = result if result.fits else self._endless(operations)
                peak = served.peak_allocated_bytes
            return Effect(attempt, result, peak)
        except (SimulationError, ConfigError):
            return None  # the proposal stays, and says that it was not tested

    def _edited(self, attempt: Attempt) -> NativeOps:
        assert attempt.edit is not None  # noqa: S101 - checked by the caller
        if not attempt.is_saving:
            return attempt.edit.apply(self.reproduction)
        changed = attempt.edit.change(self.reproduction, self.around_peak)
        return changed.native(self.reproduction.operations)

    def predicted(self, result: ReplayResult) -> Predicted:
        """Return a result as a prediction, along with the fidelity of the reproduction.

        An inconclusive result predicts nothing.
        """
        if not result.is_conclusive:
            return Predicted()
        outlook, peak, capacity = result.outlook, result.peak_reserved_bytes, result.capacity_bytes
        if outlook is not None and outlook.state is OutlookState.HOLDS:
            peak = max(peak, outlook.peak_reserved_bytes or 0)
        return Predicted(
            fits=result.fits,
            peak_reserved_bytes=peak,
            retries=result.retries,
            method=self.simulation.method,
            driver_calls=result.driver_calls,
            margin_bytes=None if capacity is None else capacity - peak,
            fidelity_share=self.simulation.fidelity.share,
            outlook=result.outlook,
        )

    def confidence(self, result: ReplayResult) -> Confidence:
        """Return how certain a result that helps is.

        It is proven only if every request of whole further steps, as recorded, was served.
        """
        outlook = result.outlook
        if outlook is None or outlook.state is OutlookState.FAILS:
            return Confidence.LIKELY
        if outlook.state is OutlookState.OPEN:
            return Confidence.POSSIBLE
        is_proof = self.is_exact and self.simulation.fidelity.share == 1.0
        return Confidence.PROVEN if is_proof and outlook.is_known else Confidence.LIKELY

    @cached_property
    def outlook(self) -> Outlook | None:
        """What the recorded run would do next, or None if that is not known.

        A run that failed fails; the outlook then says what its step would have needed.
        """
        served = self.fair_replay.replay(WhatIf() if self.recorded.fits else ENDLESS)
        outlook = served.outlook
        if outlook is None or not served.is_conclusive or self.recorded.fits:
            return outlook
        is_open = outlook.state is OutlookState.OPEN
        is_bound = outlook.basis is OutlookBasis.LOWER_BOUND
        needs = None
        if (is_bound or not is_open) and not outlook.growth_bytes_per_step:
            # Memory reserved without a limit has holes that a full device would not leave.
            needs = self.fair_replay.step_needs_bytes()
        return replace(
            outlook,
            state=OutlookState.FAILS,
            likely=None,
            fails_after_steps=0,
            needs_bytes=needs,
            reason=outlook.reason if is_open else "the recorded failure",
        )

    @property
    def is_in_step(self) -> bool:
        """Whether steps of training or of a model were found, so that one holds the failure."""
        return bool((Steps.of(self.reproduction.trace).kind != StepKind.OTHER).any())

    def survivors(self) -> list[ReplayResult] | None:
        """Return the results under the usual settings that are not known to fail in this step.

        Returns None if no setting serves even the recorded request and no steps were found: the
        holes may be beyond any setting, unless the step needs more than there is in any layout.
        """
        results: list[ReplayResult] = []
        for last_resort in (False, True):
            if not any(r.fits for r in results):
                confs = usual_candidates(self.reproduction, last_resort=last_resort)
                results += self.fair_replay.replay_all([WhatIf(conf=conf) for conf in confs])
        if not any(r.fits for r in results) and not self.is_in_step:
            needs, has = self.fair_replay.step_needs_bytes(), self.recorded.capacity_bytes
            return [] if needs is not None and has is not None and needs > has else None
        return [r for r in results if r.fits and not (r.outlook and r.outlook.ends_step)]

    @cached_property
    def attention_scores(self) -> npt.NDArray[np.int64]:
        """The events that ask for attention scores or their gradients."""
        return find_attention_scores(self.reproduction.trace, self.requests)

    @cached_property
    def requests(self) -> TrainingRequests:
        """The recorded requests, including failed ones, with the stacks that made them."""
        trace, ops = self.reproduction.trace, self.around_peak
        made = np.flatnonzero((ops.kind == OpKind.MALLOC) | (ops.kind == OpKind.FAILED))
        freed = np.flatnonzero((ops.kind == OpKind.FREE) | (ops.kind == OpKind.FREE_PENDING))
        freed_row = np.full(int(ops.allocation.max(initial=0)) + 1, NO_ROW)
        freed_row[ops.allocation[freed]] = ops.row[freed]
        row = ops.row[made].astype(np.int64)
        is_failed = ops.kind[made] == OpKind.FAILED
        return TrainingRequests(
            row,
            np.where(is_failed, NO_ROW, freed_row[ops.allocation[made]]),
            ops.size[made].astype(np.int64),
            trace.events.stack[row],
        )


def _renumbered(table: npt.NDArray[np.void], n_initial: int) -> Operations:
    """Return operations with renumbered allocations; those from before the trace keep theirs."""
    has_block = table["kind"] <= OpKind.COMPLETE
    allocation = table["allocation"][has_block]
    is_kept = np.zeros(max(int(allocation.max(initial=0)) + 1, n_initial), np.bool_)
    is_kept[:n_initial] = True
    is_kept[allocation] = True
    table["allocation"][has_block] = (np.cumsum(is_kept) - 1)[allocation]
    return Operations(table)


def set_up(context: Context, other: Snapshot | None = None) -> tuple[Bench | None, FidelityReport]:
    """Return the bench of a device, or None and the reason if its trace cannot be replayed.

    Args:
        context: context of the device.
        other: a longer recording of the same program, to continue the trace with.

    Raises:
        SimulationError: the other recording does not belong to this one.
    """
    if context.analysis is None:
        return None, FidelityReport(reason="no snapshot was given")
    try:
        reproduction = reproduce(
            context.analysis.trace,
            torch_version=context.case.overrides.torch_version,
            device_total_bytes=context.total_bytes,
            stated_limit=_stated_limit(context),
        )
    except SimulationError as error:
        return None, FidelityReport(reason=error.message)
    run = continued_with(reproduction, other)
    simulation = simulation_of(reproduction, (), run)
    kept = context.analysis.kept
    replay = FairReplay(
        reproduction,
        other=run,
        container=None if kept is None else filling_container(context, kept),
    )
    return Bench(reproduction, simulation, replay, kept), simulation.fidelity


def _stated_limit(context: Context) -> tuple[int, int] | None:
    """Return the least and the most that the process was allowed; a message rounds the figure."""
    failed = context.failed_request
    limit = None if failed is None else failed.limit_bytes
    if limit is None:
        return None
    return limit - rounding_bytes(limit), limit + rounding_bytes(limit)
