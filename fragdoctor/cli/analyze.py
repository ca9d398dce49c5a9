"""``fragdoctor analyze``: everything known about one process or about the ranks of a job."""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager, chdir
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from fragdoctor.cli import console, options
from fragdoctor.cli.exit import REFUSED
from fragdoctor.errors import ConfigError
from fragdoctor.model.hooks import report_progress
from fragdoctor.report.base import VIEWS, RenderOptions, render

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from fragdoctor.inputs.discovery import Discovery
    from fragdoctor.model.case import Case, Overrides
    from fragdoctor.model.diagnosis import Diagnosis
    from fragdoctor.model.fleet import FleetReport

DEFAULT_TIMEOUT_S: Final = 600.0
_several_ranks, _ = options.under(options.SEVERAL_RANKS)


@options.taken
class RankOptions(options.DiagnosisOptions):
    """How several ranks are read; fragdoctor chooses if an option is ``None``."""

    workers: int | None = _several_ranks(
        "N", "Read several ranks in N processes; by default, one for each core", min=1, max=256
    )
    dask: str | None = _several_ranks(
        "ADDRESS",
        "Read several ranks on the dask workers of a scheduler: its address, or its scheduler.json",
    )
    timeout: float | None = _several_ranks(
        "SECONDS",
        "Give up on a rank of several that takes longer; 600 in workers, 0 for never",
        min=0.0,
    )
    worker_memory: int | None = _several_ranks(
        "SIZE", "Give up on a rank of several that takes more host memory"
    )
    replay: Literal["none", "groups", "all"] = _several_ranks(
        None,
        "Test the advice on all of several ranks, on one of each group, or on none",
        default="groups",
        show_default=True,
    )


def analyze_fleet(
    discovery: Discovery, overrides: Overrides, look: RenderOptions, asked: RankOptions
) -> tuple[FleetReport, str]:
    """Return the report of several ranks, and its text.

    Raises:
        InputError: no rank could be read.
        ConfigError: the format is not available for several ranks, or workers cannot be started.
    """
    from fragdoctor.fleet.examine import Replays, examine, share_out
    from fragdoctor.model.fleet import SummaryOptions

    form = asked.output_format
    if form not in VIEWS["fleet"]:
        raise ConfigError(
            f"There is no {form} report for several ranks.",
            hint=f"The formats are {', '.join(VIEWS['fleet'])}; to check the files one by one, "
            f"run: fragdoctor check --format {form}",
        )
    ranks, notes = share_out(discovery)
    with (
        console.Progress("Ranks:") as progress,
        _executor(asked, discovery) as executor,
    ):
        report = examine(
            ranks,
            executor=executor,
            progress=progress.update,
            options=SummaryOptions(
                overrides,
                timeout_s=_timeout(asked.timeout, is_here=executor is None),
                memory_bytes=asked.worker_memory,
            ),
            replays=Replays(asked.replay),
            notes=notes,
        )
    return report, render("fleet", form, report, look)


def _timeout(seconds: float | None, *, is_here: bool) -> float | None:
    if seconds is None:
        return None if is_here else DEFAULT_TIMEOUT_S
    return seconds or None


def _executor(asked: RankOptions, found: Discovery) -> AbstractContextManager[Executor | None]:
    """Return the workers, or None (use this process) for a small job that asks for no guard.

    Raises:
        ConfigError: these options or inputs cannot be combined.
    """
    from fragdoctor.fleet.engine import default_workers, in_this_process_only, may_hang
    from fragdoctor.fleet.workers import process_pool

    workers = default_workers(found.ranks) if asked.workers is None else asked.workers
    guards = bool(asked.timeout) or asked.worker_memory is not None
    if in_this_process_only(found.ranks):
        if asked.dask is not None or workers > 1 or guards:
            raise ConfigError(
                "Only this process can read a memory:// input.",
                hint="Leave out --workers, --dask, --timeout and --worker-memory.",
            )
        return process_pool(1)
    if asked.dask is not None:
        if asked.workers is not None or asked.worker_memory is not None:
            raise ConfigError(
                "--dask excludes --workers and --worker-memory.",
                hint="Set those when you start the dask workers: "
                "dask worker --nworkers 8 --memory-limit 4GiB ADDRESS",
            )
        from fragdoctor.fleet.workers import dask_cluster

        return dask_cluster(asked.dask)
    return process_pool(
        min(workers, len(found.ranks)),
        memory_bytes=asked.worker_memory,
        is_needed=guards or may_hang(found.ranks),
    )


