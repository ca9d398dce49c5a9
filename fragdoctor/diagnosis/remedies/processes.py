"""Other processes on the device: free it, or run fewer."""

from __future__ import annotations

from collections.abc import Iterator

from fragdoctor.analysis.sharing import TYPICAL_CONTEXT_BYTES, share_gpu
from fragdoctor.diagnosis.remedies.plan import CURES, HELPS, MAY_HELP, Plan, Proposal, propose
from fragdoctor.model.diagnosis import Cause, Predicted
from fragdoctor.model.estimate import ProcessDemand
from fragdoctor.model.finding import Confidence, Evidence
from fragdoctor.rules.refusal import CONTEXT_ALLOWANCE_BYTES, Refusal
from fragdoctor.units import format_size


def remedies(plan: Plan) -> Iterator[Proposal]:
    """Propose to look at, and reduce, the processes on the device."""
    if not plan.supports(Cause.OTHER_PROCESS):
        return
    is_main = plan.cause is Cause.OTHER_PROCESS
    r = plan.refusal
    held = r.other_bytes if r is not None else None
    listed = () if r is None else r.other_processes
    pids = ", ".join(str(p.pid) for p in listed)
    missing = None if r is None else max(0, r.requested_bytes - (r.free_bytes or 0))
    yield propose(
        "free-other-process",
        "Free the device from other processes",
        weight=CURES + 5 if is_main else MAY_HELP,
        confidence=Confidence.LIKELY if listed or is_main else Confidence.POSSIBLE,
        change=f"end or move process {pids}"
        if pids
        else "find the holders with nvidia-smi or fuser -v /dev/nvidia*, end leftover workers",
        why=plan.verdict.summary
        if is_main
        else f"{format_size(held)} may be held by other processes."
        if held
        else "A snapshot does not show other processes.",
        cost="None, if the other process is a leftover.",
        caveats=(
            "Ranks that all use device 0 look the same: torch.cuda.set_device(local_rank).",
            *(
                ("In a container the listed process may be this one.",)
                if r is not None and listed and r.process_bytes is None
                else ()
            ),
        ),
        verify="nvidia-smi shows only this process; mem_get_info() shows the memory free.",
        predicted=Predicted(fits=held >= missing, method="arithmetic")
        if held is not None and missing is not None and listed
        else None,
        saves_bytes=held,
    )
    if is_main and r is not None:
        yield from _fewer(r)


def _fewer(r: Refusal) -> Iterator[Proposal]:
    if r.total_bytes is None or r.needed_bytes is None:
        return
    context = min(r.non_pytorch_bytes or TYPICAL_CONTEXT_BYTES, CONTEXT_ALLOWANCE_BYTES)
    demand = ProcessDemand(
        max(r.needed_bytes, r.reserved_bytes or 0), context, "oom message", "oom message"
    )
    sharing = share_gpu(demand, gpu="", total_bytes=r.total_bytes)
    n = sharing.n_fit
    yield propose(
        "fewer-processes",
        f"Run at most {n} such process{'' if n == 1 else 'es'} on this device"
        if n
        else "Use a larger device: not even one such process fits",
        weight=HELPS,
        confidence=Confidence.POSSIBLE,
        change="one process per GPU, or fewer workers",
        why=f"One process needs {format_size(demand.total_bytes)} (its memory, the request and the "
        f"context); {format_size(r.total_bytes)} less {format_size(sharing.headroom_bytes)} of "
        f"headroom hold {n} of them.",
        cost="One fewer of N loses at most 1/N of the throughput, less where they wait for each "
        "other already.",
        verify="The sum over nvidia-smi's processes stays below the device's size.",
        predicted=Predicted(fits=n > 0, method="arithmetic"),
        evidence=(Evidence("one process", demand.total_bytes, "bytes", r.source),),
    )
