"""From a case to one context per device, and to the one that the verdict is about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fragdoctor.analysis.device import analyze_device
from fragdoctor.analysis.result import DeviceAnalysis
from fragdoctor.errors import ConfigError
from fragdoctor.model.case import Case
from fragdoctor.model.oom import OomMessage
from fragdoctor.model.snapshot import Snapshot
from fragdoctor.model.story import LogStory
from fragdoctor.rules.context import Context
from fragdoctor.rules.request_sources import find_failed_request
from fragdoctor.story.build import build_story


def build_contexts(
    case: Case, analyses: Mapping[int, DeviceAnalysis] | None = None
) -> tuple[Context, ...]:
    """Return one context per device of the snapshot; one in all without a snapshot.

    Args:
        case: the inputs.
        analyses: of the snapshot's devices, where the caller has them; computed otherwise.

    Raises:
        ConfigError: the device that was asked for is not in the snapshot.
    """
    message = case.primary_message
    story = build_story(case.oom)
    if case.snapshot is None:
        return tuple(
            _context(case, device, None, message, story) for device in _stats_devices(case)
        )
    devices = [d for d in case.snapshot.devices if case.overrides.device in (None, d)]
    if not devices and case.snapshot.devices:
        held = ", ".join(str(d) for d in case.snapshot.devices)
        raise ConfigError(
            f"The snapshot holds nothing of device {case.overrides.device}.",
            hint=f"It is about device {held}.",
        )
    if not devices:
        devices = [0 if case.overrides.device is None else case.overrides.device]
    owner = _device_of_message(message, devices)
    return tuple(
        _context(
            case,
            d,
            _analysis(case.snapshot, d, analyses),
            message if d == owner else None,
            story,
        )
        for d in devices
    )


def _analysis(
    snapshot: Snapshot, device: int, analyses: Mapping[int, DeviceAnalysis] | None
) -> DeviceAnalysis:
    known = None if analyses is None else analyses.get(device)
    return analyze_device(snapshot, device) if known is None else known


def leading_context(contexts: Sequence[Context]) -> Context:
    """Return the device that the verdict is about: fatal failures first, then the fullest.

    Without any failure it is the device with most live memory.
    """
    return max(contexts, key=_weight)


def _weight(context: Context) -> tuple[int, int]:
    failed, analysis = context.failed_request, context.analysis
    if context.message is not None and analysis is not None and analysis.ooms:
        rank = 4
    elif failed is not None and not failed.is_caught and failed.source != "user":
        rank = 3
    elif failed is not None:
        rank = 2
    else:
        rank = 1
    live = analysis.active_bytes if analysis is not None else 0
    return rank, live


def _stats_devices(case: Case) -> list[int | None]:
    """Return the devices that statistics or a message name; a single None where none does."""
    if case.overrides.device is not None:
        return [case.overrides.device]
    message = case.primary_message
    if message is not None:
        return [message.device_index]
    return [*case.stats.devices] or [None] if case.stats else [None]


def _device_of_message(message: OomMessage | None, devices: Sequence[int]) -> int | None:
    if message is None:
        return None
    if message.device_index in devices:
        return message.device_index
    # A log of another numbering (CUDA_VISIBLE_DEVICES) still fits a snapshot with one device.
    return devices[0] if len(devices) == 1 else None


def _context(
    case: Case,
    device: int | None,
    analysis: DeviceAnalysis | None,
    message: OomMessage | None,
    story: LogStory | None,
) -> Context:
    stats = case.stats.of_device(device) if case.stats is not None else ()
    return Context(
        case=case,
        device=device,
        analysis=analysis,
        message=message,
        failed_request=find_failed_request(case, analysis, message),
        stats=stats,
        is_series=case.stats.is_series if case.stats is not None else False,
        story=story,
    )