@options.taken
class AnalyzeOptions(RankOptions):
    """Options of the command."""

    paths: list[str] = options.argument(
        "PATH...",
        "A snapshot with its messages, statistics and logs; or snapshots of several ranks, a "
        "directory or pattern of them; - is standard input",
    )
    batch: int | None = options.option(
        "N", "Set the current batch size: advice then names another", group=options.INPUT, min=1
    )
    continue_with: str | None = options.CONTINUE_WITH
    rehearse: bool = options.flag(
        "Rehearse a bundle's command on this machine to continue the recording and try changes "
        "until one fits"
    )
    at: str | None = options.option(
        "MOMENT",
        "Show what was live at a moment: step:3 (its peak), event:1200, peak, oom, end; "
        "step:3..step:6 shows what changed between two",
    )


def analyze(asked: AnalyzeOptions) -> int:
    """Diagnose the inputs, as one case or as the ranks of one job, and print the report."""
    overrides, paths, further_name = asked.overrides(), asked.paths, asked.continue_with
    inputs = paths if further_name is None else [*paths, further_name]
    look = console.prepared(asked, inputs)

    from fragdoctor.inputs.cases import read_case, read_snapshot

    found = None
    # One file is the usual call, which must start quickly.
    if len(paths) > 1 or not (paths[0] == "-" or os.path.isfile(paths[0])):  # noqa: PTH113 - never raises, unlike Path
        from fragdoctor.inputs.discovery import discover

        found = discover(paths)
    if found is not None and found.is_fleet:
        of_one = {"--continue-with": asked.continue_with, "--at": asked.at}
        if given := [name for name, value in of_one.items() if value is not None]:
            raise ConfigError(
                f"{given[0]} takes one recording, but there are several.",
                hint="Give the snapshot of one rank.",
            )
        ranks, text = analyze_fleet(found, overrides, look, asked)
        console.write_report(text, asked.output, force=asked.force)
        if len(paths) == 2 and all(row.rank.rank is None for row in ranks.rows) and not asked.quiet:
            sys.stderr.write("Read as two ranks of one job; for two runs: fragdoctor compare\n")
        if any(row.rank.exit_code == REFUSED for row in ranks.rows):
            return REFUSED
        return asked.exit_code(f for row in ranks.rows for f in row.rank.findings)
    with console.Progress("Reading"):
        case = read_case(paths if found is None else found.case_names, overrides)

        from fragdoctor.diagnosis.pipeline import diagnose

        further = None if further_name is None else read_snapshot(further_name)
        diagnosis = diagnose(case, continue_with=further, at=asked.at)
        prescribed = ""
        if asked.rehearse:
            diagnosis, prescribed = _rehearsed(asked, case, diagnosis, look)
        report_progress("Writing the report")
        report = render("analyze", asked.output_format, diagnosis, look) + prescribed
    console.write_report(report, asked.output, force=asked.force)
    return asked.exit_code(diagnosis.findings)


def _rehearsed(
    asked: AnalyzeOptions, case: Case, diagnosis: Diagnosis, look: RenderOptions
) -> tuple[Diagnosis, str]:
    """Return the diagnosis continued with a rehearsal of the bundle's command, and a cure as text.

    Raises:
        ConfigError: the command is not known or cannot be rehearsed.
    """
    from fragdoctor.cli.rehearse import DEFAULT_TIME, follow

    if asked.output_format != "text" or asked.continue_with is not None:
        raise ConfigError(
            "--rehearse writes text reports only, and replaces --continue-with.",
            hint="Otherwise: fragdoctor rehearse --cure, or --snapshot and --continue-with.",
        )
    command = () if case.bundle is None else case.bundle.command
    # What the command names, and what the program opens, may be relative to where it was run.
    folder = Path("" if case.bundle is None else case.bundle.folder)
    with chdir(folder if folder.is_dir() else Path()):
        continued, prescription = follow(
            case, diagnosis, command, DEFAULT_TIME, lambda t: report_progress(f"Rehearsing {t}")
        )
    return continued, "\n" + render("prescription", "text", prescription, look)
