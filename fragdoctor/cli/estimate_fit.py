"""The part of ``fragdoctor estimate`` about recordings at several batch sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fragdoctor.cli import console
from fragdoctor.cli.estimate_options import EstimateOptions
from fragdoctor.errors import ConfigError

if TYPE_CHECKING:
    from fragdoctor.model.snapshot import Snapshot
    from fragdoctor.report.base import RenderOptions


def answer(chosen: EstimateOptions, look: RenderOptions) -> str:
    """Return the report on peak memory against batch size.

    Raises:
        ConfigError: the question is not complete.
        InputError: an input is no recording.
    """
    from fragdoctor.estimation.fit import BatchQuestion, fit_batches
    from fragdoctor.estimation.gpus import gpu_of
    from fragdoctor.estimation.recordings import parse_batches
    from fragdoctor.report.estimate.batch_json import batch_fit_document
    from fragdoctor.report.estimate.batch_text import render_batch_fit
    from fragdoctor.report.json import dumps

    inputs, gpus = chosen.inputs or [], chosen.gpu or []
    if len(gpus) > 1:
        raise ConfigError("The largest batch is asked for one GPU.", hint="Give --gpu once.")
    if gpus and chosen.capacity is not None:
        raise ConfigError("--gpu and --capacity exclude each other.", hint="Give one of them.")
    if len(inputs) < 2:
        raise ConfigError(
            "A trend needs two or more recordings.",
            hint="fragdoctor estimate b4.pickle b8.pickle --batches 4,8 --gpu 24GiB",
        )
    question = BatchQuestion(
        batches=None if chosen.batches is None else parse_batches(chosen.batches),
        gpu=gpu_of(gpus[0]) if gpus else None,
        capacity_bytes=chosen.capacity,
        context_bytes=chosen.context,
        headroom_bytes=chosen.headroom,
    )
    with console.Progress("Fitting"):
        fit = fit_batches([(name, _snapshot(name)) for name in inputs], question)
    if chosen.as_json:
        return dumps(batch_fit_document(fit))
    return render_batch_fit(fit, look, explain=chosen.explain)


def _snapshot(name: str) -> Snapshot:
    from fragdoctor.inputs.cases import read_snapshot

    return read_snapshot(name)
