"""From proposals to tested proposals: what the replay says of each, and what it adds.

The order of the advice follows the replay: what serves every request first, then by margin; what
asks the user to compute less (smaller batches) after what does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fragdoctor.diagnosis.proof.candidates import DEFAULTS, Candidate, candidates
from fragdoctor.diagnosis.proof.evidence import Bench, Progress, Trial, set_up
from fragdoctor.diagnosis.proof.trials import edits_for
from fragdoctor.diagnosis.remedies.plan import (
    CURES,
    HELPS,
    MAY_HELP,
    Plan,
    Proposal,
    propose,
    reject,
)
from fragdoctor.diagnosis.remedies.ranking import with_replay
from fragdoctor.model.diagnosis import Cause, FidelityReport
from fragdoctor.model.finding import Confidence
from fragdoctor.model.simulation import ReplayResult
from fragdoctor.trace.whatif import WhatIf
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
    if not (bench.is_usable and _has_trouble(bench.recorded)):
        return Proof(proposals, fidelity, _notes(bench))
    asked = candidates(plan)
    trials, owners = _trials(plan, bench, proposals, asked)
    results = bench.run(trials, progress)
    tried = [(c, r) for c, r in zip(asked, results[: len(asked)], strict=True) if r is not None]
    by_proposal: dict[int, list[ReplayResult]] = {}
    for owner, result in zip(owners, results[len(asked) :], strict=True):
        if result is not None:
            by_proposal.setdefault(owner, []).append(result)
    proven = [
        _proven(bench, p, by_proposal[i]) if i in by_proposal else p
        for i, p in enumerate(proposals)
    ]
    return Proof([*_with_settings(plan, bench, proven, tried)], fidelity, _notes(bench))


def _has_trouble(recorded: ReplayResult) -> bool:
    return not recorded.fits or recorded.retries > 0


def _trials(
    plan: Plan, bench: Bench, proposals: Sequence[Proposal], asked: Sequence[Candidate]
) -> tuple[list[Trial], list[int]]:
    """Return the settings to try, then the edits with the index of the proposal each serves."""
    trials = [Trial(WhatIf(conf=c.conf)) for c in asked]
    owners: list[int] = []
    for i, proposal in enumerate(proposals):
        for edit in edits_for(plan, proposal, bench.recorded.oom_event):
            trials.append(Trial(WhatIf(edit=edit.name), edit))
            owners.append(i)
        if proposal.recommendation.code == "raise-memory-limit":
            refusal = plan.refusal
            if refusal is not None and refusal.free_bytes is not None and refusal.reserved_bytes:
                whole = refusal.reserved_bytes + refusal.free_bytes
                trials.append(Trial(WhatIf(capacity_bytes=whole, edit="without the limit")))
                owners.append(i)
    return trials, owners


def helps(recorded: ReplayResult, result: ReplayResult) -> bool:
    """Tell whether a what-if is better than the recorded run, by what hurts.

    After a failure: every request is served. Without one: it still is, with fewer retries.
    """
    if not (result.fits and result.is_conclusive):
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
    if r.code == "raise-memory-limit":
        r = replace(r, caveats=(*r.caveats, "The prediction is for no limit at all."))
        proposal = replace(proposal, recommendation=r)
    if helps(bench.recorded, best):
        confidence = Confidence.PROVEN if bench.is_proof else r.confidence
        return with_replay(
            replace(proposal, recommendation=replace(r, confidence=confidence)), predicted
        )
    said = f"Replayed: {outcome(bench.recorded, best)}."
    if not bench.is_exact and not proposal.is_rejected:
        return _doubted(bench, proposal, best)
    why = f"{r.why} {said}" if proposal.is_rejected else said
    changed = replace(proposal, recommendation=replace(r, why=why), is_rejected=bench.is_exact)
    return with_replay(changed, predicted)


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
        judged = proposal if family is None else _family(plan, bench, family, proposal)
        if judged is not None:
            yield judged
    for family in families.values():
        if (added := _family(plan, bench, family, None)) is not None:
            yield added


def _family(
    plan: Plan,
    bench: Bench,
    family: Sequence[tuple[Candidate, ReplayResult]],
    proposal: Proposal | None,
) -> Proposal | None:
    """Return the proposal of a family of settings, by its best member; None for nothing to say."""
    candidate, result = min(family, key=lambda pair: _quality(bench.recorded, pair[1]))
    setting = plan.variable(candidate.conf)
    if not result.is_conclusive:
        if proposal is None and candidate.code == DEFAULTS[0]:
            proposal = _untested_defaults(bench, setting)
        return None if proposal is None else _open(proposal, result)
    if helps(bench.recorded, result) and plan.cause is not Cause.LEAK:
        return _accepted(bench, candidate, result, proposal, setting)
    said = f"Replayed{_variants(family)}: {outcome(bench.recorded, result)}."
    if not bench.is_exact and proposal is not None and not proposal.is_rejected:
        return _doubted(bench, proposal, result)
    if proposal is not None and proposal.is_rejected and not result.fits:
        said = f"{proposal.recommendation.why} {said}"
    if helps(bench.recorded, result):
        said = f"It only postpones the failure, since memory grows step by step. {said}"
    return reject(
        candidate.code,
        proposal.recommendation.title if proposal else candidate.title,
        confidence=Confidence.PROVEN if bench.is_exact else Confidence.LIKELY,
        setting=setting,
        why=said,
        predicted=bench.predicted(result),
    )


def _untested_defaults(bench: Bench, setting: str) -> Proposal | None:
    """Return the advice to try without the settings, where a run with them failed.

    Only a run that shows the failure can be tried again; the trace does not say how it ends.
    """
    if bench.recorded.fits:
        return None
    code, title = DEFAULTS
    return propose(
        code,
        title,
        weight=MAY_HELP,
        confidence=Confidence.POSSIBLE,
        setting=setting,
        change="run once without the allocator settings and compare",
        why="The failure came with allocator settings in force; settings that help one program "
        "can harm another.",
        cost="One run.",
        verify="num_alloc_retries and num_ooms of memory_stats() stay at 0.",
    )


def _doubted(bench: Bench, proposal: Proposal, result: ReplayResult) -> Proposal:
    """Return a proposal that an estimate speaks against; only an exact replay may reject it."""
    r = proposal.recommendation
    doubt = f"An estimate says that it may not be enough: {outcome(bench.recorded, result)}."
    return replace(proposal, recommendation=replace(r, caveats=(*r.caveats, doubt)))


def _open(proposal: Proposal, result: ReplayResult) -> Proposal:
    """Return a proposal that the replay cannot judge, with the reason."""
    r = proposal.recommendation
    reason = result.note.removeprefix("not known: ")
    return replace(
        proposal,
        recommendation=replace(r, caveats=(*r.caveats, f"Replay cannot tell: {reason}.")),
    )


def _variants(family: Sequence[tuple[Candidate, ReplayResult]]) -> str:
    values = [c.added.split(":", 1)[-1] for c, _ in family]
    return f" with {', '.join(values)}, at best" if len(values) > 1 else ""


def _accepted(
    bench: Bench,
    candidate: Candidate,
    result: ReplayResult,
    proposal: Proposal | None,
    setting: str,
) -> Proposal:
    confidence = Confidence.PROVEN if bench.is_proof else Confidence.LIKELY
    predicted = bench.predicted(result)
    if proposal is not None and not proposal.is_rejected:
        r = replace(proposal.recommendation, confidence=confidence)
        if r.setting != setting:  # the replay found a better value than reasoning alone
            why = f"Of the values replayed, {candidate.added} leaves the most room."
            r = replace(r, title=candidate.title, setting=setting, why=why)
        return with_replay(replace(proposal, recommendation=r), predicted)
    return propose(
        candidate.code,
        candidate.title,
        weight=CURES if not bench.recorded.fits else HELPS,
        confidence=confidence,
        setting=setting,
        why=f"Replayed: {outcome(bench.recorded, result)}.",
        cost=SETTING_COST,
        predicted=predicted,
        verify="num_alloc_retries and num_ooms of memory_stats() stay at 0.",
    )


def outcome(recorded: ReplayResult, result: ReplayResult) -> str:
    """Return what a replay did against the recorded run, as half a sentence."""
    reserved = f"peak reserved {format_size(result.peak_reserved_bytes)}"
    retries = f"{format_count(result.retries)} {'retry' if result.retries == 1 else 'retries'}"
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
        f"peak; the run reserved {format_size(recorded.peak_reserved_bytes)}, so settings can win "
        f"at most {format_size(left)}."
    )
    return (note, *bench.simulation.notes)
