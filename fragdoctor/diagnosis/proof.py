"""From proposals to tested proposals: what the replay says of each, and what it adds.

What serves every request comes first, then what leaves most room; what asks the user to compute
less (smaller batches) comes after what does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fragdoctor.diagnosis.bench import Bench, Progress, set_up
from fragdoctor.diagnosis.remedies.registry import REMEDIES
from fragdoctor.diagnosis.remedies.remedy import (
    CURES,
    HELPS,
    Attempt,
    JudgedCase,
    Proposal,
    SettingRemedy,
)
from fragdoctor.diagnosis.remedies.settings import DefaultSettings
from fragdoctor.model.diagnosis import Cause, FidelityReport
from fragdoctor.model.finding import Confidence
from fragdoctor.model.settings import is_same_conf
from fragdoctor.model.simulation import ReplayResult
from fragdoctor.trace.whatif import WhatIf
from fragdoctor.units import format_count, format_size, plural


@dataclass(frozen=True, slots=True)
class Proof:
    """Tested proposals, the fidelity of the replay, and what it says as a whole."""

    proposals: Sequence[Proposal]
    fidelity: FidelityReport
    notes: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Tried:
    """One what-if with its outcome."""

    attempt: Attempt
    result: ReplayResult


def prove(
    case: JudgedCase, proposals: Sequence[Proposal], progress: Progress | None = None
) -> Proof:
    """Return the proposals with what replaying the trace under each of them gives.

    Settings that were not proposed but that help are added; usual ones that do not help are added
    as rejected, with the numbers.
    """
    bench, fidelity = set_up(case)
    if bench is None:
        return Proof(proposals, fidelity)
    if not (bench.is_usable and _has_trouble(bench.recorded)):
        return Proof(proposals, fidelity, _notes(bench))
    settings = _settings_to_try(case)
    asked = [(r, Attempt(WhatIf(conf=conf))) for r, conf in settings]
    edited = [
        (i, attempt)
        for i, p in enumerate(proposals)
        for attempt in p.remedy.attempts(case, p, bench.recorded)
    ]
    attempts = [*(w for _, w in asked), *(w for _, w in edited)]
    tried = [
        None if result is None else Tried(attempt, result)
        for attempt, result in zip(attempts, bench.run(attempts, progress), strict=True)
    ]
    families: dict[SettingRemedy, list[Tried]] = {}
    for (remedy, _), one in zip(asked, tried[: len(asked)], strict=True):
        if one is not None:
            families.setdefault(remedy, []).append(one)
    by_proposal: dict[int, list[Tried]] = {}
    for (i, _), one in zip(edited, tried[len(asked) :], strict=True):
        if one is not None:
            by_proposal.setdefault(i, []).append(one)
    tested = [
        _tested(bench, p, by_proposal[i]) if i in by_proposal else p
        for i, p in enumerate(proposals)
    ]
    return Proof([*_with_settings(case, bench, tested, families)], fidelity, _notes(bench))


def _has_trouble(recorded: ReplayResult) -> bool:
    return not recorded.fits or recorded.retries > 0


def _settings_to_try(case: JudgedCase) -> list[tuple[SettingRemedy, str]]:
    """Return each setting string once, with the remedy that it belongs to."""
    present = case.settings.conf if case.settings is not None else ""
    found: dict[str, SettingRemedy] = {}
    for remedy in REMEDIES:
        if isinstance(remedy, SettingRemedy):
            for conf in remedy.confs(case):
                if not is_same_conf(conf, present):
                    found.setdefault(conf, remedy)
    return [(remedy, conf) for conf, remedy in found.items()]


def helps(recorded: ReplayResult, result: ReplayResult) -> bool:
    """Return whether a what-if is better than the recorded run, by what hurts.

    After a failure: every request is served. Without one: it still is, with fewer retries.
    """
    if not (result.fits and result.is_conclusive):
        return False
    return not recorded.fits or result.retries < recorded.retries


def _best(bench: Bench, tried: Sequence[Tried]) -> Tried:
    def badness(one: Tried) -> tuple[bool, int, int, int]:
        r = one.result
        return not helps(bench.recorded, r), -(r.margin_bytes or 0), r.retries, r.driver_calls

    return min(tried, key=badness)


def _tested(bench: Bench, proposal: Proposal, tried: Sequence[Tried]) -> Proposal:
    """Return a proposal with the best outcome of its what-ifs."""
    best = _best(bench, tried)
    if best.attempt.caveat:
        proposal = proposal.with_caveat(best.attempt.caveat)
    predicted, r = bench.predicted(best.result), proposal.recommendation
    if helps(bench.recorded, best.result):
        confidence = Confidence.PROVEN if bench.is_proof else r.confidence
        proposal = replace(proposal, recommendation=replace(r, confidence=confidence))
        return proposal.with_prediction(predicted)
    if not bench.is_exact and not proposal.is_rejected:
        return _doubted(bench, proposal, best.result)
    why = f"Replayed: {outcome(bench.recorded, best.result)}."
    if proposal.is_rejected:
        why = f"{r.why} {why}"
    changed = replace(proposal, recommendation=replace(r, why=why), is_rejected=bench.is_exact)
    return changed.with_prediction(predicted)


def _with_settings(
    case: JudgedCase,
    bench: Bench,
    proposals: Sequence[Proposal],
    families: dict[SettingRemedy, list[Tried]],
) -> Iterator[Proposal]:
    """Yield the proposals, each setting with its best value, then what the replay adds."""
    proposed = set()
    for proposal in proposals:
        remedy, judged = proposal.remedy, proposal
        if isinstance(remedy, SettingRemedy) and remedy in families:
            proposed.add(remedy)
            judged = _judged(case, bench, remedy, families[remedy], proposal) or proposal
        yield judged
    for remedy, tried in families.items():
        if remedy not in proposed and (added := _judged(case, bench, remedy, tried, None)):
            yield added


def _judged(
    case: JudgedCase,
    bench: Bench,
    remedy: SettingRemedy,
    tried: Sequence[Tried],
    proposal: Proposal | None,
) -> Proposal | None:
    """Return the proposal of a setting by its best value; None for nothing to say."""
    best = _best(bench, tried)
    conf, result = best.attempt.what_if.conf or "", best.result
    setting = case.assignment(conf)
    if not result.is_conclusive:
        if proposal is None and isinstance(remedy, DefaultSettings) and not bench.recorded.fits:
            # Only a run that shows the failure can be tried again.
            proposal = remedy.untested(case)
        if proposal is None:
            return None
        reason = result.note.removeprefix("not known: ")
        return proposal.with_caveat(f"A replay cannot answer it: {reason}.")
    is_better = helps(bench.recorded, result)
    if is_better and case.cause is not Cause.LEAK:
        return _accepted(bench, remedy, best, proposal, setting)
    if not bench.is_exact and proposal is not None and not proposal.is_rejected:
        return _doubted(bench, proposal, result)
    why = f"Replayed{_variants(remedy, tried)}: {outcome(bench.recorded, result)}."
    if proposal is not None and proposal.is_rejected and not result.fits:
        why = f"{proposal.recommendation.why} {why}"
    if is_better:
        why = f"It only postpones the failure, since memory grows step by step. {why}"
    return remedy.rejection(
        why,
        Confidence.PROVEN if bench.is_exact else Confidence.LIKELY,
        title=proposal.recommendation.title if proposal else "",
        setting=setting,
        predicted=bench.predicted(result),
    )


def _value_of(remedy: SettingRemedy, one: Tried) -> str:
    """Return the value of the remedy's key in what was tried."""
    conf = one.attempt.what_if.conf or ""
    return conf.rpartition(f"{remedy.key}:")[2] if remedy.key else ""


