"""``fragdoctor check``: the gate for continuous integration."""

from __future__ import annotations

import os
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fragdoctor.cli import console, options
from fragdoctor.cli.exit import FINDINGS, OK
from fragdoctor.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fragdoctor.gate.judgement import FileJudgement


class CheckFormat(StrEnum):
    """Formats of a check: those of ``report.base.VIEWS``."""

    TEXT = "text"
    JSON = "json"
    MARKDOWN = "markdown"
    HTML = "html"
    GITHUB = "github"
    SARIF = "sarif"
    JUNIT = "junit"


Paths = Annotated[
    list[str],
    typer.Argument(
        metavar="PATH...",
        help="Snapshots, messages, statistics and logs, or directories and patterns of them",
    ),
]
BaselineFile = Annotated[
    Path | None,
    typer.Option("--baseline", metavar="FILE", help="Fail only on what got worse than this"),
]
WriteBaseline = Annotated[
    Path | None,
    typer.Option("--write-baseline", metavar="FILE", help="Accept the findings as they are now"),
]
Tolerance = Annotated[
    Any,
    typer.Option(
        "--tolerance",
        parser=options.amount,
        metavar="SIZE|%",
        help="Accept this much more than the baseline; 5% where not given",
    ),
]
MaxPeak = Annotated[
    Any,
    typer.Option(
        "--max-peak",
        parser=options.amount,
        metavar="SIZE|%",
        help="Limit the peak of active memory",
    ),
]
MaxPinned = Annotated[
    Any,
    typer.Option(
        "--max-pinned",
        parser=options.amount,
        metavar="SIZE|%",
        help="Limit free memory that live blocks pin; a percentage is of reserved memory",
    ),
]
MaxRetries = Annotated[
    int | None,
    typer.Option(
        "--max-retries", min=0, metavar="N", help="Limit allocations that flush the cache first"
    ),
]
MinHeadroom = Annotated[
    Any,
    typer.Option(
        "--min-headroom",
        parser=options.amount,
        metavar="SIZE|%",
        help="Demand capacity above the peak of active memory",
    ),
]
FitsOn = Annotated[
    int | None,
    typer.Option(
        "--fits-on",
        parser=options.size,
        metavar="SIZE",
        help="Demand by replay that the run fits where PyTorch can have this much",
    ),
]
NoGrowth = Annotated[
    bool, typer.Option("--no-growth", help="Demand that no memory grows step by step")
]
Select = Annotated[
    list[str] | None,
    typer.Option(
        "--select", metavar="CODES", help="Look at these rules only: FD101,FD2", show_default=False
    ),
]
Ignore = Annotated[
    list[str] | None,
    typer.Option(
        "--ignore", metavar="CODES", help="Do not look at these rules", show_default=False
    ),
]
FailOn = Annotated[
    options.FailOn,
    typer.Option("--fail-on", help="Fail on findings this severe", show_default=True),
]
Format = Annotated[
    CheckFormat, typer.Option("--format", help="Choose the output format", show_default=True)
]
Reports = Annotated[
    list[str] | None,
    typer.Option(
        "--report",
        metavar="FORMAT=FILE",
        help="Write a further report to a file; may be repeated",
        show_default=False,
    ),
]


