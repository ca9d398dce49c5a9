"""FD501: another process holds memory of the device."""

from __future__ import annotations

from fragdoctor.model.finding import Confidence, Evidence, Severity
from fragdoctor.rules.rule import Context, Findings, Found, needed, rule
from fragdoctor.units import format_share, format_size


@rule("FD501", Severity.WARNING)
def other_process(context: Context) -> Findings:
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
