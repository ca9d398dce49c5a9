"""What a bundle adds to the figures of a refusal: the driver's view, taken at the same moment."""

from __future__ import annotations

from dataclasses import replace

from fragdoctor.model.case import BundleDevice, BundleFacts, Overrides
from fragdoctor.rules.refusal import Refusal, known
from fragdoctor.rules.refusal_message import split_processes


def with_bundle(refusal: Refusal, facts: BundleFacts | None, overrides: Overrides) -> Refusal:
    """Return a refusal with what only the bundle knows; message and user come first.

    The limit counts only where the user named no fraction. Free memory and processes count only
    where the bundle was taken at the failure, and no message of that moment tells them.
    """
    device = facts.device(refusal.device) if facts is not None else None
    if facts is None or device is None or refusal.source == "user":
        return refusal
    is_same_moment = facts.reason == "oom" and facts.oom_device == refusal.device
    total = refusal.total_bytes or device.total_bytes
    limit = refusal.limit_bytes
    if limit is None and overrides.memory_fraction is None and device.memory_fraction and total:
        limit = int(device.memory_fraction * total)
    filled = replace(
        refusal,
        total_bytes=total,
        free_bytes=device.free_bytes
        if refusal.free_bytes is None and is_same_moment
        else refusal.free_bytes,
        limit_bytes=limit,
        # The fraction is read from PyTorch itself, so that none can be hidden by the wording.
        may_hide_limit=False,
    )
    return _with_processes(filled, device) if is_same_moment else filled


def _with_processes(refusal: Refusal, device: BundleDevice) -> Refusal:
    if refusal.process_bytes is not None or refusal.other_processes:
        return refusal
    own, others, own_pid = split_processes(
        known(device.process_bytes), device.other_processes, refusal.reserved_bytes
    )
    return replace(refusal, process_bytes=own, other_processes=others, own_pid=own_pid)
