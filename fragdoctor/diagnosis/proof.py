"""From proposals to tested proposals: each remedy is tried on the trace and judges the outcome."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fragdoctor.diagnosis.bench import Bench, Outcome, Progress
from fragdoctor.diagnosis.remedies.registry import REMEDIES
from fragdoctor.diagnosis.remedies.remedy import JudgedCase, Proposal, Remedy
from fragdoctor.diagnosis.remedies.savings import SavingRemedy, first_enough, saved_bytes
from fragdoctor.diagnosis.remedies.training import CombinedSavings
from fragdoctor.frozen import frozen
from fragdoctor.model.diagnosis import Predicted
from fragdoctor.units import format_size

MIN_COMBINED: Final = 2
WORTH_COMBINING: Final = 1.2
"""What is saved together is worth a word if it is a fifth more than the best alone."""


@frozen
class Proof:
    """Tested proposals, and what the replay says as a whole."""

    proposals: Sequence[Proposal]
    notes: Sequence[str] = ()


def prove(
    case: JudgedCase, proposals: Sequence[Proposal], progress: Progress | None = None
) -> Proof:
    """Return the proposals with what replaying the trace under each of them gives.

    Settings that were not proposed but that help are added; usual ones that do not help are added
    as rejected, with the numbers.
    """
    bench = case.bench
    if bench is None:
        return Proof(proposals)
    if not bench.is_usable:
        return Proof(proposals, _notes(bench))
    entries: list[tuple[Remedy, Proposal | None]] = [(p.remedy, p) for p in proposals]
    if bench.has_trouble:
        proposed = {p.remedy for p in proposals}
        entries += [(remedy, None) for remedy in REMEDIES if remedy not in proposed]
    attempts = [
        # A run without trouble has nothing to cure, but its peak may still be lowered.
        remedy.attempts(case, bench, proposal)
        if bench.has_trouble or isinstance(remedy, SavingRemedy)
        else []
        for remedy, proposal in entries
    ]
    outcomes = iter(bench.run([one for some in attempts for one in some], progress))
    tested: list[Proposal] = []
    for (remedy, proposal), some in zip(entries, attempts, strict=True):
        found = [o for o in (next(outcomes) for _ in some) if o is not None]
        judged = proposal
        if found:
            judged = remedy.judged(case, bench, proposal, found)
        elif some and isinstance(remedy, SavingRemedy) and not remedy.is_usual:
            judged = None  # the trace does not show what it would act on
        if judged is not None:
            tested.append(judged)
    tested += _together(case, bench, tested)
    return Proof(tested, _notes(bench))


def _together(case: JudgedCase, bench: Bench, tested: Sequence[Proposal]) -> list[Proposal]:
    """Return the smallest combination of savings that is enough, or all of them together."""
    remedy = next(r for r in REMEDIES if isinstance(r, CombinedSavings))
    saving = [
        p
        for p in tested
        if isinstance(p.remedy, SavingRemedy) and p.recommendation.saves_bytes and not p.is_rejected
    ]
    is_enough = any(_is_enough(p.recommendation.predicted) for p in saving)
    chosen, attempts = remedy.of(case, saving)
    if len(chosen) < MIN_COMBINED or (is_enough and not bench.recorded.fits):
        return []
    outcomes: list[Outcome] = [o for o in bench.run(attempts) if o is not None]
    if not outcomes:
        return []
    enough = None if bench.recorded.fits else first_enough(bench, outcomes)
    best = enough or bench.looked_on(outcomes[-1])
    alone = max(p.recommendation.saves_bytes or 0 for p in saving)
    if enough is None and saved_bytes(bench, best) < WORTH_COMBINING * alone:
        return []
    return [remedy.made_of(case, bench, chosen, best)]


def _is_enough(predicted: Predicted) -> bool:
    """Return whether a change serves the recorded requests and is not known to fail later."""
    outlook = predicted.outlook
    return bool(predicted.fits) and not (outlook is not None and outlook.fails)


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
