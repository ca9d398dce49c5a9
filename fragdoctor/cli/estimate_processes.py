"""The part of ``fragdoctor estimate`` about several processes on one GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from fragdoctor.cli import console, options
from fragdoctor.errors import ConfigError

if TYPE_CHECKING:
    from fragdoctor.model.case import Case
    from fragdoctor.report.base import RenderOptions

PerProcess = Annotated[
    int | None,
    typer.Option(
        "--per-process",
        metavar="SIZE",
        parser=options.size,
        help="Ask how many processes of this reserved memory share the GPU",
        show_default=False,
    ),
]
Processes = Annotated[
    int | None,
    typer.Option(
        "--processes",
        min=1,
        max=1000,
        metavar="N",
        help="Ask whether so many processes fit side by side",
        show_default=False,
    ),
]
Headroom = Annotated[
    int | None,
    typer.Option(
        "--headroom",
        metavar="SIZE",
        parser=options.size,
        help="Keep so much of the GPU free; a twentieth of it otherwise",
        show_default=False,
    ),
]
Context = Annotated[
    int | None,
    typer.Option(
        "--context",
        metavar="SIZE",
        parser=options.size,
        help="Set what the CUDA context of one process takes",
        show_default=False,
    ),
]


def is_about_processes(
    inputs: Sequence[str], per_process: int | None, processes: int | None
) -> bool:
    """Return whether the question is how many processes fit, not whether a model does."""
    if per_process is not None or processes is not None:
        return True
    from pathlib import Path

    from fragdoctor.estimate.shapes import is_capture

    return len(inputs) == 1 and is_capture(Path(inputs[0]))


def answer(
    inputs: Sequence[str],
    gpus: Sequence[str],
    look: RenderOptions,
    *,
    per_process: int | None,
    processes: int | None,
    headroom: int | None,
    context: int | None,
    as_json: bool,
) -> str:
    """Return the report on how many processes share a GPU.

    Raises:
        ConfigError: the question is not complete.
    """
    from fragdoctor.estimate.gpus import gpu_of
    from fragdoctor.estimate.processes import Question, processes_on_gpu
    from fragdoctor.report.estimate.processes import render_sharing, sharing_document
    from fragdoctor.report.json import dumps

    if len(gpus) > 1:
        raise ConfigError("Processes share one GPU.", hint="Give --gpu once.")
    if per_process == 0:
        raise ConfigError("A process of no memory needs no GPU.", hint="--per-process 6GB")
    question = Question(
        per_process_bytes=per_process,
        context_bytes=context,
        headroom_bytes=headroom,
        gpu=gpu_of(gpus[0]) if gpus else None,
        n_processes=processes,
    )
    with console.Progress("Replaying"):
        sharing = processes_on_gpu(question, _case(inputs))
    return dumps(sharing_document(sharing)) if as_json else render_sharing(sharing, look)


def _case(inputs: Sequence[str]) -> Case | None:
    if not inputs:
        return None
    from fragdoctor.intake.inputs import read_case
    from fragdoctor.model.case import Overrides

    return read_case(inputs, Overrides())
