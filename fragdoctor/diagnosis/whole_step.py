"""The verdict in the light of the whole step, and what was allocated at one moment of a trace.

One failing request is not what a run needs. A moment is the peak of a step, an event, a failure.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt

from fragdoctor.analysis.result import DeviceAnalysis
from fragdoctor.diagnosis.bench import Bench
from fragdoctor.errors import ConfigError
from fragdoctor.model.diagnosis import Cause, Verdict
from fragdoctor.model.finding import Confidence
from fragdoctor.model.phases import Category, HeldBytes, MomentReport
from fragdoctor.model.simulation import Outlook, OutlookBasis, OutlookState, ReplayResult
from fragdoctor.model.snapshot import I64, Action
from fragdoctor.rules.capacity.transient_peak import find_transient
from fragdoctor.rules.rule import Context
from fragdoctor.trace.lives import Totals
from fragdoctor.trace.steps import Steps
from fragdoctor.units import format_count, format_size, plural

WORTH_SAYING: Final = 1.05
"""What the step lacks is said if it is so many times what the failing request lacks."""

MIN_LEAK_STEPS: Final = 3
"""Whole steps that must show a growth: what only one keeps may be made once."""

MIN_GROWN_STEPS: Final = 100
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
    verdict = replace(verdict, outlook=outlook)
    return verdict if bench.recorded.fits else _of_failure(verdict, context, bench, outlook)


def _of_failure(verdict: Verdict, context: Context, bench: Bench, outlook: Outlook) -> Verdict:
    is_holes = verdict.cause is Cause.FRAGMENTATION
    if not (is_holes or bench.is_exact):
        return verdict
    survivors = bench.survivors()
    may_leak = bench.is_exact and survivors is not None and not any(map(_is_open, survivors))
    if may_leak and _is_leak(verdict, bench, outlook, survivors or []):
        return _as_leak(verdict, outlook, survivors or [])
    lacking = _lacking(bench, outlook) if bench.is_exact else 0
    if is_holes and survivors is not None:
        return _of_holes(verdict, bench, survivors, _instead(context, bench), lacking)
    if not bench.is_exact:
        return verdict
    holding = [r for r in survivors or () if _state(r) is OutlookState.HOLDS]
    goes_on = "the run goes on"
    if not holding and bench.n_steps >= MIN_LEAK_STEPS:
        holding = [
            r for r in survivors or () if r.outlook and r.outlook.likely is OutlookState.HOLDS
        ]
        goes_on = "the run likely goes on"
    is_proven = verdict.confidence is Confidence.PROVEN
    if verdict.cause is Cause.CAPACITY and holding and not is_proven:
        return _read_as(
            verdict,
            Cause.FRAGMENTATION,
            Confidence.LIKELY,
            f"{verdict.summary} But replayed under {holding[0].conf} {goes_on}: what it lacks "
            "lies in holes.",
        )
    return _with_shortfall(verdict, context, outlook, lacking)


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
    if any(r.outlook and r.outlook.likely is OutlookState.HOLDS for r in survivors):
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


def _is_open(result: ReplayResult) -> bool:
    return _state(result) is OutlookState.OPEN


def _is_leak(
    verdict: Verdict, bench: Bench, outlook: Outlook, survivors: list[ReplayResult]
) -> bool:
    """Return whether memory grows with every step until no setting is enough."""
    growth = min(outlook.growth_bytes_per_step or 0, 2 * bench.kept_bytes_per_step)
    if verdict.cause not in (Cause.FRAGMENTATION, Cause.CAPACITY):
        return False
    if bench.n_steps < MIN_LEAK_STEPS:
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


MAX_LINES_AT: Final = 100
"""Lines of one moment, those with most bytes."""

_MOMENTS: Final = re.compile(r"(step|event|oom):([0-9]{1,15})|(peak|oom|end)")
_AS_MOMENT: Final = (
    "Write step:3 for the peak of step 3, event:1200, peak, oom, oom:2 or end; step:3..step:6 for "
    "what changed between two."
)


def moment_report(context: Context, asked: str) -> MomentReport:
    """Return what was allocated on a device at a moment.

    Args:
        context: of the device.
        asked: ``step:N`` (the peak of the N-th step, from 1), ``event:N`` (after N events),
            ``peak``, ``oom`` (the last one), ``oom:N`` (from 1) or ``end``; with ``A..B`` the
            report is of B and says what changed since A.

    Raises:
        ConfigError: it is none of these, or the trace has no such moment.
    """
    a = context.analysis
    if a is None or a.timeline is None:
        raise ConfigError(
            "The input has no trace, so no moment of it can be shown.",
            hint="Give a snapshot that was recorded with _record_memory_history().",
        )
    steps = Steps.of(a.trace).rows
    earlier, _, later = asked.rpartition("..")
    title, state = _moment(a, a.timeline, steps, later)
    lives, rows = a.trace.lives, a.trace.lives.allocated_at(state)
    size = lives.size_bytes[rows]
    lines = _held(a.trace.stacks.lines_of(lives.stack[rows]), size)
    category = () if a.phases is None or not len(a.phases.category) else a.phases.category[rows]
    allocated, active, reserved = a.timeline.at([state])[0].tolist()
    is_in = np.searchsorted(steps, max(state - 1, 0), "right")
    moment = MomentReport(
        device=a.device,
        asked=title,
        event=state,
        n_events=a.n_events,
        step=int(is_in) or None,
        n_steps=len(steps),
        allocated_bytes=allocated,
        active_bytes=active,
        reserved_bytes=reserved,
        lines=[HeldBytes(context.frame(f), None, *held) for f, *held in lines[:MAX_LINES_AT]],
        categories=[HeldBytes(None, Category(kind), *held) for kind, *held in _held(category, size)]
        if len(category)
        else (),
    )
    if not earlier:
        return moment
    since, before = _moment(a, a.timeline, steps, earlier)
    gone = lives.allocated_at(before)
    both, signed = np.concatenate((rows, gone)), np.concatenate((size, -lives.size_bytes[gone]))
    changed = [
        held for held in _held(a.trace.stacks.lines_of(lives.stack[both]), signed) if held[1]
    ]
    return replace(
        moment,
        since=since,
        since_event=before,
        since_allocated_bytes=int(a.timeline.allocated_bytes[before]),
        changes=[HeldBytes(context.frame(f), None, *held) for f, *held in changed[:MAX_LINES_AT]],
    )


def _held(group: npt.ArrayLike, size: I64) -> list[tuple[int, int, int]]:
    """Return (group, bytes, blocks) of each group, most bytes first; less than 0 counts off."""
    found, member = np.unique(np.asarray(group), return_inverse=True)
    n_bytes = np.zeros(len(found), np.int64)
    np.add.at(n_bytes, member.reshape(-1), size)
    n_blocks = np.zeros(len(found), np.int64)
    np.add.at(n_blocks, member.reshape(-1), np.sign(size))
    order = np.argsort(-np.abs(n_bytes), kind="stable")
    return [(int(found[g]), int(n_bytes[g]), int(n_blocks[g])) for g in order]


def _moment(a: DeviceAnalysis, totals: Totals, steps: I64, asked: str) -> tuple[str, int]:
    """Return which moment is meant, in words, and the events before it."""
    m = _MOMENTS.fullmatch(asked.strip().lower())
    if m is None:
        raise ConfigError(f"{asked!r} is no moment of a trace.", hint=_AS_MOMENT)
    kind, number = (m[1] or m[3]), int(m[2] or 0)
    if kind == "peak":
        return "the peak", totals.peak_allocated_state
    if kind == "end":
        return "the end of the trace", a.n_events
    if kind == "event":
        if number > a.n_events:
            raise ConfigError(
                f"There is no event {format_count(number)}.",
                hint=f"The trace has {plural(a.n_events, 'event')}.",
            )
        return f"event {format_count(number)}", number
    if kind == "oom":
        rows = np.flatnonzero(a.trace.events.action == Action.OOM)
        at = number - 1 if m[2] else len(rows) - 1
        if not 0 <= at < len(rows):
            raise ConfigError(
                "There is no such failure.", hint=f"The trace has {plural(len(rows), 'OOM')}."
            )
        return f"OOM {at + 1} of {len(rows)}", int(rows[at])
    if not 1 <= number <= len(steps):
        raise ConfigError(
            f"There is no step {format_count(number)}.",
            hint=f"The trace shows {plural(len(steps), 'step')}; event:N works without steps.",
        )
    first = int(steps[number - 1])
    end = int(steps[number]) if number < len(steps) else a.n_events
    within = totals.allocated_bytes[first + 1 : end + 1]
    return f"the peak of step {format_count(number)}", first + 1 + int(np.argmax(within))
