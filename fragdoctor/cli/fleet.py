"""``fragdoctor analyze`` for several ranks: workers, the report of the job, its exit code."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from fragdoctor.cli import console, options
from fragdoctor.cli.exit import FINDINGS, OK

if TYPE_CHECKING:
    from fragdoctor.fleet.discovery import Discovery
    from fragdoctor.model.case import Overrides
    from fragdoctor.model.fleet_report import FleetReport
    from fragdoctor.report.base import RenderOptions


class ReplayChoice(StrEnum):
    """The values of ``fleet.examine.Replays``."""

    NONE = "none"
    GROUPS = "groups"
    ALL = "all"


Workers = Annotated[
    int | None,
    typer.Option(
        "--workers",
        min=1,
        max=256,
        metavar="N",
        help="Read several ranks in N processes; the cores of this machine where not given",
    ),
]
ReplayOption = Annotated[
    ReplayChoice,
    typer.Option(
        "--replay",
        help="Of several ranks, test the advice on all, on one of each group, or on none",
        show_default=True,
    ),
]


def analyze_fleet(
    discovery: Discovery,
    overrides: Overrides,
    look: RenderOptions,
    output_format: options.ReportFormat,
    *,
    workers: int | None,
    replays: ReplayChoice,
) -> tuple[FleetReport, str]:
    """Return the report of several ranks, and its text.

    Raises:
        InputError: no rank could be read.
        ConfigError: several ranks have no report in that format.
    """
    from fragdoctor.fleet.engine import default_workers, process_pool
    from fragdoctor.fleet.examine import Replays, examine
    from fragdoctor.fleet.job_log import share_out
    from fragdoctor.report.fleet import fleet_renderer

    render = fleet_renderer(output_format.value)
    shared = share_out(discovery)
    n_workers = default_workers(discovery.ranks) if workers is None else workers
    with (
        console.Progress("Ranks:") as progress,
        process_pool(min(n_workers, len(discovery.ranks))) as executor,
    ):
        report = examine(
            shared.ranks,
            executor=executor,
            progress=progress.update,
            overrides=overrides,
            replays=Replays(replays.value),
            notes=shared.notes,
        )
    return report, render(report, look)


def exit_code(
    report: FleetReport, fail_on: options.FailOn | None, *, exit_zero: bool = False
) -> int:
    """Return 1 if any rank has a finding at least as severe as ``fail_on``, else 0."""
    from fragdoctor.model.finding import Severity

    if fail_on is None or exit_zero:
        return OK
    threshold = int(Severity[fail_on.value.upper()])
    found = any(f.severity >= threshold for row in report.rows for f in row.rank.findings)
    return FINDINGS if found else OK
