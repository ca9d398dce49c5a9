"""Memory of other libraries in the same process, and headroom for them."""

from __future__ import annotations

from collections.abc import Iterator

from fragdoctor.diagnosis.remedies.plan import CURES, HELPS, MAY_HELP, Plan, Proposal, propose
from fragdoctor.model.diagnosis import Cause
from fragdoctor.model.finding import Confidence
from fragdoctor.units import format_size

LIBRARIES = ("cublas", "cudnn", "nccl")


def remedies(plan: Plan) -> Iterator[Proposal]:
    """Propose to cap other libraries, or to leave them room."""
    if plan.kind in LIBRARIES:
        yield _headroom(plan)
        return
    if plan.backend == "mps" or not plan.supports(Cause.NON_PYTORCH_MEMORY):
        return
    r = plan.refusal
    held = r.non_pytorch_bytes if r is not None else None
    is_main = plan.cause is Cause.NON_PYTORCH_MEMORY
    yield propose(
        "cap-other-libraries",
        "Cap what other libraries take in this process",
        weight=CURES if is_main else MAY_HELP - 5,
        confidence=Confidence.LIKELY if is_main else Confidence.POSSIBLE,
        setting="CUDA_MODULE_LOADING=LAZY",
        change="XLA_PYTHON_CLIENT_PREALLOCATE=false for JAX, set_memory_growth for TensorFlow, "
        "fewer NCCL communicators and channels (NCCL_MAX_NCHANNELS), smaller TensorRT workspaces",
        why=f"{format_size(held)} of this process lie outside PyTorch's cache."
        if held is not None
        else "Part of the device is held outside PyTorch's cache.",
        cost="Other libraries may run slower.",
        caveats=("A CUDA context of 0.3 to 0.9 GiB per process is normal and stays.",),
        verify="nvidia-smi minus memory_reserved() shrinks.",
        saves_bytes=held,
    )


def _headroom(plan: Plan) -> Proposal:
    return propose(
        "library-headroom",
        "Leave room for libraries",
        weight=HELPS + 15,
        confidence=Confidence.POSSIBLE,
        change="torch.cuda.set_per_process_memory_fraction(0.95), and create handles and "
        "communicators early, for example by one small matmul or all_reduce at start",
        why=f"{plan.kind} allocates for itself; a cache that fills the device leaves it nothing.",
        cost="PyTorch has 5 % less memory.",
        caveats=("An index out of range can look the same: rerun with CUDA_LAUNCH_BLOCKING=1.",),
        verify="mem_get_info() shows some hundred MiB free when the library starts.",
    )
