"""FD502: this process holds much memory outside PyTorch's cache."""

from __future__ import annotations

from fragdoctor.model.finding import Confidence, Evidence, Severity
from fragdoctor.rules.failed_request import CONTEXT_ALLOWANCE_BYTES
from fragdoctor.rules.rule import Context, Findings, Found, needed, rule
from fragdoctor.units import format_size


@rule("FD502", Severity.WARNING)
def memory_outside_pytorch(context: Context) -> Findings:
    """This process holds much memory outside PyTorch's cache.

    What it finds. More than about 1.5 GiB between what the driver counts for this process and what
    PyTorch reserved.

    Why it costs memory. Context and libraries (NCCL, cuDNN, TensorRT), other frameworks that
    preallocate and CUDA graphs take memory that the caching allocator neither sees nor frees.

    Evidence used. The message's "this process has" and the reserved figure.

    What to do. Cap other frameworks (XLA_PYTHON_CLIENT_PREALLOCATE=false, TensorFlow's memory
    growth), fewer communicators, CUDA_MODULE_LOADING=LAZY.

    What it can get wrong. 0.3 to 0.9 GiB of context are normal and not reported.

    Example. 22.90 GiB in use by the process, 19.05 GiB of them reserved by PyTorch.

    References. CUDA semantics: Memory management.
    """
    r = context.need_request()
    why = "the message does not print the memory of this process"
    outside = needed(r.non_pytorch_bytes, why)
    if outside <= CONTEXT_ALLOWANCE_BYTES:
        return
    yield Found(
        f"{format_size(outside)} of this process's {format_size(r.process_bytes)} lies outside "
        "PyTorch's cache.",
        confidence=Confidence.PROVEN,
        n_bytes=outside,
        evidence=(Evidence("outside PyTorch", outside, "bytes", r.source),),
    )
