"""The verdict in the light of the whole step: one failing request is not what a run needs."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from fragdoctor.analysis.result import DeviceAnalysis
from fragdoctor.diagnosis.bench import Bench
from fragdoctor.model.diagnosis import Cause, Verdict
from fragdoctor.model.finding import Confidence
from fragdoctor.model.simulation import Outlook, OutlookBasis, OutlookState, ReplayResult
from fragdoctor.rules.capacity.transient_peak import find_transient
from fragdoctor.rules.growth.growing_line import gathered_text
from fragdoctor.rules.rule import Context
from fragdoctor.units import format_size, plural

WORTH_SAYING: Final = 1.05
"""What the step lacks is said if it is so many times what the failing request lacks."""

MAY_BE_HOLES: Final = (Cause.CAPACITY, Cause.MEMORY_LIMIT, Cause.TRANSIENT_PEAK)
"""Causes that thresholds give where memory was nearly full."""

MIN_LEAK_STEPS: Final = 3
"""Whole steps that must show a growth: what only one keeps may be made once."""

MIN_GROWN_STEPS: Final = 100
ROUNDED_UP: Final = 1.1
"""The growth that the outlook sees is a mean, what is made once a median: they differ a little."""

LEAKING_SHARE: Final = 0.02
"""Growth counts if it takes this share of the capacity within so many steps."""


def with_outlook(verdict: Verdict, context: Context, bench: Bench | None) -> Verdict:
    """Return the verdict with what the run would do next.

    Where no allocator setting gets past the step that failed, its holes are not the cause, even if
    the one failing request could have been placed.
    """
    outlook = bench.outlook if bench is not None and bench.is_usable else None
    if bench is None or outlook is None or context.analysis is None:
        return verdict
    if verdict.cause is Cause.HEALTHY and not bench.recorded.fits:
        return verdict  # the program came to terms with its failures: it did go on
    verdict = replace(verdict, outlook=outlook)
    return verdict if bench.recorded.fits else _of_failure(verdict, context, bench, outlook)


def _of_failure(verdict: Verdict, context: Context, bench: Bench, outlook: Outlook) -> Verdict:
    is_holes = verdict.cause is Cause.FRAGMENTATION
    if not (is_holes or bench.is_exact):
        return verdict
    if is_holes and bench.makes_model:
        # All that the model is for comes on top: of that nothing is known.
        verdict = replace(verdict, confidence=Confidence.POSSIBLE)
    survivors = bench.survivors()
    may_leak = bench.is_exact and survivors is not None and not any(map(_is_open, survivors))
    assert context.analysis is not None  # noqa: S101 - asked before
    if may_leak and _is_leak(verdict, context.analysis, bench, outlook, survivors or []):
        return _as_leak(verdict, outlook, survivors or [])
    lacking = _lacking(bench, outlook) if bench.is_exact else 0
    if is_holes and survivors is not None:
        read = _of_holes(verdict, bench, survivors, _instead(context, bench), lacking)
        gathered = context.analysis.gathered
        if gathered is None or read.cause is not Cause.TRANSIENT_PEAK:
            return read
        return replace(read, summary=f"{gathered_text(context, gathered)}. {read.summary}")
    if not bench.is_exact:
        return verdict
    if verdict.cause in MAY_BE_HOLES and verdict.confidence is not Confidence.PROVEN:
        verdict = _unless_mended(verdict, bench, survivors or [])
    return _with_shortfall(verdict, context, outlook, lacking)


def _unless_mended(verdict: Verdict, bench: Bench, survivors: list[ReplayResult]) -> Verdict:
    """Return a verdict that thresholds gave, or fragmentation where a setting is enough."""
    holding = [r for r in survivors if _state(r) is OutlookState.HOLDS]
    goes_on = "the run goes on"
    if not holding and bench.n_steps >= MIN_LEAK_STEPS:
        holding = [r for r in survivors if _likely_holds(r)]
        goes_on = "the run likely goes on"
    if not holding:
        return verdict
    return _read_as(
        verdict,
        Cause.FRAGMENTATION,
        Confidence.LIKELY,
        f"{verdict.summary} But replayed under {holding[0].conf} {goes_on}: what it lacks lies in "
        "holes.",
    )


def _of_holes(
    verdict: Verdict, bench: Bench, survivors: list[ReplayResult], instead: Cause, lacking: int
) -> Verdict:
    """Return the verdict where free memory was enough for the request that failed.

    Without complete steps a step that failed needs more than that request, as a rule, and the
    holes held enough for it alone. With some, what is expected of the settings decides.
    """
    states = {_state(r) for r in survivors}
    enough = "Free memory was enough for the request that failed, but"
    if states <= {OutlookState.FAILS}:
        steps = max((r.outlook.fails_after_steps or 0 for r in survivors if r.outlook), default=0)
        short = f" It lacks {format_size(lacking)} in all." if lacking > 0 else ""
        end = "lets its step come to its end."
        if steps:
            end = f"lets the run go on for more than {plural(steps, 'step')}."
        text = f"{enough} no allocator setting {end}{short}"
        return _read_as(verdict, instead, Confidence.LIKELY, text)
    if not bench.is_exact or states != {OutlookState.OPEN} or not bench.is_in_step:
        return verdict
    likely = [r.outlook for r in survivors if _likely_holds(r) and r.outlook is not None]
    if likely:
        if all(outlook.basis is OutlookBasis.LOWER_BOUND for outlook in likely):
            # What is still to come was counted as far as it shows: half of such programs fail on.
            return replace(verdict, confidence=Confidence.POSSIBLE)
        is_sure = verdict.confidence is Confidence.PROVEN
        return replace(verdict, confidence=Confidence.LIKELY) if is_sure else verdict
    text = (
        f"{enough} its step was not finished, and of no allocator setting is known that it is "
        "enough for the rest."
    )
    return replace(
        _read_as(verdict, instead, Confidence.POSSIBLE, text),
        decider="Run it once with the setting that serves the request, or rehearse the program "
        "and give the recording to --continue-with.",
    )


def _read_as(verdict: Verdict, cause: Cause, confidence: Confidence, summary: str) -> Verdict:
    """Return the verdict with another cause, the first one beside it."""
    return replace(
        verdict,
        cause=cause,
        confidence=confidence,
        summary=summary,
        also=tuple(dict.fromkeys((verdict.cause, *(c for c in verdict.also if c is not cause)))),
        decider="",
    )


def _state(result: ReplayResult) -> OutlookState:
    return OutlookState.OPEN if result.outlook is None else result.outlook.state


def _likely_holds(result: ReplayResult) -> bool:
    return result.outlook is not None and result.outlook.likely is OutlookState.HOLDS


def _is_open(result: ReplayResult) -> bool:
    return _state(result) is OutlookState.OPEN


def _is_leak(
    verdict: Verdict,
    analysis: DeviceAnalysis,
    bench: Bench,
    outlook: Outlook,
    survivors: list[ReplayResult],
) -> bool:
    """Return whether memory grows with every step until no setting is enough.

    What an evaluation gathers ends with it, what each parameter gets once with these, and caches of
    keys and values with their request.
    """
    growth = min(outlook.growth_bytes_per_step or 0, 2 * bench.kept_bytes_per_step)
    growth -= int(ROUNDED_UP * analysis.once_slope_bytes)
    if verdict.cause not in (Cause.FRAGMENTATION, Cause.CAPACITY):
        return False
    if bench.n_steps < MIN_LEAK_STEPS or analysis.gathered is not None or bench.is_generating:
        return False
    if growth * MIN_GROWN_STEPS < LEAKING_SHARE * (bench.recorded.capacity_bytes or 0):
        return False
    return growth > 0 and all(_postpones_little(r, bench.n_steps) for r in survivors)


def _postpones_little(result: ReplayResult, n_steps: int) -> bool:
    """Return whether a setting fails too, before the run has come twice as far."""
    outlook = result.outlook
    if outlook is None or outlook.state is not OutlookState.FAILS:
        return False
    return (outlook.fails_after_steps or 0) <= n_steps


def _as_leak(verdict: Verdict, outlook: Outlook, survivors: list[ReplayResult]) -> Verdict:
    growth = format_size(outlook.growth_bytes_per_step)
    steps = max((r.outlook.fails_after_steps or 0 for r in survivors if r.outlook), default=0)
    best = (
        f" The best allocator setting postpones the failure by about {plural(steps, 'step')}."
        if steps
        else ""
    )
    text = f"Each step keeps {growth} more than it frees, until a request fails.{best}"
    return replace(_read_as(verdict, Cause.LEAK, Confidence.LIKELY, text), decider=verdict.decider)


def _lacking(bench: Bench, outlook: Outlook) -> int:
    """Return what the step would need beyond what PyTorch could have; 0 where that is unknown."""
    capacity, needs = bench.recorded.capacity_bytes, outlook.needs_bytes
    if needs is None and outlook.basis is OutlookBasis.COMPLETE:
        # It would grow without an end; the step that failed has a need of its own.
        needs = bench.fair_replay.step_needs_bytes()
    if capacity is None or needs is None:
        return 0
    return max(needs - capacity, 0)


def _instead(context: Context, bench: Bench) -> Cause:
    assert context.analysis is not None  # noqa: S101 - asked before
    if context.analysis.kept is not None:
        return Cause.LEAK
    if context.analysis.gathered is not None:
        return Cause.TRANSIENT_PEAK
    if bench.reproduction.conditions.allowed_bytes is not None:
        return Cause.MEMORY_LIMIT
    return Cause.TRANSIENT_PEAK if find_transient(context.analysis) else Cause.CAPACITY


def _with_shortfall(verdict: Verdict, context: Context, outlook: Outlook, lacking: int) -> Verdict:
    """Say what the whole step lacks, where that is more than what the request does."""
    failed = context.failed_request
    if failed is None or verdict.cause not in (Cause.CAPACITY, Cause.MEMORY_LIMIT):
        return verdict
    margin = failed.margin_bytes
    if margin is None or lacking <= WORTH_SAYING * max(-margin, 0):
        return verdict
    least = "at least " if outlook.basis is OutlookBasis.LOWER_BOUND else ""
    return replace(
        verdict,
        summary=f"{verdict.summary} The whole step lacks {least}{format_size(lacking)}.",
    )
