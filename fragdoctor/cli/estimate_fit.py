"""The part of ``fragdoctor estimate`` about recordings at several batch sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from fragdoctor.cli import console, options
from fragdoctor.errors import ConfigError

if TYPE_CHECKING:
    from fragdoctor.model.snapshot import Snapshot
    from fragdoctor.report.base import RenderOptions

Batches = Annotated[
    str | None,
    typer.Option(
        "--batches",
        metavar="N,N,...",
        help="Set the batch size of each recording, in their order",
        show_default=False,
    ),
]
Capacity = Annotated[
    int | None,
    typer.Option(
        "--capacity",
        metavar="SIZE",
        parser=options.size,
        help="Set what PyTorch can have, instead of --gpu, for recordings at several batch sizes",
        show_default=False,
    ),
]


def is_about_batches(inputs: Sequence[str], batches: str | None) -> bool:
    """Return whether the inputs are several recordings, to be compared by batch size."""
    if batches is not None:
        return True
    from pathlib import Path

    from fragdoctor.estimate.shapes import is_capture

    return len(inputs) > 1 and any(is_capture(Path(name)) for name in inputs)


def answer(
    inputs: Sequence[str],
    gpus: Sequence[str],
    look: RenderOptions,
    *,
    batches: str | None,
    capacity: int | None,
    context: int | None,
    headroom: int | None,
    explain: bool,
    as_json: bool,
) -> str:
    """Return the report on peak memory against batch size.

    Raises:
        ConfigError: the question is not complete.
        InputError: an input is no recording.
    """
    from fragdoctor.estimate.batches import parse_batches
    from fragdoctor.estimate.fit import BatchQuestion, fit_batches
    from fragdoctor.estimate.gpus import gpu_of
    from fragdoctor.report.estimate.batch_json import batch_fit_document
    from fragdoctor.report.estimate.batch_text import render_batch_fit
    from fragdoctor.report.json import dumps

    if len(gpus) > 1:
        raise ConfigError("The largest batch is asked for one GPU.", hint="Give --gpu once.")
    if gpus and capacity is not None:
        raise ConfigError("--gpu and --capacity exclude each other.", hint="Give one of them.")
    if len(inputs) < 2:
        raise ConfigError(
            "A trend needs two or more recordings.",
            hint="fragdoctor estimate b4.pickle b8.pickle --batches 4,8 --gpu 24GiB",
        )
    question = BatchQuestion(
        batches=None if batches is None else parse_batches(batches),
        gpu=gpu_of(gpus[0]) if gpus else None,
        capacity_bytes=capacity,
        context_bytes=context,
        headroom_bytes=headroom,
    )
    with console.Progress("Fitting"):
        fit = fit_batches([(name, _snapshot(name)) for name in inputs], question)
    if as_json:
        return dumps(batch_fit_document(fit))
    return render_batch_fit(fit, look, explain=explain)


def _snapshot(name: str) -> Snapshot:
    from fragdoctor.intake.inputs import read_snapshot

    return read_snapshot(name)