def _variants(remedy: SettingRemedy, tried: Sequence[Tried]) -> str:
    if len(tried) < 2:
        return ""
    return f" with {', '.join(_value_of(remedy, one) for one in tried)}, at best"


def _accepted(
    bench: Bench,
    remedy: SettingRemedy,
    best: Tried,
    proposal: Proposal | None,
    setting: str,
) -> Proposal:
    confidence = Confidence.PROVEN if bench.is_proof else Confidence.LIKELY
    predicted = bench.predicted(best.result)
    if proposal is not None and not proposal.is_rejected:
        r = replace(proposal.recommendation, confidence=confidence)
        if r.setting != setting:  # the replay found a better value than reasoning alone
            value = f"{remedy.key}:{_value_of(remedy, best)}"
            why = f"Of the values replayed, {value} leaves the most room."
            r = replace(r, title=remedy.title, setting=setting, why=why)
        return replace(proposal, recommendation=r).with_prediction(predicted)
    return remedy.proposal(
        weight=CURES if not bench.recorded.fits else HELPS,
        confidence=confidence,
        setting=setting,
        why=f"Replayed: {outcome(bench.recorded, best.result)}.",
        cost="One environment variable.",
        predicted=predicted,
        verify="num_alloc_retries and num_ooms of memory_stats() stay at 0.",
    )


def _doubted(bench: Bench, proposal: Proposal, result: ReplayResult) -> Proposal:
    """Return a proposal that an estimate speaks against; only an exact replay may reject it."""
    doubt = f"An estimate says that it may not be enough: {outcome(bench.recorded, result)}."
    return proposal.with_caveat(doubt)


def outcome(recorded: ReplayResult, result: ReplayResult) -> str:
    """Return what a replay did against the recorded run, as half a sentence."""
    reserved = f"peak reserved {format_size(result.peak_reserved_bytes)}"
    retries = plural(result.retries, "retry", "retries")
    if not result.fits:
        size = f" of {format_size(result.oom_bytes)}" if result.oom_bytes else ""
        where = "" if result.oom_event is None else f" at event {format_count(result.oom_event)}"
        still = "still fails" if not recorded.fits else "fails, which it did not as recorded"
        return f"the request{size}{where} {still}, {reserved}"
    if not recorded.fits:
        return f"every request is served, {reserved}, {retries}"
    return f"{retries} against {format_count(recorded.retries)} as recorded, {reserved}"


def _notes(bench: Bench) -> tuple[str, ...]:
    recorded, bound = bench.recorded, bench.simulation.lower_bound_bytes
    left = recorded.peak_reserved_bytes - bound
    if bound <= 0 or left <= 0:
        return tuple(bench.simulation.notes)
    note = (
        f"No allocator can reserve less than the {format_size(bound)} that were active at the "
        f"peak; the run reserved {format_size(recorded.peak_reserved_bytes)}, so settings can save "
        f"at most {format_size(left)}."
    )
    return (note, *bench.simulation.notes)
