"""``fragdoctor analyze``: everything known about one process, or about the ranks of a job."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from contextlib import AbstractContextManager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from fragdoctor.cli import console, options
from fragdoctor.cli.exit import FINDINGS, OK, REFUSED
from fragdoctor.errors import ConfigError
from fragdoctor.frozen import frozen

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Executor

    from fragdoctor.inputs.discovery import Discovery
    from fragdoctor.model.case import Case, Overrides
    from fragdoctor.model.diagnosis import Diagnosis
    from fragdoctor.model.fleet import FleetReport, RankInput
    from fragdoctor.report.base import RenderOptions

Workers = Annotated[
    int | None,
    options.option(
        "--workers",
        "N",
        "Read several ranks in N processes; the cores of this machine where not given",
        min=1,
        max=256,
    ),
]
Dask = Annotated[
    str | None,
    options.option(
        "--dask",
        "ADDRESS",
        "Read several ranks on the dask workers of a scheduler: its address, or its scheduler.json",
    ),
]
Timeout = Annotated[
    float | None,
    options.option(
        "--timeout",
        "SECONDS",
        "Give up a rank of several that takes longer; 600 in workers, 0 for never",
        min=0.0,
    ),
]
WorkerMemory = Annotated[
    int | None,
    options.option(
        "--worker-memory",
        "SIZE",
        "Give up a rank of several that takes more memory of this machine",
        parser=options.size,
    ),
]
DEFAULT_TIMEOUT_S: Final = 600.0


class ReplayChoice(StrEnum):
    """The values of ``fleet.examine.Replays``."""

    NONE = "none"
    GROUPS = "groups"
    ALL = "all"


ReplayOption = Annotated[
    ReplayChoice,
    typer.Option(
        "--replay",
        help="Of several ranks, test the advice on all, on one of each group, or on none",
        show_default=True,
    ),
]


@frozen
class Engine:
    """Where ranks are read, as the command line says; ``None`` is to be chosen."""

    workers: int | None = None
    dask: str | None = None
    timeout_s: float | None = None
    memory_bytes: int | None = None


def analyze_fleet(
    discovery: Discovery,
    overrides: Overrides,
    look: RenderOptions,
    output_format: options.ReportFormat,
    *,
    engine: Engine,
    replays: ReplayChoice,
    rank_pages: Path | None = None,
    output: Path | None = None,
) -> tuple[FleetReport, str]:
    """Return the report of several ranks, and its text.

    A page of each rank is written to the folder ``rank_pages``, and the report leads to it.

    Raises:
        InputError: no rank could be read.
        ConfigError: several ranks have no report in that format, the workers cannot be had, or a
            page cannot be written.
    """
    from fragdoctor.fleet.examine import Replays, examine, share_out
    from fragdoctor.fleet.summary import summarise
    from fragdoctor.model.fleet import SummaryOptions
    from fragdoctor.report.base import VIEWS, render

    if output_format.value not in VIEWS["fleet"]:
        raise ConfigError(
            f"There is no {output_format} report of several ranks.",
            hint=f"The formats are {', '.join(VIEWS['fleet'])}; for one file after the other, "
            f"run: fragdoctor check --format {output_format}",
        )
    shared = share_out(discovery)
    pages = None if rank_pages is None else RankPages(rank_pages.absolute(), look)
    tested = Replays(replays.value)
    if pages is not None and tested is Replays.GROUPS:
        tested = Replays.ALL  # each page says what was tested, and each rank is read once
    with (
        console.Progress("Ranks:") as progress,
        _executor(engine, discovery) as executor,
    ):
        report = examine(
            shared.ranks,
            executor=executor,
            progress=progress.update,
            overrides=overrides,
            replays=tested,
            notes=shared.notes,
            timeout_s=_timeout(engine, is_here=executor is None),
            memory_bytes=engine.memory_bytes,
            on_diagnosis=pages,
        )
    if pages is None:
        return report, render("fleet", output_format.value, report, look)
    for what in pages.missing(report, shared.ranks):
        summarise(what, SummaryOptions(overrides, tested is Replays.ALL, on_diagnosis=pages))
    start = Path() if output is None else output.parent
    from urllib.parse import quote

    links = {k: quote(os.path.relpath(page, start)) for k, page in pages.named(report).items()}
    return report, render("fleet", output_format.value, report, look, pages=links)


@frozen
class RankPages:
    """Writes the page of each rank, on the worker that has just diagnosed it."""

    folder: Path
    look: RenderOptions

    def __call__(self, name: str, diagnosis: Diagnosis) -> None:
        """Write the page of a rank; one that cannot be written here is missing afterwards."""
        from fragdoctor.report.base import render

        text = render("analyze", "html", diagnosis, self.look)
        with contextlib.suppress(ConfigError, OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            console.write_report(text, self._page(name), force=True)

    def missing(self, report: FleetReport, ranks: Sequence[RankInput]) -> list[RankInput]:
        """Return the ranks without a page: their workers may write to another machine's disk."""
        from fragdoctor.fleet.summary import name_of

        read = {row.rank.path for row in report.rows if row.rank.is_read}
        names = {name_of(what): what for what in ranks}
        return [w for name, w in names.items() if name in read and not self._page(name).exists()]

    def named(self, report: FleetReport) -> dict[str, Path]:
        """Name the pages after the labels of their ranks; return them by label.

        Raises:
            ConfigError: a page could not be written.
        """
        pages = {}
        for number, row in enumerate(row for row in report.rows if row.rank.is_read):
            name = re.sub(r"[^A-Za-z0-9]+", "-", row.label).strip("-")[:40]
            page = self.folder / f"{number:04d}-{name or 'rank'}.html"
            try:
                self._page(row.rank.path).replace(page)
            except OSError as e:
                raise ConfigError(
                    f"The page of {row.label} could not be written to {self.folder}.",
                    hint="Name another folder, on a disk with room.",
                ) from e
            pages[row.label] = page
        return pages

    def _page(self, name: str) -> Path:
        """Return where the page of a rank lies until its label is known."""
        digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()
        return self.folder / f"{digest[:24]}.html"


