"""What follows from where a text says that memory is, if the failure itself has no figures."""

from __future__ import annotations

from typing import Final

from fragdoctor.diagnosis.decision import Hypothesis, distinct
from fragdoctor.lazy import regex
from fragdoctor.model.case import GPU_TABLE, OomMessage
from fragdoctor.model.diagnosis import Cause
from fragdoctor.model.ledger import Ledger
from fragdoctor.rules.failed_request import FailedRequest
from fragdoctor.rules.traceback_signs import FIRST_GPU, sign_of

OPEN: Final = (Cause.CAPACITY, Cause.UNKNOWN, Cause.OTHER_PROCESS, Cause.LEAK)
"""Readings of a failure without figures that where memory is may settle."""

ON_HOST: Final = (
    "It fails only when more of the host's memory is used (more DataLoader workers, weights kept "
    "there in page-locked memory), so host memory is what the driver could not get. On Windows it "
    "counts against the page file."
)
OF_RANKS: Final = (
    "The processes of several GPUs also hold memory on one of them: each makes a CUDA context "
    "there (0.3 to 0.9 GiB), or loads a checkpoint onto it."
)
OF_SHARING: Final = (
    "According to the text, {n} processes of this program share one GPU: each has its own CUDA "
    "context, model and cache there."
)
OF_OTHERS: Final = (
    "According to the text, other programs use a GPU of this machine. A program that chooses "
    "another GPU after CUDA has started, or misspells the name of the variable, still runs on the "
    "first."
)
OF_FIRST: Final = (
    "According to the text, the program also uses a GPU that was not chosen for it: tensors moved "
    "by .cuda() or to 'cuda' without a number, and CUDA's context, go to the first GPU that it "
    "sees, which others may fill."
)
OF_EARLIER: Final = (
    "According to the text, memory was taken before this program took any: another program holds "
    "it, or what is left of an earlier run, perhaps where nvidia-smi does not show it (another "
    "container)."
)
RANKS: Final = regex(r"(?i)process|\branks?\b|\bddp\b|\bworkers?\b|torchrun|DistributedDataPar")
_DATA_PARALLEL: Final = regex(r"(?<!Distributed)\bDataParallel")
"""One process for each GPU, and one for all of them, the first of which then holds more."""


def in_ledger(
    found: Hypothesis, message: OomMessage | None, ledger: Ledger, failed: FailedRequest | None
) -> Hypothesis:
    """Return what follows from the ledger of a text, or the reading of the message itself.

    Figures say more than what people write around them, unless they show that the GPU had room.
    """
    if message is None or message.kind == "kv-cache" or message.is_warning:
        return found
    if not (message.is_device_oom and found.cause in OPEN):
        return found
    had_room = failed is not None and failed.is_covered_by_free
    if ledger.needs_host and (failed is None or had_room):
        row, cause, summary = "host", Cause.HOST_MEMORY, ON_HOST
    elif message.requested_bytes is None and (told := _of_others(message, ledger)):
        cause = Cause.OTHER_PROCESS
        row, summary = told
    else:
        return found
    return Hypothesis(
        cause,
        summary,
        settled_by="nvidia-smi during the run shows what each GPU holds, and for whom.",
        row=f"ledger-{row}",
        also=distinct((found.cause, *found.also), cause),
    )


def _of_others(message: OomMessage, ledger: Ledger) -> tuple[str, str] | None:
    """Return which processes besides this one hold the GPU's memory, as a row and a sentence."""
    sign = sign_of(message)
    is_of_ranks = RANKS.search(message.said) and not _DATA_PARALLEL.search(message.said)
    if sign is not None and sign.name == FIRST_GPU and is_of_ranks and not ledger.is_shared:
        return "ranks", OF_RANKS
    if ledger.uses_first and not ledger.is_chosen:
        return "first", OF_FIRST
    if ledger.n_sharing > 1:
        n = "several" if ledger.n_sharing == 2 else f"up to {ledger.n_sharing}"
        return "sharing", OF_SHARING.format(n=n)
    is_full = message.sub_kind == GPU_TABLE and ledger.free_gpu is not None
    if is_full or (ledger.has_others and not ledger.is_chosen):
        return "others", OF_OTHERS
    if ledger.held_before:
        return "earlier", OF_EARLIER
    return None
