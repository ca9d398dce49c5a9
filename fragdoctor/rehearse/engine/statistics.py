"""``torch.cuda.memory_stats`` from the model's figures."""

from __future__ import annotations

from typing import Any

from fragdoctor.rehearse.engine.session import Session


def statistics(now: Session, device: int) -> dict[str, Any]:
    """Return the nested statistics of a device."""
    figures = now.gpus.figures(device)
    def stat(name, peak): 
        return {"current": figures[name], "peak": figures[peak], "allocated": 0, "freed": 0}
    zero = {"current": 0, "peak": 0, "allocated": 0, "freed": 0}
    out: dict[str, Any] = {}
    for key, name in (("allocated_bytes","allocated"),("reserved_bytes","reserved"),("active_bytes","active"),("requested_bytes","requested")):
        out[key] = {"all": stat(name, "peak_"+name), "large_pool": zero, "small_pool": zero}
    for key in ("allocation","segment","active","inactive_split","inactive_split_bytes"):
        out[key] = {"all": zero, "large_pool": zero, "small_pool": zero}
    out["oversize_allocations"] = zero
    out["oversize_segments"] = zero
    out["num_alloc_retries"] = figures["retries"]
    out["num_ooms"] = figures["ooms"]
    return out