def _timeout(engine: Engine, *, is_here: bool) -> float | None:
    if engine.timeout_s is None:
        return None if is_here else DEFAULT_TIMEOUT_S
    return engine.timeout_s or None


def _executor(engine: Engine, found: Discovery) -> AbstractContextManager[Executor | None]:
    """Return the workers; None (this process) for a small job that asks for no guard.

    Raises:
        ConfigError: these options or inputs do not go together.
    """
    from fragdoctor.fleet.engine import default_workers, in_this_process_only, may_hang
    from fragdoctor.fleet.workers import process_pool

    workers = default_workers(found.ranks) if engine.workers is None else engine.workers
    guards = bool(engine.timeout_s) or engine.memory_bytes is not None
    if in_this_process_only(found.ranks):
        if engine.dask is not None or workers > 1 or guards:
            raise ConfigError(
                "What memory:// names is known to this process alone.",
                hint="Leave out --workers, --dask, --timeout and --worker-memory.",
            )
        return process_pool(1)
    if engine.dask is not None:
        if engine.workers is not None or engine.memory_bytes is not None:
            raise ConfigError(
                "--dask excludes --workers and --worker-memory.",
                hint="Workers of dask are given theirs where they start: "
                "dask worker --nworkers 8 --memory-limit 4GiB ADDRESS",
            )
        from fragdoctor.fleet.workers import dask_cluster

        return dask_cluster(engine.dask)
    return process_pool(
        min(workers, len(found.ranks)),
        memory_bytes=engine.memory_bytes,
        is_needed=guards or may_hang(found.ranks),
    )


def fleet_exit_code(
    report: FleetReport, fail_on: options.FailOn | None, *, exit_zero: bool = False
) -> int:
    """Return 3 if a rank was refused, 1 if one has a finding as severe as ``fail_on``, else 0."""
    from fragdoctor.model.finding import Severity

    if any(row.rank.exit_code == REFUSED for row in report.rows):
        return REFUSED
    if fail_on is None or exit_zero:
        return OK
    threshold = int(Severity[fail_on.value.upper()])
    found = any(f.severity >= threshold for row in report.rows for f in row.rank.findings)
    return FINDINGS if found else OK


