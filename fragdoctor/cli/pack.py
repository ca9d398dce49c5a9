"""``fragdoctor pack``: how many processes of a kind share one GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fragdoctor.cli import console, options
from fragdoctor.cli.exit import OK
from fragdoctor.errors import ConfigError

if TYPE_CHECKING:
    from fragdoctor.model.gpu_sharing import Sharing


@options.taken
class PackOptions(options.EstimateOutput):
    """Options of the command."""

    inputs: list[str] | None = options.argument(
        "[INPUT]...",
        "What one process left: a snapshot, or a bundle that holds one",
        default=None,
    )
    # A list, so that a second GPU is refused instead of silently replacing the first.
    gpu: list[str] | None = options.option("NAME|SIZE", "Choose the GPU: a100-40g, h100, 24GiB")
    per_process: int | None = options.option(
        "SIZE", "Set the reserved memory of one process, instead of a recording"
    )
    processes: int | None = options.option(
        "N", "Ask whether this many processes fit side by side", min=1, max=1000
    )
    context: int | None = options.option(
        "SIZE", "Set what the CUDA context of one process takes", group=options.INPUT
    )


def pack(chosen: PackOptions) -> int:
    """Print how many processes share the GPU."""
    look = console.prepared(chosen, chosen.inputs or ())
    console.give(chosen, "pack", _sharing(chosen), look)
    return OK


def _sharing(chosen: PackOptions) -> Sharing:
    """Return how many processes share a GPU.

    Raises:
        ConfigError: the question is incomplete.
    """
    from fragdoctor.estimation.packing import PackRequest, processes_on_gpu
    from fragdoctor.inputs.cases import read_case
    from fragdoctor.model.case import Overrides
    from fragdoctor.model.gpus import gpu_of

    gpus, per_process = chosen.gpu or [], chosen.per_process
    if len(gpus) > 1:
        raise ConfigError("Processes share one GPU.", hint="Give --gpu once.")
    question = PackRequest(
        per_process_bytes=per_process,
        context_bytes=chosen.context,
        gpu=gpu_of(gpus[0]) if gpus else None,
        n_processes=chosen.processes,
    )
    with console.Progress("Replaying"):
        case = read_case(chosen.inputs, Overrides()) if chosen.inputs else None
        if per_process is not None and case is not None and case.snapshot is not None:
            raise ConfigError(
                "--per-process does not go with a recording: both say what one process takes.",
                hint="Give one of them.",
            )
        return processes_on_gpu(question, case)
