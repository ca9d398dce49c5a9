"""Other processes on the device: free it, or run fewer."""

from __future__ import annotations

from collections.abc import Iterator

from fragdoctor.diagnosis.remedies.plan import CURES, HELPS, MAY_HELP, Plan, Proposal, propose
from fragdoctor.model.diagnosis import Cause, Predicted
from fragdoctor.model.finding import Confidence
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
    own = r.needed_bytes + min(r.non_pytorch_bytes or 0, CONTEXT_ALLOWANCE_BYTES)
    n = r.total_bytes // own
    yield propose(
        "fewer-processes",
        f"Run at most {n} such process{'' if n == 1 else 'es'} on this device"
        if n
        else "Use a larger device: not even one such process fits",
        weight=HELPS,
        confidence=Confidence.POSSIBLE,
        change="one process per GPU, or fewer workers",
        why=f"One process needs {format_size(own)} (live, request and context); "
        f"{format_size(r.total_bytes)} hold {n} of them.",
        cost="Less parallel work on one device.",
        verify="The sum over nvidia-smi's processes stays below the device's size.",
        predicted=Predicted(fits=n > 0, method="arithmetic"),
    )
