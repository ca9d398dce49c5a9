"""Memory snapshots of a rehearsal, in the form that PyTorch's own function returns."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from fragdoctor.model.settings import AllocatorSettings
from fragdoctor.rehearse.engine.gpu import ACTIONS, STATES, Event, Gpus
from fragdoctor.rehearse.engine.stacks import Stacks

OOM: Final = ACTIONS.index("oom")
ALLOC: Final = ACTIONS.index("alloc")


@dataclass(slots=True)
class History:
    """What a recording keeps, as ``_record_memory_history`` was asked.

    Attributes:
        enabled: None, ``state`` or ``all``.
        context: None, ``state``, ``alloc`` or ``all``.
        max_entries: events kept of each device.
        skip_actions: actions left out.
        first: number of the first event, by device.
        annotations: what ``record_function`` named, in order.
        metadata: (number of event, text) from which on a text belongs to the events, by device.
    """

    enabled: str | None = "all"
    context: str | None = "all"
    max_entries: int = 2**63 - 1
    skip_actions: tuple[str, ...] = ()
    first: dict[int, int] = field(default_factory=dict)
    annotations: list[dict[str, Any]] = field(default_factory=list)


def snapshot(
    gpus: Gpus,
    n_devices: int,
    stacks: Stacks,
    history: History,
    settings: AllocatorSettings,
    *,
    only_pool: tuple[int, int] | None = None,
    at: Any = None,
) -> dict[str, Any]:
    """Return segments, traces, settings and annotations; ``at`` the moment of a failed request."""
    has_stacks = history.enabled is not None and history.context is not None
    segments: list[dict[str, Any]] = []
    for device in range(n_devices):
        found = gpus.segments(device) if at is None else at.segments[device]
        segments += _segments(found, device, stacks if has_stacks else None, only_pool)
    ends = [None] * n_devices if at is None else at.n_events
    traces = [_trace(gpus, device, stacks, history, ends[device]) for device in range(n_devices)]
    return {
        "segments": segments,
        "device_traces": traces,
        "allocator_settings": settings_of(settings),
        "external_annotations": list(history.annotations),
    }


def settings_of(settings: AllocatorSettings) -> dict[str, Any]:
    """Return the settings as a snapshot names them."""
    limit = settings.max_split_bytes
    divisions = enumerate(settings.roundup_power2_divisions)
    return {
        "PYTORCH_CUDA_ALLOC_CONF": settings.conf,
        "max_split_size": -1 if limit is None else limit,
        "garbage_collection_threshold": float(settings.garbage_collection_threshold),
        "expandable_segments": settings.expandable_segments,
        "pinned_num_register_threads": 1,
        "release_lock_on_cudamalloc": False,
        "pinned_use_cuda_host_register": False,
        "roundup_power2_divisions": {str(1 << i): d for i, d in divisions},
    }


def _pool_id(pool: int) -> tuple[int, int]:
    return (0, pool)


def _segments(
    segments: Iterable[Any], device: int, stacks: Stacks | None, only_pool: tuple[int, int] | None
) -> list[dict[str, Any]]:
    found = []
    for segment, blocks in segments:
        if only_pool not in {None, (0, 0)} and _pool_id(segment.pool) != only_pool:
            continue
        shown = []
        sums = dict.fromkeys(STATES, 0)
        requested = 0
        for block in blocks:
            state = STATES[block.state]
            sums[state] += block.size
            if state != "inactive":
                requested += block.requested
            shown.append(
                {
                    "address": block.address,
                    "size": block.size,
                    "requested_size": block.requested,
                    "state": state,
                    "frames": [] if stacks is None else stacks.frames(block.stack),
                }
            )
        found.append(
            {
                "device": device,
                "address": segment.address,
                "total_size": segment.size,
                "allocated_size": sums["active_allocated"],
                "active_size": sums["active_allocated"] + sums["active_pending_free"],
                "requested_size": requested,
                "stream": segment.stream,
                "segment_type": "small" if segment.is_small else "large",
                "segment_pool_id": _pool_id(segment.pool),
                "is_expandable": bool(segment.is_expandable),
                "frames": [],
                "blocks": shown,
            }
        )
    return found


def _trace(
    gpus: Gpus, device: int, stacks: Stacks, history: History, end: int | None
) -> list[dict[str, Any]]:
    if history.enabled != "all":
        return []
    with_stacks = history.context in {"alloc", "all"}
    entries = []
    for event in gpus.trace(device, history.first.get(device, 0))[:end]:
        action = ACTIONS[event.action]
        if action not in history.skip_actions:
            entries.append(_entry(event, action, stacks if with_stacks else None))
    return entries[-history.max_entries :] if history.max_entries < len(entries) else entries


def _entry(event: Event, action: str, stacks: Stacks | None) -> dict[str, Any]:
    entry: dict[str, Any] = {"action": action}
    if event.action == OOM:
        entry["device_free"] = event.address
    else:
        entry["addr"] = event.address
    entry["size"] = event.size
    entry["stream"] = event.stream
    entry["time_us"] = event.time_us
    entry["compile_context"] = "N/A"
    entry["user_metadata"] = ""
    entry["pool_id"] = _pool_id(event.pool)
    if stacks is not None and event.stack >= 0:
        entry["frames"] = stacks.frames(event.stack)
    return entry
