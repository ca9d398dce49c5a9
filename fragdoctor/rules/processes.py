"""FD5xx: memory of other processes, other libraries and other ranks."""

from __future__ import annotations

from collections.abc import Iterator

from fragdoctor.model.finding import Confidence, Evidence, Severity
from fragdoctor.rules.failed_request import CONTEXT_ALLOWANCE_BYTES
from fragdoctor.rules.rule import Context, Found, needed, rule
from fragdoctor.units import format_share, format_size


@rule("FD501", Severity.WARNING)
def other_process(context: Context) -> Iterator[Found]:
    """Another process holds memory of the device.

    What it finds. Memory of other processes, listed in the message or left over when everything of
    this process is deducted from the device.

    Why it costs memory. A device is shared by all processes on it: leftover workers, notebooks,
    other ranks that all chose device 0.

    Evidence used. Device size, free memory, processes and own memory as printed in the message.

    What to do. nvidia-smi names the holders: end leftovers, give each rank its own device.

    What it can get wrong. In a container the listed process may be this very one; it is left out
    where its size fits. Without process lines the remainder may be other libraries of this process.

    Example. Process 4242 holds 6.35 of 8 GiB.

    References. torch.cuda.mem_get_info; torch.cuda.set_device.
    """
    r = context.need_request()
    why = "no input says how large the device is and what others hold"
    held = needed(r.other_bytes, why)
    missing = max(1, r.requested_bytes - (r.free_bytes or 0))
    if held < missing or r.is_of_limit:
        return
    pids = ", ".join(str(p.pid) for p in r.other_processes)
    who = f"Process {pids} holds" if pids else "Others outside this PyTorch hold about"
    yield Found(
        f"{who} {format_size(held)} of {format_size(r.total_bytes)} "
        f"({format_share(held, r.total_bytes or 0)}).",
        confidence=Confidence.PROVEN if pids else Confidence.POSSIBLE,
        n_bytes=held,
        evidence=(Evidence("held by others", held, "bytes", r.source),),
    )


@rule("FD502", Severity.WARNING)
def memory_outside_pytorch(context: Context) -> Iterator[Found]:
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
        f"{format_size(outside)} of this process's {format_size(r.process_bytes)} lie outside "
        "PyTorch's cache.",
        confidence=Confidence.PROVEN,
        n_bytes=outside,
        evidence=(Evidence("outside PyTorch", outside, "bytes", r.source),),
    )
