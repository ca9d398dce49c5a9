"""From a case to its diagnosis: build a context per device, and judge the leading one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from msgspec.structs import replace

from fragdoctor.analysis.device import analyze_device
from fragdoctor.analysis.owners import module_memory
from fragdoctor.analysis.result import DeviceAnalysis
from fragdoctor.diagnosis import holders
from fragdoctor.diagnosis.bench import set_up
from fragdoctor.diagnosis.checklist import build_checklist
from fragdoctor.diagnosis.corrections import find_corrections
from fragdoctor.diagnosis.failure import find_failure
from fragdoctor.diagnosis.figures import device_figures, timeline_strip
from fragdoctor.diagnosis.moments import deciding_moment, host_report, moment_report
from fragdoctor.diagnosis.notes import balance_note, capacity_note, find_notes
from fragdoctor.diagnosis.remedies.catalogue import proposals, prove, rank
from fragdoctor.diagnosis.remedies.framework_words import in_own_words
from fragdoctor.diagnosis.remedies.remedy import JudgedCase
from fragdoctor.diagnosis.verdict import CaseEvidence, find_verdict
from fragdoctor.errors import ConfigError
from fragdoctor.model.case import Case, OomMessage
from fragdoctor.model.diagnosis import (
    Cause,
    DeviceFigures,
    Diagnosis,
    Recommendation,
    RunState,
    Verdict,
)
from fragdoctor.model.finding import WORTH_SAYING
from fragdoctor.model.simulation import FidelityReport
from fragdoctor.model.snapshot import Snapshot
from fragdoctor.model.story import LogStory
from fragdoctor.rules.registry import RULES
from fragdoctor.rules.request_sources import find_failed_request
from fragdoctor.rules.rule import Context, run_rules
from fragdoctor.story.build import build_story


def build_contexts(
    case: Case, analyses: Mapping[int, DeviceAnalysis] | None = None
) -> tuple[Context, ...]:
    """Return one context per device of the snapshot, or a single one without a snapshot.

    The analyses of the snapshot's devices are computed unless the caller passes them.

    Raises:
        ConfigError: the requested device is not in the snapshot.
    """
    message = case.primary_message
    story = build_story(case.oom)
    if case.snapshot is None:
        named: list[int | None] = [*case.stats.devices] if case.stats else []
        if case.overrides.device is not None:
            named = [case.overrides.device]
        elif message is not None:
            named = [message.device_index]
        return tuple(_context(case, d, None, message, story) for d in named or [None])
    devices = [d for d in case.snapshot.devices if case.overrides.device in (None, d)]
    if not devices and case.snapshot.devices:
        held = ", ".join(str(d) for d in case.snapshot.devices)
        raise ConfigError(
            f"The snapshot holds nothing of device {case.overrides.device}.",
            hint=f"It is about device {held}.",
        )
    if not devices:
        devices = [0 if case.overrides.device is None else case.overrides.device]
    owner = None if message is None else message.device_index
    if owner not in devices and len(devices) == 1:
        owner = devices[0]  # a log may number devices otherwise (CUDA_VISIBLE_DEVICES)
    return tuple(
        _context(
            case,
            d,
            (analyses or {}).get(d) or analyze_device(case.snapshot, d),
            message if d == owner else None,
            story,
        )
        for d in devices
    )


def _weight(context: Context) -> tuple[int, int]:
    """Return what makes a device the one that the verdict is about, most important first.

    Fatal failures come first, then live memory.
    """
    failed, analysis = context.failed_request, context.analysis
    if context.message is not None and analysis is not None and analysis.ooms:
        rank = 4
    elif failed is not None and not failed.is_caught:
        rank = 3
    elif failed is not None:
        rank = 2
    else:
        rank = 1
    live = analysis.active_bytes if analysis is not None else 0
    return rank, live


def _context(
    case: Case,
    device: int | None,
    analysis: DeviceAnalysis | None,
    message: OomMessage | None,
    story: LogStory | None,
) -> Context:
    stats = case.stats.of_device(device) if case.stats is not None else ()
    return Context(
        case=case,
        device=device,
        analysis=analysis,
        message=message,
        failed_request=find_failed_request(case, analysis, message),
        stats=stats,
        is_series=case.stats.is_series if case.stats is not None else False,
        story=story,
    )


NOT_REPLAYED: Final = FidelityReport(reason="the trace was not replayed")


def diagnose(
    case: Case,
    *,
    replays: bool = True,
    analyses: Mapping[int, DeviceAnalysis] | None = None,
    continue_with: Snapshot | None = None,
    at: str | None = None,
) -> Diagnosis:
    """Return what is wrong, how that was found, and what to do about it.

    Any input of the case may be missing; what cannot be answered is skipped with the reason.
    If there is a trace, recommendations are replayed before they are given. Without ``replays``,
    they rest on reasoning alone, which changes neither the verdict nor the findings. ``analyses``
    of devices are used if given. ``continue_with`` is a longer recording of the same program (a
    rehearsal, a healthy run), which shows how the run would have gone on. ``at`` is a further
    moment of the trace to show, written as for ``moment_report``.

    Raises:
        ConfigError: the trace has no such moment.
        SimulationError: the recording to continue with is of another program, or cannot be used.
    """
    contexts = build_contexts(case, analyses)
    leader = max(contexts, key=_weight)
    moment = None if at is None else moment_report(leader, at)
    results = run_rules(RULES, contexts)
    bench, fidelity = set_up(leader, continue_with) if replays else (None, NOT_REPLAYED)
    verdict = find_verdict(CaseEvidence(leader, bench))
    judged = JudgedCase(leader, verdict, bench)
    tested, replay_notes = prove(judged, proposals(judged))
    ordered = [leader, *(c for c in contexts if c is not leader)]
    moment_of = {c.device: deciding_moment(c, leader, verdict) for c in ordered}
    moments = [(c, its) for c in ordered if (its := moment_of[c.device]) is not None]
    own = moment_of[leader.device]
    segments, n_segments = holders.segment_reports(own)
    worded = in_own_words(judged, tested)
    recommendations, rejected = rank(worded, verdict.cause)
    if verdict.cause is Cause.HEALTHY and leader.failed_request is not None:
        rejected = ()  # the program recovered from its failures, so none is left to fix
    figures = (f for c in ordered if (f := device_figures(c, moment_of[c.device])) is not None)
    devices = tuple(sorted(figures, key=lambda f: f.device))
    if verdict.state is RunState.FITS:
        recommendations = _worth_it(recommendations, verdict, devices)
    held = tuple(h for c, at in moments for h in holders.holder_reports(c, at))
    owners = tuple(o for c, at in moments for o in holders.owner_reports(c, at))
    host = host_report(case.snapshot, own)
    about = (
        capacity_note(leader, bench),
        balance_note(devices, verdict, case.snapshot),
        holders.twice_note(leader),
        holders.cycle_note(owners, leader),
    )
    return Diagnosis(
        case=case,
        verdict=verdict,
        checklist=build_checklist(leader, verdict),
        devices=devices,
        stranders=tuple(p for c, at in moments for p in holders.strander_reports(c, at)),
        holders=held,
        functions=holders.function_holders(held, case.snapshot),
        owners=owners,
        modules=tuple(
            m
            for c in ordered
            if c.analysis is not None
            for m in module_memory(c.analysis, case.censuses)
        ),
        fidelity=fidelity,
        findings=results.findings,
        skipped=results.skipped,
        recommendations=recommendations,
        rejected=rejected,
        corrections=find_corrections(judged),
        notes=tuple(n for n in (*about, *find_notes(case, contexts, leader, host)) if n),
        replay_notes=replay_notes,
        timeline=timeline_strip(leader),
        worst_segments=segments,
        n_stranded_segments=n_segments,
        phases=tuple(a.phases.report for c in ordered if (a := c.analysis) and a.phases),
        story=leader.story,
        moment=moment,
        failure=find_failure(judged, own),
        host=host,
        analyses={c.analysis.device: c.analysis for c in contexts if c.analysis is not None},
    )


ROOMY: Final = 0.5
"""A run that reserves at most this share of the GPU needs no advice at all."""


def _worth_it(
    found: Sequence[Recommendation], verdict: Verdict, devices: Sequence[DeviceFigures]
) -> tuple[Recommendation, ...]:
    """Return what is worth changing in a run that fits; nothing if half of the GPU is free."""
    device = next((d for d in devices if d.device == verdict.device), None)
    if device is None or device.peak_allocated_bytes is None:
        return tuple(found)
    reserved, capacity = device.peak_reserved_bytes, device.capacity_bytes
    if capacity and reserved is not None and reserved <= ROOMY * capacity:
        return ()
    least = WORTH_SAYING * device.peak_allocated_bytes
    kept = [one for one in found if not one.saves_bytes or one.saves_bytes >= least]
    return tuple(replace(one, rank=i) for i, one in enumerate(kept, start=1))
