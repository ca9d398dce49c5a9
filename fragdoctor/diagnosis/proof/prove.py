"""From proposals to tested proposals: what the replay says of each, and what it adds.

The order of the advice follows the replay: what serves every request first, then by margin; what
asks the user to compute less (smaller batches) after what does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fragdoctor.allocator.whatif import Scenario
from fragdoctor.diagnosis.proof.candidates import Candidate, candidates
from fragdoctor.diagnosis.proof.evidence import Bench, Progress, Trial, set_up
from fragdoctor.diagnosis.proof.trials import edits_for
from fragdoctor.diagnosis.remedies.plan import CURES, HELPS, Plan, Proposal, propose, reject
from fragdoctor.diagnosis.remedies.ranking import tested
from fragdoctor.model.diagnosis import FidelityReport
from fragdoctor.model.finding import Confidence
from fragdoctor.model.simulation import ReplayResult
from fragdoctor.units import format_count, format_size

SETTING_COST = "One environment variable."


@dataclass(frozen=True, slots=True)
class Proof:
    """Tested proposals, the fidelity of the replay, and what it says as a whole."""

    proposals: Sequence[Proposal]
    fidelity: FidelityReport
    notes: Sequence[str] = ()


def prove(plan: Plan, proposals: Sequence[Proposal], progress: Progress | None = None) -> Proof:
    """Return the proposals with what replaying the trace under each of them gives.

    Settings that the proposals do not name but that help are added; popular ones that do not help
    are added as rejected, with the numbers.
    """
    bench, fidelity = set_up(plan)
    if bench is None:
        return Proof(proposals, fidelity)
    if not _has_trouble(bench.recorded):
        return Proof(proposals, fidelity, _notes(bench))
    asked = candidates(plan)
    trials, owners = _trials(plan, bench, proposals, asked)
    results = bench.run(trials, progress)
    by_conf = {
        c.conf: (c, r)
        for c, r in zip(asked, results[: len(asked)], strict=True)
        if r is not None
    }
    by_proposal: dict[int, list[ReplayResult]] = {}
    for owner, result in zip(owners, results[len(asked) :], strict=True):
        if result is not None:
            by_proposal.setdefault(owner, []).append(result)
    proven = [
        _proven(bench, p, by_proposal[i]) if i in by_proposal else p
        for i, p in enumerate(proposals)
    ]
    return Proof(
        [*_with_settings(plan, bench, proven, list(by_conf.values()))], fidelity, _notes(bench)
    )


def _has_trouble(recorded: ReplayResult) -> bool:
    return not recorded.fits or recorded.retries > 0


def _trials(
    plan: Plan, bench: Bench, proposals: Sequence[Proposal], asked: Sequence[Candidate]
) -> tuple[list[Trial], list[int]]:
    """Return the settings to try, then the edits with the index of the proposal each serves."""
    trials = [Trial(Scenario(conf=c.conf)) for c in asked]
    owners: list[int] = []
    for i, proposal in enumerate(proposals):
        for edit in edits_for(plan, proposal, bench.recorded.oom_event):
            trials.append(Trial(Scenario(edit=edit.name), edit))
            owners.append(i)
        if proposal.recommendation.code == "raise-memory-limit":
            refusal = plan.refusal
            if refusal is not None and refusal.free_bytes is not None and refusal.reserved_bytes:
                whole = refusal.reserved_bytes + refusal.free_bytes
                trials.append(Trial(Scenario(capacity_bytes=whole, edit="without the limit")))
                owners.append(i)
    return trials, owners


def helps(recorded: ReplayResult, result: ReplayResult) -> bool:
    """Tell whether a what-if is better than the recorded run, by what hurts.

    After a failure: every request is served. Without one: it still is, with fewer retries.
    """
    if not result.fits:
        return False
    return not recorded.fits or result.retries < recorded.retries


def _quality(recorded: ReplayResult, result: ReplayResult) -> tuple[bool, int, int, int]:
    """Order results: better ones first."""
    return (
        not helps(recorded, result),
        -(result.margin_bytes or 0),
        result.retries,
        result.driver_calls,
    )


def _proven(bench: Bench, proposal: Proposal, results: Sequence[ReplayResult]) -> Proposal:
    best = min(results, key=lambda r: _quality(bench.recorded, r))
    predicted = bench.predicted(best)
    r = proposal.recommendation
    is_sure = bench.is_exact and bench.simulation.fidelity.share == 1.0
    if helps(bench.recorded, best):
        confidence = Confidence.PROVEN if is_sure else r.confidence
        return tested(
            replace(proposal, recommendation=replace(r, confidence=confidence)), predicted
        )
    why = f"{r.why} {outcome(best)}" if proposal.is_rejected else outcome(best)
    changed = replace(
        proposal, recommendation=replace(r, why=why), is_rejected=bench.is_exact
    )
    return tested(changed, predicted)


def _with_settings(
    plan: Plan,
    bench: Bench,
    proposals: Sequence[Proposal],
    tried: Sequence[tuple[Candidate, ReplayResult]],
) -> Iterator[Proposal]:
    """Yield the proposals with the best of each family of settings in its place."""
    families: dict[str, list[tuple[Candidate, ReplayResult]]] = {}
    for candidate, result in tried:
        families.setdefault(candidate.code, []).append((candidate, result))
    for proposal in proposals:
        family = families.pop(proposal.recommendation.code, None)
        yield proposal if family is None else _family(plan, bench, family, proposal)
    for family in families.values():
        yield _family(plan, bench, family, None)


def _family(
    plan: Plan,
    bench: Bench,
    family: Sequence[tuple[Candidate, ReplayResult]],
    proposal: Proposal | None,
) -> Proposal:
    """Return the proposal of a family of settings, by its best member."""
    candidate, result = min(family, key=lambda pair: _quality(bench.recorded, pair[1]))
    setting = plan.variable(candidate.conf)
    if helps(bench.recorded, result):
        return _accepted(bench, candidate, result, proposal, setting)
    values = ", ".join(c.added.split(":", 1)[-1] for c, _ in family)
    tried = f"Tried with {values}: " if len(family) > 1 else ""
    text = outcome(result) if not result.fits else _no_gain(bench.recorded, result)
    text = tried + text[0].lower() + text[1:] if tried else text
    why = f"{proposal.recommendation.why} {text}" if proposal and proposal.is_rejected else text
    rejected = reject(
        candidate.code,
        proposal.recommendation.title if proposal else candidate.title,
        confidence=Confidence.PROVEN if bench.is_exact else Confidence.LIKELY,
        setting=setting,
        why=why,
        predicted=bench.predicted(result),
    )
    return rejected


def _accepted(
    bench: Bench,
    candidate: Candidate,
    result: ReplayResult,
    proposal: Proposal | None,
    setting: str,
) -> Proposal:
    sure = bench.is_exact and bench.simulation.fidelity.share == 1.0
    confidence = Confidence.PROVEN if sure else Confidence.LIKELY
    predicted = bench.predicted(result)
    if proposal is not None and not proposal.is_rejected:
        r = replace(proposal.recommendation, setting=setting, confidence=confidence)
        return tested(replace(proposal, recommendation=r), predicted)
    recorded = bench.recorded
    gain = (
        "Replayed, every request is served."
        if not recorded.fits
        else f"Replayed, {format_count(result.retries)} retries in place of "
        f"{format_count(recorded.retries)}."
    )
    return propose(
        candidate.code,
        candidate.title,
        weight=CURES if not recorded.fits else HELPS,
        confidence=confidence,
        setting=setting,
        why=gain,
        cost=SETTING_COST,
        predicted=predicted,
        verify="num_alloc_retries and num_ooms of memory_stats() stay at 0.",
    )


def outcome(result: ReplayResult) -> str:
    """Return what a replay did, in one sentence."""
    reserved = format_size(result.peak_reserved_bytes)
    retries = format_count(result.retries)
    if result.fits:
        return f"Replayed, it fits: peak reserved {reserved}, {retries} retries."
    failed = f" of {format_size(result.oom_bytes)}" if result.oom_bytes else ""
    where = "" if result.oom_event is None else f" at event {format_count(result.oom_event)}"
    return f"Replayed, the request{failed}{where} still fails: peak reserved {reserved}."


def _no_gain(recorded: ReplayResult, result: ReplayResult) -> str:
    return (
        f"Replayed, nothing is gained: {format_count(result.retries)} retries against "
        f"{format_count(recorded.retries)} as recorded, peak reserved "
        f"{format_size(result.peak_reserved_bytes)} against "
        f"{format_size(recorded.peak_reserved_bytes)}."
    )


def _notes(bench: Bench) -> tuple[str, ...]:
    recorded, bound = bench.recorded, bench.simulation.lower_bound_bytes
    left = recorded.peak_reserved_bytes - bound
    if bound <= 0 or left <= 0:
        return tuple(bench.simulation.notes)
    return (
        f"No allocator can reserve less than the {format_size(bound)} that were active at the "
        f"peak; the run reserved {format_size(recorded.peak_reserved_bytes)}, so settings can win "
        f"at most {format_size(left)}.",
        *bench.simulation.notes,
    )
