"""``fragdoctor fit``: peak memory against batch size, from recordings at several batch sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from fragdoctor.cli import console, options
from fragdoctor.cli.exit import OK
from fragdoctor.errors import ConfigError
from fragdoctor.frozen import frozen

if TYPE_CHECKING:
    from fragdoctor.model.snapshot import Snapshot
    from fragdoctor.report.base import RenderOptions


@frozen(kw_only=True)
class FitOptions(options.EstimateOutput):
    """What is asked of recordings at several batch sizes."""

    inputs: Annotated[
        list[str] | None,
        typer.Argument(metavar="RECORDING...", help="Snapshots, each of another batch size"),
    ] = None
    batches: Annotated[
        str | None,
        options.option(
            "--batches", "N,N,...", "Set the batch size of each recording, in their order"
        ),
    ] = None
    gpu: options.OneGpu = None
    capacity: Annotated[
        int | None,
        options.option(
            "--capacity", "SIZE", "Set what PyTorch can have, instead of --gpu", parser=options.size
        ),
    ] = None
    context: options.CudaContext = None
    headroom: options.Headroom = None
    explain: options.Explain = False


def fit(chosen: FitOptions) -> int:
    """Fit the recordings and print the largest batch that follows."""
    console.answer(chosen, chosen.inputs, lambda look: _answer(chosen, look))
    return OK


def _answer(chosen: FitOptions, look: RenderOptions) -> str:
    """Return the report on peak memory against batch size.

    Raises:
        ConfigError: the question is not complete.
        InputError: an input is no recording.
    """
    from fragdoctor.estimation.gpus import gpu_of
    from fragdoctor.estimation.peak_fit import BatchQuestion, fit_batches
    from fragdoctor.estimation.recordings import parse_batches
    from fragdoctor.report.base import render

    inputs, gpus = chosen.inputs or [], chosen.gpu or []
    if len(gpus) > 1:
        raise ConfigError("The largest batch is asked for one GPU.", hint="Give --gpu once.")
    if gpus and chosen.capacity is not None:
        raise ConfigError("--gpu and --capacity exclude each other.", hint="Give one of them.")
    if len(inputs) < 2:
        raise ConfigError(
            "A trend needs two or more recordings.",
            hint="fragdoctor fit b4.pickle b8.pickle --batches 4,8 --gpu 24GiB",
        )
    question = BatchQuestion(
        batches=None if chosen.batches is None else parse_batches(chosen.batches),
        gpu=gpu_of(gpus[0]) if gpus else None,
        capacity_bytes=chosen.capacity,
        context_bytes=chosen.context,
        headroom_bytes=chosen.headroom,
    )
    with console.Progress("Fitting"):
        found = fit_batches([(name, _snapshot(name)) for name in inputs], question)
    return render("fit", chosen.output_format.value, found, look, explain=chosen.explain)


def _snapshot(name: str) -> Snapshot:
    from fragdoctor.inputs.cases import read_snapshot

    return read_snapshot(name)


command = options.command_of(FitOptions, fit)
