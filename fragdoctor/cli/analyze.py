"""``fragdoctor analyze``: everything known about one process, or about the ranks of a job."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from fragdoctor.cli import console, fleet, options
from fragdoctor.cli.exit import FINDINGS, OK
from fragdoctor.cli.parameters import command_of
from fragdoctor.errors import ConfigError

if TYPE_CHECKING:
    from fragdoctor.inputs.discovery import Discovery
    from fragdoctor.model.diagnosis import Diagnosis


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalyzeOptions(options.CaseOptions):
    """What is asked about the inputs."""

    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH...",
            help="A snapshot with its messages, statistics and logs; or snapshots of several "
            "ranks, a directory or pattern of them; - is standard input",
        ),
    ]
    request: options.Request = None
    workers: fleet.Workers = None
    dask: fleet.Dask = None
    timeout: fleet.Timeout = None
    worker_memory: fleet.WorkerMemory = None
    replay: fleet.ReplayOption = fleet.ReplayChoice.GROUPS
    continue_with: Annotated[
        str | None,
        typer.Option(
            "--continue-with",
            metavar="SNAPSHOT",
            help="Take from another recording of the program (a rehearsal, a healthy run) how this "
            "one would have gone on",
        ),
    ] = None
    at: Annotated[
        str | None,
        typer.Option(
            "--at",
            metavar="MOMENT",
            help="Show what was live at a moment: step:3 (its peak), event:1200, peak, oom, end",
        ),
    ] = None
    output_format: options.Format = options.ReportFormat.TEXT
    fail_on: options.FailOnOption = None


def analyze(asked: AnalyzeOptions) -> int:
    """Diagnose the inputs, as one case or as the ranks of one job, and print the report."""
    look, overrides, paths = console.look_of(asked), asked.overrides(), asked.paths
    console.check_output(asked.output, force=asked.force, inputs=paths)

    from fragdoctor.inputs.cases import read_case, read_snapshot
    from fragdoctor.model.hooks import report_progress
    from fragdoctor.report.base import render

    found = None if _is_one_file(paths) else _discovered(paths)
    if found is not None and found.is_fleet:
        if asked.continue_with is not None:
            raise ConfigError(
                "--continue-with is about one recording, and these are several.",
                hint="Give the snapshot of one rank.",
            )
        if asked.at is not None:
            raise ConfigError(
                "--at is about one recording, and these are several.",
                hint="Give the snapshot of one rank.",
            )
        ranks, text = fleet.analyze_fleet(
            found,
            overrides,
            look,
            asked.output_format,
            engine=fleet.Engine(asked.workers, asked.dask, asked.timeout, asked.worker_memory),
            replays=asked.replay,
        )
        console.write_report(text, asked.output, force=asked.force)
        return fleet.exit_code(ranks, asked.fail_on, exit_zero=asked.exit_zero)
    with console.Progress("Reading"):
        case = read_case(paths if found is None else found.case_names, overrides)

        from fragdoctor.diagnosis.pipeline import diagnose

        other = asked.continue_with
        further = None if other is None else read_snapshot(other)
        diagnosis = diagnose(case, continue_with=further, at=asked.at)
        report_progress("Writing the report")
        report = render("analyze", asked.output_format.value, diagnosis, look)
    console.write_report(report, asked.output, force=asked.force)
    return exit_code(diagnosis, asked.fail_on, exit_zero=asked.exit_zero)


def _is_one_file(paths: list[str]) -> bool:
    """Return whether there is nothing to look for: the usual call, which must start quickly."""
    return len(paths) == 1 and (paths[0] == "-" or os.path.isfile(paths[0]))  # noqa: PTH113 - never raises, unlike Path


def _discovered(paths: list[str]) -> Discovery:
    from fragdoctor.inputs.discovery import discover

    return discover(paths)


def exit_code(
    diagnosis: Diagnosis, fail_on: options.FailOn | None, *, exit_zero: bool = False
) -> int:
    """Return 1 if a finding is at least as severe as ``fail_on``, else 0."""
    from fragdoctor.model.finding import Severity

    if fail_on is None or exit_zero:
        return OK
    threshold = Severity[fail_on.value.upper()]
    return FINDINGS if any(f.severity >= threshold for f in diagnosis.findings) else OK


command = command_of(AnalyzeOptions, analyze)
