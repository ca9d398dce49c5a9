"""``fragdoctor analyze``: everything known about one process, or about the ranks of a job."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from fragdoctor.cli import console, fleet, options
from fragdoctor.cli.exit import FINDINGS, OK

if TYPE_CHECKING:
    from fragdoctor.inputs.discovery import Discovery
    from fragdoctor.model.diagnosis import Diagnosis

Paths = Annotated[
    list[str],
    typer.Argument(
        metavar="PATH...",
        help="A snapshot with its messages, statistics and logs; or snapshots of several ranks, a "
        "directory or pattern of them; - is standard input",
    ),
]


def analyze(
    paths: Paths,
    capacity: options.DeviceSize = None,
    request: options.Request = None,
    device: options.Device = None,
    memory_fraction: options.MemoryFraction = None,
    torch_version: options.TorchVersion = None,
    workers: fleet.Workers = None,
    dask: fleet.Dask = None,
    timeout: fleet.Timeout = None,
    worker_memory: fleet.WorkerMemory = None,
    replay: fleet.ReplayOption = fleet.ReplayChoice.GROUPS,
    output_format: options.Format = options.ReportFormat.TEXT,
    output: options.Output = None,
    force: options.Force = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    path_map: options.PathMap = None,
    no_color: options.NoColor = False,
    fail_on: options.FailOnOption = None,
    exit_zero: options.ExitZero = False,
) -> int:
    """Diagnose the inputs, as one case or as the ranks of one job, and print the report."""
    look = console.render_options(
        quiet=quiet,
        verbose=verbose,
        no_color=no_color,
        to_file=output is not None,
        path_map=path_map,
    )
    console.check_output(output, force=force, inputs=paths)

    from fragdoctor.inputs.cases import read_case
    from fragdoctor.model.case import Overrides
    from fragdoctor.model.hooks import report_progress
    from fragdoctor.report.base import render

    overrides = Overrides(
        capacity_bytes=capacity,
        request_bytes=request,
        device=device,
        memory_fraction=memory_fraction,
        torch_version=torch_version,
    )
    found = None if _is_one_file(paths) else _discovered(paths)
    if found is not None and found.is_fleet:
        ranks, text = fleet.analyze_fleet(
            found,
            overrides,
            look,
            output_format,
            engine=fleet.Engine(workers, dask, timeout, worker_memory),
            replays=replay,
        )
        console.write_report(text, output, force=force)
        return fleet.exit_code(ranks, fail_on, exit_zero=exit_zero)
    with console.Progress("Reading"):
        case = read_case(paths if found is None else found.case_names, overrides)

        from fragdoctor.diagnosis.pipeline import diagnose

        diagnosis = diagnose(case)
        report_progress("Writing the report")
        report = render("analyze", output_format.value, diagnosis, look)
    console.write_report(report, output, force=force)
    return exit_code(diagnosis, fail_on, exit_zero=exit_zero)


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
