"""``fragdoctor check``: a gate for continuous integration."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from fragdoctor.cli import console, options
from fragdoctor.errors import ConfigError
from fragdoctor.model.finding import Severity
from fragdoctor.report.base import RenderOptions, ReportFormat, check_format, render

if TYPE_CHECKING:
    from fragdoctor.gate.judgement import FileJudgement, Gate


@options.taken
class CheckOptions(options.CaseOptions):
    """The requirements on the inputs."""

    paths: list[str] = options.argument(
        "PATH...", "Snapshots, messages, statistics and logs, or directories and patterns of them"
    )
    max_peak: Any = options.option("SIZE|%", "Limit the peak of active memory")
    max_stranded: Any = options.option(
        "SIZE|%", "Limit free memory that live blocks strand; a percentage is of reserved memory"
    )
    max_retries: int | None = options.option(
        "N", "Limit allocations that flush the cache first", min=0
    )
    min_headroom: Any = options.option("SIZE|%", "Require capacity above the peak of active memory")
    fits_on: int | None = options.option(
        "SIZE", "Require, by replay, that the run fits if PyTorch can have this much"
    )
    no_growth: bool = options.flag("Require that no memory grows step by step")
    baseline: Path | None = options.option("FILE", "Fail only on what got worse than this")
    write_baseline: Path | None = options.option("FILE", "Accept the findings as they are now")
    tolerance: Any = options.option(
        "SIZE|%", "Accept this much more than the baseline; 5% by default"
    )
    select: list[str] | None = options.option("CODES", "Apply only these rules: FD101,FD2")
    ignore: list[str] | None = options.option("CODES", "Skip these rules")
    fail_on: options.FailOn = options.option(
        None,
        "Fail on findings this severe",
        default="error",
        group=options.GATE,
        show_default=True,
    )
    output_format: ReportFormat = options.FORMAT
    report: list[str] | None = options.REPORTS


def check(asked: CheckOptions) -> int:
    """Judge each input, print the report, and fail if a budget or a rule says so."""
    look = console.look_of(asked)
    targets, baseline = report_targets(asked, asked.paths), asked.write_baseline

    from fragdoctor.api_check import judge_files
    from fragdoctor.gate.baseline import load_baseline
    from fragdoctor.gate.judgement import report as report_on

    # A baseline may be renewed; any other file of that name is not overwritten.
    renews = baseline is not None and baseline.is_file() and not asked.force
    if renews:
        load_baseline(str(baseline))
    console.check_output(baseline, force=asked.force or renews, inputs=asked.paths)
    gate = _gate(asked)
    with console.Progress("Judged") as progress:
        judged = judge_files(asked.paths, gate, asked.overrides(), progress.each)
    notes = [] if baseline is None else [_accept(judged, baseline)]
    result = report_on(judged, gate, notes)
    write_reports(asked, targets, look, lambda name, look: render("check", name, result, look))
    return result.exit_code


def _gate(asked: CheckOptions) -> Gate:
    from fragdoctor.gate.baseline import DEFAULT_TOLERANCE, load_baseline
    from fragdoctor.gate.budgets import Budgets
    from fragdoctor.gate.judgement import Gate, rule_codes

    return Gate(
        budgets=Budgets(
            asked.max_peak, asked.max_stranded, asked.max_retries, asked.min_headroom,
            asked.fits_on, asked.no_growth,
        ),
        fail_on=Severity[asked.fail_on.upper()],
        select=rule_codes(asked.select or []),
        ignore=rule_codes(asked.ignore or []),
        baseline=None if asked.baseline is None else load_baseline(str(asked.baseline)),
        tolerance=asked.tolerance or DEFAULT_TOLERANCE,
        accepts_findings=asked.write_baseline is not None,
    )  # fmt: skip


def report_targets(asked: Any, inputs: Sequence[str]) -> list[tuple[str, Path]]:
    """Return (format, file) for each ``--report FORMAT=FILE``.

    Raises:
        ConfigError: one is malformed, two go to the same file, or one or the report itself could
            not be written once the work is done.
    """
    targets = []
    for text in asked.report or ():
        name, equals, file = text.partition("=")
        if not equals or not file:
            raise ConfigError(
                f"{text!r} is not FORMAT=FILE.", hint="Write for example --report sarif=out.sarif"
            )
        check_format("check", name)
        targets.append((name, Path(file)))
    if len({os.path.abspath(t) for _, t in targets}) < len(targets):  # noqa: PTH100 - lexical
        raise ConfigError("Two reports go to one file.", hint="Give each its own name.")
    for file in (asked.output, *(target for _, target in targets)):
        console.check_output(file, force=asked.force, inputs=inputs)
    return targets


def write_reports(
    asked: Any,
    targets: Sequence[tuple[str, Path]],
    look: RenderOptions,
    report_of: Callable[[str, RenderOptions], str],
) -> None:
    """Write the reports of ``--report``, then the one that ``--format`` and ``-o`` ask for."""
    for name, target in targets:
        text = report_of(name, replace(look, color=False, unicode=False, link=""))
        console.write_report(text, target, force=asked.force)
    text = report_of(asked.output_format, look)
    console.write_report(text, asked.output, force=asked.force)


def _accept(judged: Sequence[FileJudgement], path: Path) -> str:
    """Write the baseline, unless it would lack an input; return a sentence that says so."""
    from fragdoctor.gate.baseline import write_baseline
    from fragdoctor.gate.judgement import GateStatus, new_baseline

    if any(f.status is GateStatus.ERROR for f in judged):
        return "No baseline was written, because not all inputs could be read."
    console.write_report(write_baseline(new_baseline(judged)), path, force=True)
    return f"The baseline was written to {path}."
