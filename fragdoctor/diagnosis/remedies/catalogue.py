"""All remedies, and the order in which their proposals are given.

Each remedy is tried on the trace and judges the outcome, which turns its proposals into tested
ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from types import ModuleType
from typing import Final

from msgspec.structs import replace

from fragdoctor.diagnosis.bench import Attempt, Bench, Effect
from fragdoctor.diagnosis.remedies import (
    allocator_settings,
    attention,
    capacity,
    fragmentation,
    from_traceback,
    host_memory,
    leaks,
    outside_pytorch,
    pairs,
    pools,
    serving,
    told_contrast,
    training,
    weights,
)
from fragdoctor.diagnosis.remedies.allocator_settings import SettingRemedy
from fragdoctor.diagnosis.remedies.capacity import SavingRemedy
from fragdoctor.diagnosis.remedies.remedy import JudgedCase, Proposal, Remedy, Weight, helps
from fragdoctor.diagnosis.remedies.training import CombinedSavings
from fragdoctor.future.search import LAST_RESORT, steps_won
from fragdoctor.model.diagnosis import SHORT_OF_MEMORY, Cause, Recommendation
from fragdoctor.model.finding import Confidence
from fragdoctor.model.simulation import Prospect
from fragdoctor.units import format_size

_FILES: Final = (
    told_contrast,
    allocator_settings,
    weights,
    attention,
    pairs,
    training,
    capacity,
    leaks,
    fragmentation,
    pools,
    from_traceback,
    host_memory,
    serving,
    outside_pytorch,
)


def _remedies_of(file: ModuleType) -> Iterator[Remedy]:
    """Yield the remedies of a file in the order of their definitions; a class is one of them."""
    for one in vars(file).values():
        if isinstance(one, Remedy):
            yield one
        elif isinstance(one, type) and issubclass(one, Remedy) and "code" in vars(one):
            yield one()


REMEDIES: Final = tuple(remedy for file in _FILES for remedy in _remedies_of(file))
SETTINGS: Final = tuple(remedy for remedy in REMEDIES if isinstance(remedy, SettingRemedy))

REMOVABLE: Final = (Cause.OTHER_PROCESS, Cause.MEMORY_LIMIT, Cause.PRIVATE_POOLS)
"""Causes that a replay cannot remove, but the user can: memory that others hold, the user's own
limit, and pools that each keep their own cache."""

KNOWN_CURE: Final = 1
"""Place of what removes these causes: after known cures, before cures that are uncertain."""

UNTRIED: Final = 100
"""Place of what no replay shows to fit: after everything that a replay does."""

CONFIDENCE_ORDER: Final = {Confidence.PROVEN: 0, Confidence.LIKELY: 1, Confidence.POSSIBLE: 2}


def proposals(case: JudgedCase) -> list[Proposal]:
    """Return everything that the remedies propose or reject, in no particular order."""
    r, why = case.failed_request, case.verdict.summary
    foreign = SETTINGS if r is not None and r.pool_is_unprinted else ()  # cudaMallocAsync has none
    remedies = (remedy for remedy in REMEDIES if remedy not in foreign)
    found = (proposal for remedy in remedies for proposal in remedy.propose(case))
    return [p if p.recommendation.why or p.is_rejected else p.saying(why=why) for p in found]


def rank(
    all_proposals: Iterable[Proposal], cause: Cause
) -> tuple[tuple[Recommendation, ...], tuple[Recommendation, ...]]:
    """Return the recommendations by rank from 1, and the rejected ones with rank 0.

    What a replay shows to fit comes first, led by what cures the whole run. Further order is by
    what removes the cause, then by the bytes that it frees, then by confidence, and at last by the
    order of ``REMEDIES``.
    """
    kept: list[Proposal] = []
    rejected: list[Recommendation] = []
    for proposal in all_proposals:
        if proposal.is_rejected:
            rejected.append(replace(proposal.recommendation, rank=0))
        else:
            kept.append(proposal)
    kept.sort(key=lambda p: _order(p, cause))
    # Two remedies may come to the same change: what was said, untested, is not said again.
    said: set[str] = set()
    once: list[Recommendation] = []
    for r in (p.recommendation for p in kept):
        if r.setting or r.predicted.fits is not None or r.title not in said:
            once.append(r)
        said.add(r.title)
    ranked = tuple(replace(r, rank=i) for i, r in enumerate(once, start=1))
    return ranked, tuple(sorted(rejected, key=lambda r: r.code))


def _order(proposal: Proposal, cause: Cause) -> tuple[int, ...]:
    r = proposal.recommendation
    p = r.predicted
    is_setting = bool(r.setting)
    found = Prospect.of(p.outlook)
    fails = found in (Prospect.UNLIKELY, Prospect.FAILS) or p.fits is False
    is_shown_to_fit = p.method == "replay" and p.fits is True
    # A setting does not end a leak, however much it gains.
    is_cure = is_shown_to_fit and not (cause is Cause.LEAK and is_setting)
    tier = _tier(found, is_setting=is_setting, cause=cause)
    if (
        cause in REMOVABLE
        and not is_setting
        and proposal.weight >= Weight.CURES
        and p.fits is not False
    ):
        is_cure, tier = True, min(tier, KNOWN_CURE)
    how_far: tuple[int, ...] = (UNTRIED, *(0,) * 5)
    if is_cure:
        how_far = (
            tier,
            int(proposal.remedy.burden),
            -steps_won(p.outlook),
            -p.room_bytes,
            -(r.saves_bytes or 0),
            p.driver_calls or 0,
        )
    # What is known or likely to fail anyway comes after what was not tried.
    return (
        0 if is_cure and not fails else 1,
        int(fails),
        *how_far,
        -proposal.weight,
        -(r.saves_bytes or 0),
        -steps_won(p.outlook),
        CONFIDENCE_ORDER[r.confidence],
    )


def _tier(found: Prospect, *, is_setting: bool, cause: Cause) -> int:
    """Return the place of what fits, by how the run goes on.

    Holes between blocks are the allocator's own problem: a setting that serves the request comes
    before a change to the program, even if it is open how the run goes on. If memory is short, a
    setting wins back only the holes, so a change to the program comes first.
    """
    if found > Prospect.OPEN:
        return 10 + int(found)
    is_late = is_setting and found is Prospect.OPEN and cause in SHORT_OF_MEMORY
    if cause is Cause.FRAGMENTATION:
        is_late = not is_setting
    return int(found) + (int(Prospect.UNLIKELY) if is_late else 0)


def prove(
    case: JudgedCase, proposals: Sequence[Proposal]
) -> tuple[Sequence[Proposal], tuple[str, ...]]:
    """Return the proposals with the results of replaying the trace, and notes on the replay.

    Settings that help but were not proposed are added; usual settings that do not help are added
    as rejected, with the numbers.
    """
    bench = case.bench
    if bench is None:
        return proposals, ()
    if not bench.is_usable:
        return proposals, _notes(bench)
    proposed = {p.remedy for p in proposals}
    others = [remedy for remedy in SETTINGS if remedy not in proposed]
    last_resort = [remedy.untold for remedy in others if remedy.key == LAST_RESORT]
    tested: list[Proposal] = []
    is_helped = False
    for batch in (
        [*proposals, *(remedy.untold for remedy in others if remedy.key != LAST_RESORT)],
        last_resort,
    ):
        if is_helped:
            break
        tried = [_attempts(case, bench, proposal) for proposal in batch]
        found = _outcomes(bench, tried)
        settings = (o.result for some in found for o in some if o.attempt.edit is None)
        is_helped = any(helps(bench.recorded, result) for result in settings)
        for proposal, some, of_it in zip(batch, tried, found, strict=True):
            remedy, judged = proposal.remedy, None
            if of_it:
                judged = remedy.judged(case, bench, proposal, of_it)
            # Otherwise the trace does not show what a saving change would act on.
            elif not some or not isinstance(remedy, SavingRemedy) or remedy.is_usual:
                judged = proposal
            tested += [judged] if judged is not None and not judged.is_untold else []
    tested += CombinedSavings().together(case, bench, tested)
    return tested, _notes(bench)


def _attempts(case: JudgedCase, bench: Bench, proposal: Proposal) -> Sequence[Attempt]:
    """Return how to try a proposal; without trouble there is only the peak, which may be lower."""
    if isinstance(proposal.remedy, SettingRemedy):
        return proposal.remedy.attempts(case) if bench.has_trouble else ()
    is_tried = bench.has_trouble or isinstance(proposal.remedy, SavingRemedy)
    return proposal.attempts if is_tried else ()


def _outcomes(bench: Bench, tried: Sequence[Sequence[Attempt]]) -> list[list[Effect]]:
    outcomes = iter(bench.run([one for some in tried for one in some]))
    return [[o for o in (next(outcomes) for _ in some) if o is not None] for some in tried]


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