def check(
    paths: Paths,
    max_peak: MaxPeak = None,
    max_pinned: MaxPinned = None,
    max_retries: MaxRetries = None,
    min_headroom: MinHeadroom = None,
    fits_on: FitsOn = None,
    no_growth: NoGrowth = False,
    baseline: BaselineFile = None,
    write_baseline: WriteBaseline = None,
    tolerance: Tolerance = None,
    select: Select = None,
    ignore: Ignore = None,
    fail_on: FailOn = options.FailOn.ERROR,
    exit_zero: options.ExitZero = False,
    capacity: options.DeviceSize = None,
    device: options.Device = None,
    memory_fraction: options.MemoryFraction = None,
    torch_version: options.TorchVersion = None,
    output_format: Format = CheckFormat.TEXT,
    report: Reports = None,
    output: options.Output = None,
    force: options.Force = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    path_map: options.PathMap = None,
    no_color: options.NoColor = False,
) -> int:
    """Judge each input, print the report, and fail where a budget or a rule says so."""
    look = console.render_options(
        quiet=quiet,
        verbose=verbose,
        no_color=no_color,
        to_file=output is not None,
        path_map=path_map,
    )
    targets = report_targets(report or [])
    check_targets([output, *(t for _, t in targets)], write_baseline, paths, force=force)

    from fragdoctor.api_check import judge_files
    from fragdoctor.gate.baseline import DEFAULT_TOLERANCE, load_baseline
    from fragdoctor.gate.budgets import Budgets
    from fragdoctor.gate.judgement import Gate, rule_codes
    from fragdoctor.gate.judgement import report as report_on
    from fragdoctor.model.case import Overrides
    from fragdoctor.model.finding import Severity
    from fragdoctor.report.base import render

    gate = Gate(
        budgets=Budgets(max_peak, max_pinned, max_retries, min_headroom, fits_on, no_growth),
        fail_on=Severity[fail_on.value.upper()],
        select=rule_codes(select or []),
        ignore=rule_codes(ignore or []),
        baseline=None if baseline is None else load_baseline(str(baseline)),
        tolerance=tolerance or DEFAULT_TOLERANCE,
        accepts_findings=write_baseline is not None,
    )
    overrides = Overrides(
        capacity_bytes=capacity,
        device=device,
        memory_fraction=memory_fraction,
        torch_version=torch_version,
    )
    with console.Progress("Judged") as progress:
        judged = judge_files(paths, gate, overrides, progress.each)
    notes = [] if write_baseline is None else [_accept(judged, write_baseline)]
    result = report_on(judged, gate, notes)
    for name, target in targets:
        write_target(render("check", name, result, replace(look, color=False)), target, force=force)
    write_target(render("check", output_format.value, result, look), output, force=force)
    return OK if exit_zero and result.exit_code == FINDINGS else result.exit_code


def report_targets(reports: Sequence[str]) -> list[tuple[str, Path]]:
    """Return (format, file) of each ``--report FORMAT=FILE``.

    Raises:
        ConfigError: one is written in another way, or two go to one file.
    """
    targets = []
    for text in reports:
        name, equals, file = text.partition("=")
        if not equals or not file:
            raise ConfigError(
                f"{text!r} is not FORMAT=FILE.", hint="Write for example --report sarif=out.sarif"
            )
        if name not in {f.value for f in CheckFormat}:
            from fragdoctor.report.base import check_format

            check_format("check", name)  # raises with a suggestion
        targets.append((name, Path(file)))
    if len({os.path.abspath(t) for _, t in targets}) < len(targets):  # noqa: PTH100 - lexical
        raise ConfigError("Two reports go to one file.", hint="Give each its own name.")
    return targets


def check_targets(
    files: Sequence[Path | None], baseline: Path | None, inputs: Sequence[str], *, force: bool
) -> None:
    """Refuse before the work what cannot be written after it."""
    for file in files:
        console.check_output(file, force=force or _is_step_summary(file), inputs=inputs)
    # A baseline is there to be renewed; another file of that name is not overwritten.
    renews = baseline is not None and baseline.is_file() and not force
    if baseline is not None and renews:
        from fragdoctor.gate.baseline import load_baseline

        load_baseline(str(baseline))
    console.check_output(baseline, force=force or renews, inputs=inputs)


def _is_step_summary(file: Path | None) -> bool:
    """Return whether a file is GitHub's summary of the running step, which is appended to."""
    summary = os.environ.get("GITHUB_STEP_SUMMARY", "")
    return file is not None and bool(summary) and str(file) == summary


def write_target(text: str, target: Path | None, *, force: bool) -> None:
    """Write a report to a file, or to the end of GitHub's summary of the running step."""
    if target is not None and _is_step_summary(target):
        with target.open("a", encoding="utf-8") as file:
            file.write(text)
        return
    console.write_report(text, target, force=force)


def _accept(judged: Sequence[FileJudgement], path: Path) -> str:
    """Write the baseline, unless an input is missing from it; return what was done."""
    from fragdoctor.gate.baseline import write_baseline
    from fragdoctor.gate.judgement import Status, new_baseline

    if any(f.status is Status.ERROR for f in judged):
        return "No baseline was written, because not all inputs could be read."
    console.write_report(write_baseline(new_baseline(judged)), path, force=True)
    return f"The baseline was written to {path}."