@frozen(kw_only=True)
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
    batch: options.Batch = None
    workers: Workers = None
    dask: Dask = None
    timeout: Timeout = None
    worker_memory: WorkerMemory = None
    replay: ReplayOption = ReplayChoice.GROUPS
    rank_pages: Annotated[
        Path | None,
        options.option(
            "--rank-pages",
            "FOLDER",
            "Of several ranks, write a page of each into a new folder, linked from the page "
            "of the job (-o job.html)",
        ),
    ] = None
    continue_with: options.ContinueWith = None
    rehearse: Annotated[
        bool,
        typer.Option(
            "--rehearse",
            help="Rehearse the command of a bundle on this machine: it continues the recording, "
            "and changes are tried until one fits",
        ),
    ] = False
    at: Annotated[
        str | None,
        options.option(
            "--at",
            "MOMENT",
            "Show what was live at a moment: step:3 (its peak), event:1200, peak, oom, end; "
            "step:3..step:6 shows what changed between two",
        ),
    ] = None
    output_format: options.Format = options.ReportFormat.TEXT
    fail_on: options.FailOnOption = None


def analyze(asked: AnalyzeOptions) -> int:
    """Diagnose the inputs, as one case or as the ranks of one job, and print the report."""
    look, overrides, paths = console.look_of(asked), asked.overrides(), asked.paths
    further_name = asked.continue_with
    inputs = paths if further_name is None else [*paths, further_name]
    console.check_output(asked.output, force=asked.force, inputs=inputs)

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
        if asked.rank_pages is not None:
            _check_rank_pages(asked)
        ranks, text = analyze_fleet(
            found,
            overrides,
            look,
            asked.output_format,
            engine=Engine(asked.workers, asked.dask, asked.timeout, asked.worker_memory),
            replays=asked.replay,
            rank_pages=asked.rank_pages,
            output=asked.output,
        )
        console.write_report(text, asked.output, force=asked.force)
        return fleet_exit_code(ranks, asked.fail_on, exit_zero=asked.exit_zero)
    if asked.rank_pages is not None:
        raise ConfigError(
            "--rank-pages is about several ranks, and this is one.", hint="Leave it out."
        )
    with console.Progress("Reading"):
        case = read_case(paths if found is None else found.case_names, overrides)

        from fragdoctor.diagnosis.pipeline import diagnose

        further = None if further_name is None else read_snapshot(further_name)
        diagnosis = diagnose(case, continue_with=further, at=asked.at)
        prescribed = ""
        if asked.rehearse:
            diagnosis, prescribed = _rehearsed(asked, case, diagnosis, look)
        report_progress("Writing the report")
        report = render("analyze", asked.output_format.value, diagnosis, look) + prescribed
    console.write_report(report, asked.output, force=asked.force)
    return exit_code(diagnosis, asked.fail_on, exit_zero=asked.exit_zero)


def _rehearsed(
    asked: AnalyzeOptions, case: Case, diagnosis: Diagnosis, look: RenderOptions
) -> tuple[Diagnosis, str]:
    """Return the diagnosis continued with a rehearsal of the bundle's command, and a cure as text.

    Raises:
        ConfigError: the command is not known or cannot be rehearsed.
    """
    from fragdoctor.cli.rehearse_after import DEFAULT_TIME, follow
    from fragdoctor.model.hooks import report_progress
    from fragdoctor.report.base import render

    if asked.output_format is not options.ReportFormat.TEXT or asked.continue_with is not None:
        raise ConfigError(
            "--rehearse is for reports as text, and makes what --continue-with takes.",
            hint="Otherwise: fragdoctor rehearse --cure, or --snapshot and --continue-with.",
        )
    command = () if case.bundle is None else case.bundle.command
    found = follow(
        case, diagnosis, command, DEFAULT_TIME, lambda t: report_progress(f"Rehearsing {t}")
    )
    return found.diagnosis, "\n" + render("prescription", "text", found.prescription, look)


def _check_rank_pages(asked: AnalyzeOptions) -> None:
    if asked.output_format is not options.ReportFormat.HTML or asked.output is None:
        raise ConfigError("--rank-pages belongs to a page.", hint="Write it with -o job.html.")
    folder = asked.rank_pages
    if folder is not None and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            f"{folder} exists already and is not empty.", hint="Name a new folder: nothing is lost."
        )


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


command = options.command_of(AnalyzeOptions, analyze)
