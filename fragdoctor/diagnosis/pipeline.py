"""The whole way from a case to a diagnosis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from fragdoctor.analysis.result import DeviceAnalysis
from fragdoctor.analysis.training_run import TrainingRun, training_run
from fragdoctor.diagnosis.bench import Bench, Progress, set_up
from fragdoctor.diagnosis.checklist import build_checklist
from fragdoctor.diagnosis.contexts import build_contexts, leading_context
from fragdoctor.diagnosis.corrections import find_corrections
from fragdoctor.diagnosis.figures import (
    device_figures,
    holder_reports,
    phase_report,
    pin_reports,
    segment_reports,
    timeline_strip,
)
from fragdoctor.diagnosis.moments import moment_report
from fragdoctor.diagnosis.notes import find_notes
from fragdoctor.diagnosis.proof import prove
from fragdoctor.diagnosis.remedies.registry import proposals, rank
from fragdoctor.diagnosis.remedies.remedy import JudgedCase
from fragdoctor.diagnosis.remedies.savings import SHORT_OF_MEMORY
from fragdoctor.diagnosis.run_state import run_state
from fragdoctor.diagnosis.verdict import find_verdict, with_story
from fragdoctor.diagnosis.whole_step import with_outlook
from fragdoctor.model.case import Case
from fragdoctor.model.diagnosis import Cause, Diagnosis, FidelityReport, Verdict
from fragdoctor.model.snapshot import Snapshot
from fragdoctor.rules.context import Context
from fragdoctor.rules.registry import RULES
from fragdoctor.rules.rule import run_rules
from fragdoctor.trace.simulate import trace_of

NOT_REPLAYED: Final = FidelityReport(reason="the trace was not replayed")


def diagnose(  # noqa: PLR0913 - the choices of one run, all by keyword
    case: Case,
    *,
    progress: Progress | None = None,
    replays: bool = True,
    analyses: Mapping[int, DeviceAnalysis] | None = None,
    continue_with: Snapshot | None = None,
    at: str | None = None,
) -> Diagnosis:
    """Return what is wrong, how that was found, and what to do about it.

    Every input of the case may be missing; what cannot be answered is skipped with the reason.
    Where there is a trace, recommendations are replayed before they are given; ``progress`` is
    called with replays done and replays in all. Without ``replays`` they are reasoned only, which
    changes neither the verdict nor the findings. ``analyses`` of devices are taken where given.
    ``continue_with`` is a recording of the same program that goes further (a rehearsal, a healthy
    run): it says how the run would have gone on. ``at`` is a moment of the trace that is shown
    besides, as ``moment_report`` takes it.

    Raises:
        ConfigError: the trace has no such moment.
        SimulationError: the recording to continue with is of another program, or cannot be used.
    """
    contexts = build_contexts(case, analyses)
    leader = leading_context(contexts)
    moment = None if at is None else moment_report(leader, at)
    verdict = with_story(find_verdict(leader), leader.story)
    verdict = replace(verdict, state=run_state(leader, verdict.cause))
    results = run_rules(RULES, contexts)
    other = None if continue_with is None else trace_of(continue_with)
    bench, fidelity = set_up(leader, other) if replays else (None, NOT_REPLAYED)
    verdict = with_outlook(verdict, leader, bench)
    judged = JudgedCase(leader, verdict, results, bench, _training(leader, bench, verdict))
    proof = prove(judged, proposals(judged), progress)
    recommendations, rejected = rank(proof.proposals, verdict.cause)
    return Diagnosis(
        case=case,
        verdict=verdict,
        checklist=build_checklist(leader, verdict),
        devices=tuple(f for c in contexts if (f := device_figures(c)) is not None),
        pins=tuple(p for c in _leader_first(contexts, leader) for p in pin_reports(c)),
        holders=tuple(h for c in _leader_first(contexts, leader) for h in holder_reports(c)),
        fidelity=fidelity,
        findings=results.findings,
        skipped=results.skipped,
        recommendations=recommendations,
        rejected=rejected,
        corrections=find_corrections(judged),
        notes=find_notes(case, contexts, leader),
        replay_notes=proof.notes,
        timeline=timeline_strip(leader),
        worst_segments=segment_reports(leader),
        n_pinned_segments=0 if leader.analysis is None else leader.analysis.n_pinned_segments,
        phases=tuple(
            p for c in _leader_first(contexts, leader) if (p := phase_report(c)) is not None
        ),
        story=leader.story,
        moment=moment,
        analyses={c.analysis.device: c.analysis for c in contexts if c.analysis is not None},
    )


def _training(context: Context, bench: Bench | None, verdict: Verdict) -> TrainingRun | None:
    """Return the passes and layers of the run, where less memory may be called for."""
    if bench is None or context.analysis is None:
        return None
    if verdict.cause not in (*SHORT_OF_MEMORY, Cause.HEALTHY):
        return None
    return training_run(context.analysis.trace, context.analysis.phases, bench.requests)


def _leader_first(contexts: Sequence[Context], leader: Context) -> list[Context]:
    return [leader, *(c for c in contexts if c is not leader)]
