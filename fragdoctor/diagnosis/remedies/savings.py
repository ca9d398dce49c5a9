"""Remedies that change a training program so that its peak is lower, each tried on the trace."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar, Final

from fragdoctor.diagnosis.bench import Attempt, Bench, Outcome
from fragdoctor.diagnosis.remedies.remedy import (
    HELPS,
    MAY_HELP,
    Burden,
    JudgedCase,
    Proposal,
    Remedy,
    helps,
)
from fragdoctor.model.diagnosis import Cause, Predicted
from fragdoctor.model.finding import Confidence, Evidence
from fragdoctor.model.simulation import OutlookBasis, OutlookState
from fragdoctor.model.snapshot import Action
from fragdoctor.rules.capacity.optimizer_state import fails_in_optimizer
from fragdoctor.trace.edits import Edit
from fragdoctor.units import MIB, format_size, plural

SHORT_OF_MEMORY: Final = (Cause.CAPACITY, Cause.TRANSIENT_PEAK, Cause.MEMORY_LIMIT)

MIN_SAVING_SHARE: Final = 0.03
"""Of the peak; less is not worth a change of the program, and within the error of the edits."""

CUT: Final = (
    "The recording ends before a whole step: what its rest would need is not in this figure."
)


class SavingRemedy(Remedy):
    """A change of a training program that lowers its peak.

    Attributes:
        doing: the change within a sentence: "with the layers checkpointed".
        change: what to write.
        cost, caveats, verify: as in ``Recommendation``.
        effort: order in which changes are combined: the least trouble first.
        is_usual: most guides name it, so that it is worth a word where it does not help.
        acts_on: what it makes smaller.
        combines: whether it is tried together with others.
    """

    burden: ClassVar[Burden] = Burden.CHANGE
    doing: ClassVar[str]
    change: ClassVar[str]
    cost: ClassVar[str]
    caveats: ClassVar[tuple[str, ...]] = ()
    verify: ClassVar[str] = "The peak of memory_stats() falls: allocated_bytes.all.peak."
    effort: ClassVar[int]
    is_usual: ClassVar[bool] = False
    acts_on: ClassVar[str] = "that"
    combines: ClassVar[bool] = True

    @abstractmethod
    def edits(self, case: JudgedCase) -> Sequence[Edit]:
        """Return the change as edits of the recorded requests, the mildest first.

        Empty where the trace does not show what it would act on.
        """

    def propose(self, case: JudgedCase) -> Iterator[Proposal]:
        """Propose it where memory is short, or where a healthy run could do with less."""
        if case.training is None or case.cause not in (*SHORT_OF_MEMORY, Cause.HEALTHY):
            return
        if self.edits(case):
            yield self.proposal(
                weight=MAY_HELP,
                confidence=Confidence.POSSIBLE,
                change=self.change,
                why="It lowers the peak of live memory; how much was not tried.",
                cost=self.cost,
                caveats=self.caveats,
                verify=self.verify,
            )

    def attempts(self, case: JudgedCase, bench: Bench, proposal: Proposal | None) -> list[Attempt]:
        """Try the run with this change."""
        del bench
        if proposal is None:
            return []
        return [Attempt.of_edit(edit, is_saving=True) for edit in self.edits(case)]

    def judged(
        self, case: JudgedCase, bench: Bench, proposal: Proposal | None, outcomes: Sequence[Outcome]
    ) -> Proposal | None:
        """Return it with what it saves; a change that saves next to nothing is no advice."""
        if proposal is None:
            return None
        best = self.chosen(bench, outcomes)
        saved = saved_bytes(bench, best)
        if saved < MIN_SAVING_SHARE * bench.peak_bytes:
            return self.useless(case, bench, proposal, saved)
        fits = best.result.fits and best.result.is_conclusive
        r = replace(
            proposal.recommendation,
            why=saving_text(case, bench, best),
            confidence=_sureness(bench, best),
            saves_bytes=saved,
            evidence=(
                Evidence("peak as recorded", bench.peak_bytes, "bytes", "replay"),
                Evidence("peak with the change", bench.peak_bytes - saved, "bytes", "replay"),
            ),
        )
        if is_cut(case, bench):
            r = replace(r, caveats=(*r.caveats, CUT))
        weight = HELPS + 20 if fits else HELPS
        weight = weight if case.cause in SHORT_OF_MEMORY else MAY_HELP
        return replace(
            proposal,
            weight=weight,
            recommendation=replace(r, predicted=bench.predicted(best.result)),
        )

    def chosen(self, bench: Bench, outcomes: Sequence[Outcome]) -> Outcome:
        """Return the outcome that speaks for the change: the first of its edits that is enough."""
        enough = first_enough(bench, outcomes)
        return enough or bench.looked_on(min(outcomes, key=lambda o: o.peak_bytes or 0))

    def useless(
        self, case: JudgedCase, bench: Bench, proposal: Proposal, saved: int
    ) -> Proposal | None:
        """Return a change that saves next to nothing: rejected where it is the usual advice."""
        if not self.is_usual or case.cause not in SHORT_OF_MEMORY:
            return None
        less = f"falls by {format_size(saved)} only" if saved >= MIB else "does not fall"
        why = (
            f"Replayed with {self.doing}: the peak of {format_size(bench.peak_bytes)} live memory "
            f"{less}. It is made of other things than {self.acts_on}."
        )
        rejected = replace(
            proposal.recommendation, why=why, confidence=Confidence.LIKELY, saves_bytes=None
        )
        return replace(proposal, recommendation=rejected, is_rejected=True)


def first_enough(bench: Bench, outcomes: Sequence[Outcome]) -> Outcome | None:
    """Return the first outcome with which the run is not expected to fail; None if all fail.

    Where all are expected to, the last that is not known to.
    """
    last = None
    for outcome in outcomes:
        if helps(bench.recorded, outcome.result):
            found = bench.looked_on(outcome)
            outlook = found.result.outlook
            if outlook is None or not outlook.fails:
                return found
            if outlook.state is not OutlookState.FAILS:
                last = found
    return last


def _sureness(bench: Bench, outcome: Outcome) -> Confidence:
    """Return how sure a saving is: the edit is a model of the changed program, never a proof."""
    if outcome.result.outlook is None:
        return Confidence.LIKELY
    sure = bench.confidence(outcome.result)
    return Confidence.LIKELY if sure is Confidence.PROVEN else sure


def is_cut(case: JudgedCase, bench: Bench) -> bool:
    """Return whether the run failed before any step was whole: what a step needs is not known."""
    whole = 0 if case.training is None else case.training.n_whole_steps
    return not bench.recorded.fits and whole == 0


def saved_bytes(bench: Bench, outcome: Outcome) -> int:
    """Return how much lower the peak of live memory is than as recorded."""
    return bench.peak_bytes - (outcome.peak_bytes or bench.peak_bytes)


def saving_text(case: JudgedCase, bench: Bench, outcome: Outcome) -> str:
    """Return what a change does to the peak, and whether that is enough."""
    peak = bench.peak_bytes - saved_bytes(bench, outcome)
    saved = format_size(saved_bytes(bench, outcome))
    text = (
        f"Replayed: peak live memory falls by {saved}, from "
        f"{format_size(bench.peak_bytes)} to {format_size(peak)}"
    )
    if case.cause not in SHORT_OF_MEMORY:
        return f"{text}."
    if not outcome.result.fits:
        return f"{text}, which is not enough alone."
    return f"{text}; {_how_far(bench.predicted(outcome.result))}."


def _how_far(predicted: Predicted) -> str:
    """Return how far the run goes with a change that serves the recorded requests."""
    served, outlook = "every recorded request is served", predicted.outlook
    spare = f", with {format_size(predicted.room_bytes)} to spare"
    spare = "" if predicted.margin_bytes is None else spare
    if outlook is None or outlook.basis is OutlookBasis.COMPLETE:
        return f"{served}{spare}"
    if outlook.state is OutlookState.HOLDS:
        further = f" and {plural(outlook.steps, 'step')} more" if outlook.steps else ""
        return f"the step that failed{further} would be served{spare}"
    if outlook.state is OutlookState.OPEN:
        return f"{served}{spare}; the rest is open: {outlook.reason}"
    steps = outlook.fails_after_steps
    if not steps:
        return f"{served}, but not the rest of the step: {outlook.reason}"
    return f"{served}{spare}, but it fails after {plural(steps, 'more step')}"


BUILD_FREES_SHARE: Final = 0.02
"""Building a model frees next to nothing; a single forward pass frees more than this."""


def fails_in_optimizer_step(case: JudgedCase) -> bool:
    """Return whether the request failed inside an optimizer's step, after the backward pass."""
    analysis = case.context.analysis
    return analysis is not None and fails_in_optimizer(case.context, analysis)


def only_builds(case: JudgedCase) -> bool:
    """Return whether nothing was ever freed before the failure: the model itself is being built.

    Small blocks do not count: making a weight frees a scalar or two.
    """
    analysis, snapshot = case.context.analysis, case.context.snapshot
    if analysis is None or snapshot is None or not analysis.capture.has_trace:
        return False
    if analysis.capture.is_late_start or analysis.capture.missing_actions:
        return False
    if len(analysis.trace.module_rows):  # it has been called
        return False
    rows = snapshot.events.device_slice(analysis.device)
    frees = snapshot.events.action[rows] == Action.FREE_REQUESTED
    freed = int(snapshot.events.size_bytes[rows][frees].sum())
    return freed <= BUILD_FREES_SHARE * analysis.active_bytes


def may_be_activations(case: JudgedCase) -> bool:
    """Return whether activations of a training step may be what fills the device."""
    r = case.failed_request
    if not case.is_allocator_case or r is None:
        return False
    if case.cause not in (Cause.CAPACITY, Cause.TRANSIENT_PEAK) or r.is_alone_too_large:
        return False
    return not fails_in_optimizer_step(case) and not only_builds(case)
