"""``fragdoctor compare``: what changed between two runs, or where a series is heading."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import typer

from fragdoctor.cli import console, options
from fragdoctor.cli.exit import FINDINGS, OK
from fragdoctor.errors import ConfigError
from fragdoctor.report.base import DocumentFormat

if TYPE_CHECKING:
    from fragdoctor.model.case import Case


def step_list(text: str) -> list[float]:
    """Return the numbers of an option such as ``100,200,300``."""
    if isinstance(text, list):
        return text
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError as e:
        raise typer.BadParameter(f"{text!r} is not a list of numbers. Write 100,200,300.") from e
    if not all(abs(v) < 1e15 for v in values):
        raise typer.BadParameter(f"{text!r} contains a number that is not a step.")
    return values


@options.taken
class CompareOptions(options.FullOutput):
    """Options of the command."""

    paths: list[str] = options.argument(
        "A B [C]...",
        "Snapshots, messages, statistics, or folders of one recording each; in time order",
    )
    fail_on_growth: Any = options.option(
        "SIZE|%",
        "Exit with 1 if peak allocated or active memory grew by more, or a run newly fails",
        group=options.GATE,
    )
    steps: Any = options.option(
        "N,N,...",
        "Set the step of each run: the axis of growth over three or more",
        parser=step_list,
    )
    capacity: int | None = options.CAPACITY
    device: int | None = options.DEVICE
    torch_version: str | None = options.TORCH_VERSION
    output_format: DocumentFormat = options.FORMAT


def compare(asked: CompareOptions) -> int:
    """Compare the runs, print the report, and fail if they grew too much."""
    look = console.prepared(asked, asked.paths)
    paths = asked.paths
    if len(paths) < 2:
        raise ConfigError(
            "One run cannot be compared.",
            hint=f"Give at least two: fragdoctor compare {paths[0]} OTHER",
        )

    from fragdoctor.comparison.compare_cases import compare_cases
    from fragdoctor.gate.judgement import has_grown, judge_growth

    with console.Progress("Read") as progress:
        cases = _cases(paths, asked.device, asked.torch_version, progress)
        result = compare_cases(
            cases,
            steps=asked.steps,
            capacity_bytes=asked.capacity,
            explores=asked.output_format == "html",
        )
    judged = () if asked.fail_on_growth is None else judge_growth(result, asked.fail_on_growth)
    is_unknown = asked.fail_on_growth is not None and not judged
    # Standard output must be one JSON document: the error's, which then replaces the report.
    is_one_document = console.is_printed(asked.output) and asked.output_format == "json"
    if not (is_unknown and is_one_document):
        console.give(asked, "compare", result, look, judged=judged)
    if is_unknown:
        raise ConfigError(
            "It is unknown whether memory grew: the runs have no peak in common.",
            hint="Give snapshots, or memory_stats() of both.",
        )
    return FINDINGS if has_grown(judged) else OK


def _cases(
    paths: Sequence[str], device: int | None, version: str | None, progress: console.Progress
) -> Iterator[tuple[str, Case]]:
    """Yield one case after the other, so that only the first case's trace is kept."""
    from fragdoctor.inputs.cases import read_case
    from fragdoctor.inputs.remote import without_secrets
    from fragdoctor.model.case import Overrides

    overrides = Overrides(device=device, torch_version=version)
    for path in progress.each(list(paths)):
        case = read_case([_one_of(path)], overrides)
        name = without_secrets(path)
        held = () if case.snapshot is None else case.snapshot.devices
        if held and device is not None and device not in held:
            raise ConfigError(
                f"{name} holds nothing of device {device}.",
                hint=f"It is about device {', '.join(str(d) for d in held)}.",
            )
        yield name, case


def _one_of(path: str) -> str:
    """Return the bundle in the folder of a ``fragdoctor run``, or any other path unchanged.

    Raises:
        ConfigError: the folder holds bundles of several processes.
    """
    import os.path

    from fragdoctor.inputs.bundles import is_bundle
    from fragdoctor.inputs.discovery import discover

    if not os.path.isdir(path) or is_bundle(path):  # noqa: PTH112 - never raises, unlike Path
        return path
    bundles = [r.path for r in discover([path]).ranks if is_bundle(r.path)]
    if len(bundles) > 1:
        raise ConfigError(
            f"{path} holds the bundles of {len(bundles)} processes, but a run is only one of them.",
            hint=f"Name one of them, such as {bundles[0]}",
        )
    return bundles[0] if bundles else path
