"""FD504: a CUDA library found no memory for itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from fragdoctor.model.finding import Confidence, Severity
from fragdoctor.rules.rule import Context, Found, rule

NAMES: Final = {"cublas": "cuBLAS", "cudnn": "cuDNN", "nccl": "NCCL"}


@rule("FD504", Severity.ERROR)
def starved_library(context: Context) -> Iterator[Found]:
    """A CUDA library found no memory for itself.

    What it finds. Messages of these libraries about failed allocations or initialization.

    Why it costs memory. They allocate outside PyTorch's cache. When the cache holds the whole
    device, nothing flushes it for them.

    Evidence used. The text of the message.

    What to do. Leave headroom: a memory fraction of 0.95, torch.cuda.empty_cache() before, handles
    and communicators created early.

    What it can get wrong. An index out of range on the device ruins the context and shows as the
    same message: rerun with CUDA_LAUNCH_BLOCKING=1.

    Example. CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle).

    References. CUDA semantics: cuBLAS workspaces; Memory management.
    """
    message = context.need_message()
    if message.kind not in NAMES:
        return
    yield Found(
        f"{NAMES[message.kind]} failed for lack of memory outside PyTorch's cache"
        f"{'' if message.is_device_oom else ', or of support for these shapes'}.",
        confidence=Confidence.LIKELY if message.is_device_oom else Confidence.POSSIBLE,
        key=message.kind,
    )
