"""The whole way from several runs to one comparison."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

from fragdoctor.comparison.answer import find_notes, is_same, summarised
from fragdoctor.comparison.compared_run import (
    ComparedDevice,
    ComparedRun,
    all_figures,
    choose_devices,
    device_peaks,
    read_run,
    side,
)
from fragdoctor.comparison.explanation import Evidence, likely_causes
from fragdoctor.comparison.line_changes import line_changes, phase_changes, reasons
from fragdoctor.comparison.line_uses import merged
from fragdoctor.comparison.series import find_trend, live_bytes
from fragdoctor.comparison.settings_proof import prove_settings, requests_equal, setting_changes
from fragdoctor.errors import ConfigError
from fragdoctor.frozen import frozen
from fragdoctor.model.case import Case
from fragdoctor.model.comparison import Basis, Comparison, LineChange, SettingsProof

MAX_LINES_SHOWN = 400


@frozen
class _Lines:
    """What the lines of two devices say."""

    changes: tuple[LineChange, ...]
    delta_bytes: int
    explained_bytes: int


def compare_cases(
    cases: Iterable[tuple[str, Case]],
    *,
    steps: Sequence[float] | None = None,
    capacity_bytes: int | None = None,
) -> Comparison:
    """Return what changed between runs, each a name and a case, in time order.

    Cases are read one after the other; only the first one's traces are kept, and the peaks of
    every request of the first and the last.

    Raises:
        ConfigError: fewer than two runs, or steps that do not fit them.
    """
    compared: list[ComparedRun] = []
    for name, case in cases:
        run = read_run(case, name)
        if len(compared) > 1:
            compared[-1] = compared[-1].in_the_middle()
        compared.append(replace(run, traces={}) if compared else run)
    return compare_runs(compared, steps=steps, capacity_bytes=capacity_bytes)


def compare_runs(
    compared: Sequence[ComparedRun],
    *,
    steps: Sequence[float] | None = None,
    capacity_bytes: int | None = None,
) -> Comparison:
    """Return what changed between runs: the first against the last, and the trend of three.

    Two runs at least, in time order; ``steps`` is where each stands on the axis of a trend, and
    ``capacity_bytes`` what that runs into: the last run's own capacity where None.

    Raises:
        ConfigError: fewer than two runs, or steps that do not fit them.
    """
    if len(compared) < 2:
        raise ConfigError("One run cannot be compared.", hint="Give two at least.")
    _check_steps(steps, len(compared))
    chosen, notes = choose_devices(compared)
    devices = [
        None if d is None else r.devices.get(d) for r, d in zip(compared, chosen, strict=True)
    ]
    basis = _basis(devices)
    first, last = devices[0], devices[-1]
    comparison = Comparison(
        runs=tuple(side(r, i, d) for i, (r, d) in enumerate(zip(compared, chosen, strict=True))),
        summary="",
        basis=basis,
        figures=all_figures(compared, chosen),
        settings=setting_changes(compared[0].settings, compared[-1].settings),
        device_peaks=device_peaks(compared),
        phases=phase_changes(compared[0], compared[-1], (chosen[0], chosen[-1])),
    )
    if first is not None and last is not None and basis is not Basis.NONE:
        comparison, more = _with_lines(comparison, compared, first, last)
        notes += more
    if len(compared) > 2:
        trend = find_trend(comparison, devices, steps, capacity_bytes)
        comparison = replace(comparison, trend=trend)
    comparison = replace(comparison, is_same=is_same(comparison))
    comparison = replace(comparison, notes=(*notes, *find_notes(comparison, compared)))
    return replace(comparison, summary=summarised(comparison))


def _check_steps(steps: Sequence[float] | None, n_runs: int) -> None:
    if steps is None:
        return
    if len(steps) != n_runs:
        raise ConfigError(
            f"There are {n_runs} runs and {len(steps)} steps.", hint="Give one step for each run."
        )
    if any(b <= a for a, b in pairwise(steps)):
        raise ConfigError("The steps do not ascend.", hint="Give the runs in time order.")


def _basis(devices: Sequence[ComparedDevice | None]) -> Basis:
    if any(d is None for d in devices):
        return Basis.NONE
    return Basis.PEAK if all(d is not None and d.totals for d in devices) else Basis.NOW


def _with_lines(
    comparison: Comparison,
    compared: Sequence[ComparedRun],
    first: ComparedDevice,
    last: ComparedDevice,
) -> tuple[Comparison, list[str]]:
    """Return the comparison with lines, reasons and causes, and notes about the replay."""
    rows = _lines(first, last, peak=comparison.basis is Basis.PEAK)
    equal = requests_equal(first, last)
    proof: SettingsProof | None = None
    notes: list[str] = []
    settings = compared[-1].settings
    trace = compared[0].traces.get(first.device)
    if comparison.settings and trace is not None and settings is not None:
        proof, why = prove_settings(
            trace, first, last, settings, equal, under=comparison.runs[-1].letter
        )
        if why:
            notes.append(f"The settings were not tried by replay: {why}")
    evidence = Evidence(
        before=first,
        after=last,
        changes=rows.changes,
        delta_bytes=rows.delta_bytes,
        settings=comparison.settings,
        proof=proof,
        requests_equal=equal,
        last=comparison.runs[-1].letter,
        is_series=len(compared) > 2,
    )
    kept = rows.changes[:MAX_LINES_SHOWN]
    return (
        replace(
            comparison,
            delta_bytes=rows.delta_bytes,
            explained_bytes=rows.explained_bytes,
            lines=kept,
            n_lines_left_out=len(rows.changes) - len(kept),
            reasons=reasons(rows.changes, rows.delta_bytes),
            causes=likely_causes(evidence),
            proof=proof,
            requests_equal=equal,
        ),
        notes,
    )


def _lines(first: ComparedDevice, last: ComparedDevice, *, peak: bool) -> _Lines:
    if min(first.capture.has_stacks, last.capture.has_stacks) > 0:
        changes = line_changes(first.lines, last.lines, peak=peak)
    else:  # a line of one run would seem new in the other
        changes = line_changes([merged(first.lines)], [merged(last.lines)], peak=peak)
    delta = live_bytes(last, peak=peak) - live_bytes(first, peak=peak)
    explained = sum(c.delta_bytes for c in changes if c.place is not None)
    return _Lines(changes, delta, explained)
