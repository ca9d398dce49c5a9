"""The verdict: all evidence first, then a table of rows, of which the first that applies decides.

A row has a name, which is the verdict's ``decider``. First come the rows that explain what
arithmetic alone cannot: growth, an evaluation that gathers results, the outcome under other
allocator settings. Other cases are read from the figures of the failed request (``decision.py``),
the message, or the statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Final

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from fragdoctor.analysis.result import DeviceAnalysis, KeptMemory, KeptPattern
from fragdoctor.diagnosis.bench import Bench
from fragdoctor.diagnosis.decision import Hypothesis, decide, distinct, is_last_straw, name_of
from fragdoctor.diagnosis.run_state import backed_off, run_state
from fragdoctor.diagnosis.verdict_contrast import MAY_LEAK, contrast_of, with_contrast
from fragdoctor.diagnosis.verdict_ledger import in_ledger
from fragdoctor.diagnosis.verdict_message import (
    as_told,
    evidence_of_message,
    read_message,
    read_no_message,
)
from fragdoctor.diagnosis.verdict_stats import evidence_of_stats, near_the_limit, read_stats
from fragdoctor.future.outlook import ENOUGH
from fragdoctor.model.case import NO_FAILURE, ToldContrast
from fragdoctor.model.census import HoldingKind, Owner
from fragdoctor.model.diagnosis import Cause, Verdict
from fragdoctor.model.finding import (
    ACTIVE,
    LIVE_AT_FAILURE,
    Confidence,
    Evidence,
    in_bytes,
    line_text,
)
from fragdoctor.model.gpus import with_monitor_of
from fragdoctor.model.simulation import Outlook, OutlookBasis, OutlookState, ReplayResult
from fragdoctor.model.snapshot import Action
from fragdoctor.model.story import TrialTrend
from fragdoctor.rules.capacity.optimizer_state import fails_in_optimizer
from fragdoctor.rules.capacity.transient_peak import Transient, find_transient
from fragdoctor.rules.failed_request import FULL_SLACK_SHARE, FailedRequest
from fragdoctor.rules.growth.growing_line import (
    gathered_text,
    holder_of,
    idle_graph_text,
    keeper,
    kept_text,
    owner_name,
)
from fragdoctor.rules.request_sources import is_one_of_several
from fragdoctor.rules.rule import Context
from fragdoctor.rules.traceback_signs import (
    ADDS_UP,
    FIRST_GPU,
    GROWTH,
    KEPT_IN_USE,
    RAN_BEFORE,
    is_seen_to_fail_late,
    is_seen_to_grow,
    shows_sign,
)
from fragdoctor.story.trends import accumulation, growth_sentence, rise_bytes
from fragdoctor.units import GIB, format_count, format_size, plural

NOT_A_SHORTAGE: Final = ("negative", "shared-memory")
"""Messages that say nothing about memory; a snapshot given with them is judged by itself."""

MAY_BE_HOLES: Final = (Cause.CAPACITY, Cause.MEMORY_LIMIT)
"""Readings that thresholds give when memory was nearly full."""

LEAKS_INTO: Final = (*MAY_BE_HOLES, Cause.FRAGMENTATION, Cause.PRIVATE_POOLS)
"""Readings that a leak causes sooner or later."""

NEVER_KEPT: Final = (
    KeptPattern.GRAPH, KeptPattern.GRADIENTS, KeptPattern.OPTIMIZER, KeptPattern.MODELS,
)  # fmt: skip
"""Growing memory of these patterns is a leak in 7 of 7 recordings of known programs; of the others
it is in 16 of 40: caches, replay buffers and kept states grow in the same way."""

FAR_SHARE: Final = 0.5
"""A setting helps if it lets the run go on for this share of the steps it had completed."""

SMALLEST_GPU_BYTES: Final = 2 * GIB
"""No GPU that current PyTorch supports has less memory, so the rest is held outside of PyTorch. A
snapshot does not record the size of the device, so this is only a hint."""

RESUMED_REQUESTS: Final = 100
"""This many requests after a caught failure show a program at work, not one that reports and
ends."""


class CaseEvidence(Struct, frozen=True, dict=True):
    """Everything a verdict is based on; each part is worked out once, when a row asks for it.

    Attributes:
        context: the device that the verdict is about, with all inputs.
        bench: its reproduced run, to try settings on, or None if nothing was replayed.
    """

    context: Context
    bench: Bench | None

    @property
    def is_of_snapshot(self) -> bool:
        """Whether the snapshot takes precedence: it holds a failure, or nothing contradicts it."""
        analysis, message = self.context.analysis, self.context.message
        is_silent = message is None or message.kind in NOT_A_SHORTAGE
        return analysis is not None and (bool(analysis.ooms) or is_silent)

    @property
    def failed(self) -> FailedRequest | None:
        """The failed request, if the verdict is based on its figures."""
        message = self.context.message
        if not self.is_of_snapshot and (message is None or message.sub_kind):
            return None
        return self.context.failed_request

    @cached_property
    def contrast(self) -> ToldContrast | None:
        """What a text says the failure depends on, unless something shows more."""
        log = self.context.case.oom
        if log is None or self.is_of_snapshot:
            return None
        return contrast_of(self.context.message, log.settings)

    @cached_property
    def reading(self) -> Hypothesis:
        """What the figures and words of the failure alone say."""
        return with_contrast(self._read, self.context.message, self.contrast)

    @property
    def _read(self) -> Hypothesis:
        context, message = self.context, self.context.message
        if self.failed is not None:
            found = as_told(decide(self.failed), message)
            return (
                found
                if self.is_of_snapshot
                else in_ledger(found, message, context.case.ledger, self.failed)
            )
        if self.is_of_snapshot:
            return _no_failure(self)
        if message is not None and message.sub_kind != NO_FAILURE:
            return in_ledger(read_message(message), message, context.case.ledger, None)
        if context.stats:
            return read_stats(context)
        if context.case.oom is not None:
            return read_no_message(context.case.oom)
        nothing = "There is no input to judge."
        return Hypothesis(Cause.UNKNOWN, nothing, row="no-input")

    @property
    def _explaining(self) -> DeviceAnalysis | None:
        return self.context.analysis if self.is_of_snapshot or self.failed is not None else None

    @property
    def kept(self) -> KeptMemory | None:
        """Memory that grows from step to step."""
        return None if self._explaining is None else self._explaining.kept

    @cached_property
    def keeper(self) -> Owner | None:
        """Who holds most of what grows according to a census, or None if unknown."""
        return None if self.kept is None else keeper(self.context, self.kept)

    @property
    def is_bounded(self) -> bool:
        """Whether a container with a limit holds what grows: it fills up, which is no leak."""
        return self.keeper is not None and self.keeper.max_items > 0

    @property
    def gathered(self) -> KeptMemory | None:
        """Memory that a running evaluation gathers."""
        return None if self._explaining is None else self._explaining.gathered

    @cached_property
    def spike(self) -> Transient | None:
        """A peak far above those before it, which the failing request was part of."""
        analysis, failed = self.context.analysis, self.failed
        if analysis is None or failed is None:
            return None
        available = failed.available_bytes
        is_alone = available is not None and failed.requested_bytes > available
        return None if is_alone else analysis.trace.once(find_transient)

    @cached_property
    def grown(self) -> TrialTrend | None:
        """Memory that grows over the trials of a log."""
        return accumulation(self.context.story)

    @cached_property
    def outlook(self) -> Outlook | None:
        """What the recorded run would do next, or None if that was not worked out."""
        bench = self.bench
        if bench is None or not bench.is_usable or self.context.analysis is None:
            return None
        return bench.outlook

    @cached_property
    def survivors(self) -> list[ReplayResult] | None:
        """A failed run's results under the usual settings not known to fail in its step.

        None if the trace does not tell.
        """
        bench = self.bench
        if bench is None or self.outlook is None or bench.recorded.fits or not bench.is_exact:
            return None
        return bench.survivors()

    @property
    def is_refuted_leak(self) -> bool:
        """Whether the recorded request fails even if none of the growing memory is kept."""
        return self.bench is not None and self.bench.refutes_leak

    @property
    def prospects(self) -> set[OutlookState | None]:
        """The known or likely outcomes of the run under these settings."""
        return {_prospect(result) for result in self.survivors or ()}

    @property
    def lacking_bytes(self) -> int:
        """What the failed step needs beyond what PyTorch could have, or 0 if unknown."""
        bench, outlook = self.bench, self.outlook
        if bench is None or outlook is None or bench.recorded.fits or not bench.is_exact:
            return 0
        needs, capacity = outlook.needs_bytes, bench.recorded.capacity_bytes
        return 0 if needs is None or capacity is None else max(needs - capacity, 0)


def find_verdict(evidence: CaseEvidence) -> Verdict:
    """Return the verdict of the first row that applies, with other causes the evidence supports."""
    row, decided = next((row, found) for row in ROWS if (found := row(evidence)) is not None)
    beside = (*_beside(evidence), evidence.reading.cause, *evidence.reading.also)
    verdict = Verdict(
        decided.cause,
        decided.confidence,
        decided.summary,
        evidence.context.device,
        distinct(beside, decided.cause),
        _figures(evidence),
        decided.row or name_of(row),
        with_monitor_of(evidence.context.backend, decided.settled_by),
    )
    outlook = evidence.outlook
    if outlook is not None and not (verdict.cause is Cause.HEALTHY and evidence.failed is not None):
        verdict = replace(verdict, outlook=outlook)
    return replace(verdict, state=run_state(evidence.context, verdict.cause))


# ---- the table -----------------------------------------------------------------------------------


def _growth_in_log(e: CaseEvidence) -> Hypothesis | None:
    """Memory grew over the trials or the prints of a log, which one message cannot show."""
    grown, reading = e.grown, e.reading
    if grown is None or grown.confidence is not Confidence.LIKELY:
        return None
    if grown.over == "oom" or e.kept is not None:
        return None
    is_all = reading.row == "no-message" and grown.over == "trial"
    if not is_all and not _explains_reading(e, rise_bytes(grown)):
        return None
    text = f"{growth_sentence(grown)} {reading.summary}"
    return Hypothesis(Cause.LEAK, text, Confidence.LIKELY, reading.settled_by)


def _explains_reading(e: CaseEvidence, grown_bytes: int) -> bool:
    """Return whether memory that grew explains what the figures say.

    It explains any shortage, but holes only if what grew is no less than the request, and private
    pools only if it is no less than what lies free in them.
    """
    cause, least = e.reading.cause, 0
    if e.failed is not None and cause not in MAY_BE_HOLES:
        is_in_pools = cause is Cause.PRIVATE_POOLS
        least = e.failed.pools_free_bytes if is_in_pools else e.failed.requested_bytes
    return cause in LEAKS_INTO and grown_bytes >= least


def _growth(e: CaseEvidence) -> Hypothesis | None:
    """Memory grows from step to step, unless the request fails even without what was kept."""
    kept, failed = e.kept, e.failed
    if kept is None or e.is_bounded:
        return None
    ending = "; no request failed yet"
    if failed is not None:
        if not _explains_reading(e, kept.survivor_bytes) or e.is_refuted_leak:
            return None
        ending = f", until the {failed.request_text} failed"
    check = ": look for a list, a cache or a loss that keeps its graph"
    if e.keeper is not None and e.keeper.kind is HoldingKind.CONTAINER:
        check = f", and whether anything bounds {e.keeper.name}"
    elif kept.pattern is KeptPattern.BUFFER:
        check = ", and whether anything bounds its length"
    alike = ""
    if kept.pattern is KeptPattern.EVALUATION:
        alike = " An evaluation may let go of it when it ends."
    elif kept.pattern not in NEVER_KEPT:
        alike = " A cache or a buffer that fills up looks the same."
    return Hypothesis(
        Cause.LEAK,
        f"{kept_text(e.context, kept)}{ending}.{alike}",
        Confidence.POSSIBLE if alike else Confidence.LIKELY,
        f"Check whether this memory is kept on purpose{check}.",
    )


def _container_fills(e: CaseEvidence) -> Hypothesis | None:
    """A container with a limit fills up, and what it still lacks does not fit."""
    kept, failed, owner = e.kept, e.failed, e.keeper
    if kept is None or failed is None or owner is None or not e.is_bounded:
        return None
    each = kept.survivor_bytes // max(owner.n_items, 1)
    lacks = each * max(owner.max_items - owner.n_items, 0)
    if not _explains_reading(e, kept.survivor_bytes) or lacks <= (failed.margin_bytes or 0):
        return None
    summary = (
        f"{kept_text(e.context, kept)}. It may have {format_count(owner.max_items)} items, which "
        f"take about {format_size(lacks)} more; the {failed.request_text} no longer fit."
    )
    return Hypothesis(Cause.CAPACITY, summary, Confidence.LIKELY)


def _failure_caught(e: CaseEvidence) -> Hypothesis | None:
    """The program caught its failures and resumed its work."""
    failed, analysis = e.failed, e.context.analysis
    if failed is None or not failed.is_caught or analysis is None:
        return None
    bundle = e.context.case.bundle
    ended_well = bundle is not None and bundle.reason == "exit" and not bundle.exception
    n_after = _requests_after_failure(e)
    has_resumed = n_after >= RESUMED_REQUESTS or ended_well
    has_resumed |= bundle is None and is_one_of_several(analysis)
    if not has_resumed:
        return None
    n = len(analysis.ooms)
    sizes = sorted(oom.rounded_bytes for oom in analysis.ooms)
    tried = format_size(sizes[-1])
    if sizes[0] != sizes[-1]:
        tried = f"{format_size(sizes[0])} to {tried}"
    errors = "an out-of-memory error" if n == 1 else f"{n} out-of-memory errors"
    served = f": {format_count(n_after)} requests were served since, and none failed"
    summary = (
        f"The program caught {errors} ({'a request' if n == 1 else 'requests'} of {tried}) and "
        f"went on{', to its end' if ended_well else ''}{served if n_after else ''}"
        f"{'; it let go of its memory after the last' if not (n_after or ended_well) else ''}."
    )
    found = backed_off(analysis)
    if found is not None:
        last = analysis.ooms[-1]
        where = e.context.user_line(last.stack)
        summary += (
            f" {'The line that failed' if where is None else where} asked for "
            f"{format_size(last.rounded_bytes)} without success and was served "
            f"{format_size(found.served_bytes)} from then on, {format_size(found.peak_bytes)} live "
            "at most."
        )
    return Hypothesis(Cause.HEALTHY, summary, Confidence.LIKELY)


def _attempt_held(e: CaseEvidence) -> Hypothesis | None:
    """An attempt that failed before is still held while the next one runs."""
    left, failed = e.context.left_of_attempts, e.failed
    if left is None or failed is None or not _explains_reading(e, left.n_bytes):
        return None
    summary = (
        f"An earlier attempt that failed still holds {format_size(left.n_bytes)}, through the "
        f"exception that was caught; the {failed.request_text} no longer fit."
    )
    return Hypothesis(Cause.TRANSIENT_PEAK, summary, Confidence.LIKELY)


def _evaluation(e: CaseEvidence) -> Hypothesis | None:
    """An evaluation gathers its results, or builds a graph that no backward pass will use.

    It releases both when it ends.
    """
    analysis, failed = e.context.analysis, e.failed
    if analysis is None or failed is None or e.reading.cause not in LEAKS_INTO:
        return None
    settled_by, row = "", "evaluation-builds-graph"
    if e.gathered is not None:
        text = gathered_text(e.context, e.gathered)
        settled_by = "If it is still there after the evaluation has ended, something leaks it."
        row = "evaluation-gathers"
    elif analysis.idle_graph is not None:
        text = idle_graph_text(e.context, analysis.idle_graph)
    else:
        return None
    summary = f"{text}; the {failed.request_text} no longer fit."
    return Hypothesis(Cause.TRANSIENT_PEAK, summary, Confidence.LIKELY, settled_by, row)


def _old_model_held(e: CaseEvidence) -> Hypothesis | None:
    """The model that a line built before is still held while it builds the next."""
    failed, copies = e.failed, None
    if failed is not None and e.reading.cause in LEAKS_INTO:
        copies = e.context.weight_copies
    if failed is None or copies is None or copies.freed_row is None:
        return None
    if not _explains_reading(e, copies.n_bytes) or e.is_bounded:
        return None
    owner = holder_of(e.context, copies.rows)
    held = "" if owner is None else f" by {owner_name(owner)}"
    return Hypothesis(
        Cause.LEAK,
        f"{line_text(e.context.user_line(copies.stack))} has built one model after another, and "
        f"{format_size(copies.n_bytes)} of the earlier ones are still held{held}; the "
        f"{failed.request_text} no longer fit. An ensemble that is in use looks the same.",
        settled_by="Check whether the earlier models are still needed: look for a list of results, "
        "a closure or the traceback of an exception that keeps them.",
    )


def _setting_mends(e: CaseEvidence) -> Hypothesis | None:
    """Thresholds call memory full, but a setting is enough: the missing memory lies in holes."""
    if e.reading.cause not in MAY_BE_HOLES or e.reading.confidence is Confidence.PROVEN:
        return None
    finishing = [r for r in e.survivors or () if _prospect(r) is OutlookState.HOLDS]
    if not finishing:
        return None
    text = f"{e.reading.summary} But replayed under {finishing[0].conf} the run goes on: what it "
    return Hypothesis(Cause.FRAGMENTATION, f"{text}lacks lies in holes.", Confidence.LIKELY)


def _no_setting_mends(e: CaseEvidence) -> Hypothesis | None:
    """Free memory was enough for the one failing request, but not for the step it belongs to.

    Either every setting fails, or the step is the first, and none is known to finish it.
    """
    survivors, bench = e.survivors, e.bench
    if e.reading.cause is not Cause.FRAGMENTATION or survivors is None or bench is None:
        return None
    enough = "Free memory was enough for the request that failed, but"
    if e.prospects <= {OutlookState.FAILS}:
        steps = max((r.outlook.fails_after_steps or 0 for r in survivors if r.outlook), default=0)
        end = f"lets the run go on for more than {plural(steps, 'step')}"
        if not steps:
            end = "lets its step finish"
        lacks = f" It lacks {format_size(e.lacking_bytes)} in all." if e.lacking_bytes else ""
        text, cause = f"{enough} no allocator setting {end}.{lacks}", _other_than_holes(e)
        is_sure = cause is not Cause.LEAK or (e.kept and e.kept.pattern in NEVER_KEPT)
        sure = Confidence.LIKELY if is_sure else Confidence.POSSIBLE
        return Hypothesis(cause, text, sure)
    is_first = all(r.outlook and r.outlook.basis is OutlookBasis.LOWER_BOUND for r in survivors)
    if OutlookState.HOLDS in e.prospects or not is_first:
        return None
    return Hypothesis(
        _other_than_holes(e),
        f"{enough} its step was the first, and no allocator setting is known to be enough for the "
        "rest.",
        settled_by="Rehearse the program and give the recording to --continue-with.",
        row="first-step",
    )


def _transient_peak(e: CaseEvidence) -> Hypothesis | None:
    """One step needs far more than the steps before it."""
    spike, failed = e.spike, e.failed
    if spike is None or failed is None or e.reading.cause is not Cause.CAPACITY:
        return None
    summary = f"{spike.text}; the {failed.request_text} no longer fit."
    return Hypothesis(Cause.TRANSIENT_PEAK, summary, Confidence.LIKELY)


def _growth_to_last_straw(e: CaseEvidence) -> Hypothesis | None:
    """People wrote that memory grew, or code shows it, and a small request was the last straw."""
    message, r, reading = e.context.message, e.failed, e.reading
    if message is None or reading.cause is not Cause.CAPACITY or not is_seen_to_grow(message):
        return None
    if not (message.code.kept or shows_sign(message, *ADDS_UP)):
        return None  # its traceback explains the failure
    if r is None or not is_last_straw(r):
        return None
    also = distinct((Cause.CAPACITY, *reading.also), Cause.LEAK)
    grown = "" if shows_sign(message, GROWTH) else " According to the text, memory grew before."
    if message.code.kept:
        grown = (
            f" The code adds a result to {message.code.kept} in each round, which keeps the graph "
            "of that round."
        )
    return replace(
        reading,
        cause=Cause.LEAK,
        summary=f"{reading.summary}{grown}",
        confidence=Confidence.LIKELY,
        settled_by="A second recording of a longer run shows whether memory grows with each step.",
        also=also,
    )


def _growth_told(e: CaseEvidence) -> Hypothesis | None:
    """People wrote that memory grows, or is held from before: a leak if nothing else is known."""
    message, reading = e.context.message, e.reading
    if message is None or reading.confidence is not Confidence.POSSIBLE:
        return None
    is_late = reading.cause is Cause.CAPACITY and is_seen_to_fail_late(message)
    is_elsewhere = reading.cause in (Cause.OTHER_PROCESS, Cause.HOST_MEMORY)
    is_elsewhere |= shows_sign(message, FIRST_GPU)  # where it grows with the number of GPUs
    is_kept = is_seen_to_grow(message) or shows_sign(message, RAN_BEFORE, KEPT_IN_USE)
    is_bounded = e.contrast is not None and e.contrast.kind not in MAY_LEAK
    if is_late or is_elsewhere or is_bounded or not is_kept:
        return None
    summary = _GROWTH_ALONE if message.sub_kind == "unread" else reading.summary
    return replace(reading, cause=Cause.LEAK, summary=summary, row="growth-told")


_GROWTH_ALONE: Final = "According to the text, memory grows until none is left."


def _figures_say(e: CaseEvidence) -> Hypothesis | None:
    """What the figures alone say."""
    reading, failed = e.reading, e.failed
    if failed is None:
        return reading
    confidence, summary, settled_by = reading.confidence, reading.summary, reading.settled_by
    is_of_step = e.survivors is not None and e.bench is not None and e.bench.is_in_step
    is_mended = any(r.outlook is not None and r.outlook.is_known for r in e.survivors or ())
    if reading.cause is Cause.FRAGMENTATION and is_of_step and not is_mended:
        # The rest of the step may need more: a setting cures 43 of 47 programs where one is likely
        # to finish, 11 of 11 where a second request would fit too, and else 11 of 21.
        is_likely = OutlookState.HOLDS in e.prospects or _has_room_for_another(e, failed)
        least = Confidence.LIKELY if is_likely else Confidence.POSSIBLE
        confidence = max(confidence, least, key=_ORDER)
    is_full = reading.cause in (Cause.CAPACITY, Cause.MEMORY_LIMIT)
    missing = max(-(failed.margin_bytes or 0), 0)
    if is_full and e.lacking_bytes > missing and failed.margin_bytes is not None:
        summary += f" The whole step lacks {format_size(e.lacking_bytes)}."
    if failed.is_caught:
        summary += " The program caught the error and went on."
    available = failed.available_bytes
    if is_full and failed.total_bytes is None and available is not None and failed.is_exact:
        settled_by = (
            f"Compare {format_size(available)} with the size of the GPU, or add the OOM message: "
            "any difference is held outside this PyTorch."
        )
    return replace(reading, confidence=confidence, summary=summary, settled_by=settled_by)


ROWS: Final[tuple[Callable[[CaseEvidence], Hypothesis | None], ...]] = (
    _growth_in_log,
    _growth,
    _container_fills,
    _failure_caught,
    _attempt_held,
    _evaluation,
    _old_model_held,
    _setting_mends,
    _no_setting_mends,
    _transient_peak,
    _growth_to_last_straw,
    _growth_told,
    _figures_say,
)


# ---- helpers of the rows -------------------------------------------------------------------------

_ORDER: Final = list(Confidence).index


def _prospect(result: ReplayResult) -> OutlookState | None:
    """Return the known or likely outcome of a run under a setting.

    A setting that lets the run go half as far again, and at least three steps, counts as holding:
    in ``tests/truth`` such settings cure, and those that carry the run less far do not.
    """
    outlook = result.outlook
    if outlook is None:
        return None
    n_steps = outlook.n_complete_steps
    if n_steps and (outlook.fails_after_steps or 0) >= max(FAR_SHARE * n_steps, ENOUGH):
        return OutlookState.HOLDS
    return outlook.likely if outlook.state is OutlookState.OPEN else outlook.state


def _has_room_for_another(e: CaseEvidence, failed: FailedRequest) -> bool:
    """Return whether a setting serves the request and leaves room for more than another one."""
    spare = [(r.capacity_bytes or 0) - r.peak_reserved_bytes for r in e.survivors or ()]
    return max(spare, default=0) > failed.requested_bytes


def _other_than_holes(e: CaseEvidence) -> Cause:
    """Return the cause of the failure of a step that no setting lets finish."""
    if e.kept is not None and not (e.is_refuted_leak or e.is_bounded):
        return Cause.LEAK
    if e.gathered is not None:
        return Cause.TRANSIENT_PEAK
    if e.bench is not None and e.bench.reproduction.conditions.allowed_bytes is not None:
        return Cause.MEMORY_LIMIT
    return Cause.CAPACITY if e.spike is None else Cause.TRANSIENT_PEAK


def _beside(e: CaseEvidence) -> Iterator[Cause]:
    """Yield other causes that the evidence supports."""
    analysis, failed = e.context.analysis, e.failed
    if e.kept is not None:
        yield Cause.LEAK
    if e.gathered is not None and failed is not None:
        yield Cause.TRANSIENT_PEAK
    is_about_memory = e.reading.cause not in (Cause.NOT_MEMORY, Cause.HEALTHY, Cause.UNKNOWN)
    if is_about_memory and e.grown is not None:
        yield Cause.LEAK
    if failed is None or analysis is None:
        return
    if failed.is_caught:
        yield Cause.HEALTHY
    if e.reading.cause is Cause.CAPACITY and fails_in_optimizer(analysis):
        yield Cause.TRANSIENT_PEAK
    available = failed.available_bytes
    is_small = available is not None and available < SMALLEST_GPU_BYTES
    if e.reading.cause is Cause.CAPACITY and failed.total_bytes is None and is_small:
        yield Cause.OTHER_PROCESS
        yield Cause.NON_PYTORCH_MEMORY


def _requests_after_failure(e: CaseEvidence) -> int:
    """Return how many requests were served after the last failure."""
    analysis = e.context.analysis
    if analysis is None:
        return 0
    after = analysis.trace.events.action[analysis.ooms[-1].row + 1 :]
    return int(np.count_nonzero(after == Action.ALLOC))


def _no_failure(e: CaseEvidence) -> Hypothesis:
    """Read a snapshot in which no request failed as healthy, with anything worth mentioning."""
    analysis = e.context.analysis
    assert analysis is not None  # noqa: S101 - the snapshot is what is read
    space = analysis.free_space
    if not analysis.capture.has_trace:
        held = "The file holds no memory"
        if analysis.reserved_bytes:
            held = (
                f"{format_size(analysis.allocated_bytes)} of "
                f"{format_size(analysis.reserved_bytes)} reserved is allocated, and nothing "
                "points to a problem"
            )
        is_full = 0 < analysis.reserved_bytes * FULL_SLACK_SHARE > space.free_cached_bytes
        settled_by = (
            "If it was taken at an out-of-memory error, the device was simply full of live memory: "
            "give the message."
        )
        return Hypothesis(
            Cause.HEALTHY,
            f"{held}. It has no history, so earlier failures and growth cannot be seen.",
            settled_by=settled_by if is_full else "",
            row="no-history",
            also=(Cause.CAPACITY,) if is_full else (),
        )
    peak = analysis.timeline.peak_allocated_bytes if analysis.timeline else None
    if e.context.retries and e.context.retries[0]:
        found = near_the_limit(e.context, space.stranded_free_bytes)
        also = (Cause.FRAGMENTATION,)
        return replace(found, confidence=Confidence.LIKELY, settled_by="", also=also)
    cache = (
        f" At the end {format_size(space.free_cached_bytes)} of the "
        f"{format_size(analysis.reserved_bytes)} reserved is free cache"
    )
    if space.releasable_bytes:
        cache += (
            f", and {format_size(space.releasable_bytes)} of that goes back to the device on demand"
        )
    summary = (
        f"No request failed (peak allocated {format_size(peak)})."
        f"{f'{cache}.' if space.free_cached_bytes else ''}"
    )
    return Hypothesis(Cause.HEALTHY, summary, Confidence.LIKELY, row="no-failure")


def _figures(e: CaseEvidence) -> tuple[Evidence, ...]:
    """Return the numbers that the verdict rests on."""
    analysis, message, context = e.context.analysis, e.context.message, e.context
    grown: list[Evidence] = []
    if e.grown is not None and e.kept is None:
        grown = [Evidence("growth", round(e.grown.slope_bytes or 0), "bytes", "log")]
    if analysis is None or not e.is_of_snapshot:
        if message is not None and message.sub_kind != NO_FAILURE:
            return (*evidence_of_message(message), *grown)
        return (*(evidence_of_stats(context) if context.stats else ()), *grown)
    at_end = {
        "reserved": analysis.reserved_bytes,
        ACTIVE: analysis.active_bytes,
        "stranded free": analysis.free_space.stranded_free_bytes,
    }
    items, failed = in_bytes(at_end, "snapshot"), e.failed
    if failed is not None:
        is_block = failed.block_bytes in {None, failed.requested_bytes}
        at_failure = {
            "requested": failed.requested_bytes if is_block else failed.block_bytes,
            "segment for it": None if is_block else failed.requested_bytes,
            LIVE_AT_FAILURE: failed.live_bytes,
            "device free": failed.free_bytes,
            "available to PyTorch": failed.available_bytes,
            "device total": failed.total_bytes,
        }
        items += in_bytes(at_failure, failed.source)
    return (*items, *grown)
