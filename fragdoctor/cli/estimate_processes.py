"""The part of ``fragdoctor estimate`` about several processes on one GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fragdoctor.cli import console
from fragdoctor.cli.estimate_options import EstimateOptions
from fragdoctor.errors import ConfigError

if TYPE_CHECKING:
    from fragdoctor.model.case import Case
    from fragdoctor.report.base import RenderOptions


def answer(chosen: EstimateOptions, look: RenderOptions) -> str:
    """Return the report on how many processes share a GPU.

    Raises:
        ConfigError: the question is not complete.
    """
    from fragdoctor.estimation.gpus import gpu_of
    from fragdoctor.estimation.packing import Question, processes_on_gpu
    from fragdoctor.report.estimate.processes import render_sharing, sharing_document
    from fragdoctor.report.json import dumps

    gpus, per_process = chosen.gpu or [], chosen.per_process
    if len(gpus) > 1:
        raise ConfigError("Processes share one GPU.", hint="Give --gpu once.")
    if per_process == 0:
        raise ConfigError("A process of no memory needs no GPU.", hint="--per-process 6GB")
    question = Question(
        per_process_bytes=per_process,
        context_bytes=chosen.context,
        headroom_bytes=chosen.headroom,
        gpu=gpu_of(gpus[0]) if gpus else None,
        n_processes=chosen.processes,
    )
    with console.Progress("Replaying"):
        case = _case(chosen.inputs or [])
        if per_process is not None and case is not None and case.snapshot is not None:
            raise ConfigError(
                "--per-process does not go with a recording: both say what one process takes.",
                hint="Give one of them.",
            )
        sharing = processes_on_gpu(question, case)
    return dumps(sharing_document(sharing)) if chosen.as_json else render_sharing(sharing, look)


def _case(inputs: Sequence[str]) -> Case | None:
    if not inputs:
        return None
    from fragdoctor.inputs.cases import read_case
    from fragdoctor.model.case import Overrides

    return read_case(inputs, Overrides())
