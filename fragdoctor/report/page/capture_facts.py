"""Settings and capture facts: what the file says about how it came to be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from fragdoctor.analysis.result import DeviceAnalysis
from fragdoctor.model.diagnosis import Diagnosis
from fragdoctor.model.settings import AllocatorSettings
from fragdoctor.model.snapshot import Provenance
from fragdoctor.report.phrases import fidelity_text
from fragdoctor.units import format_share, format_size, plural

MAX_OTHER: Final = 20

Facts = list[tuple[str, str]]


def setting_facts(diagnosis: Diagnosis) -> Facts:
    """Return (name, value) of the allocator settings of the snapshot; [] without a snapshot."""
    snapshot = diagnosis.case.snapshot
    if snapshot is None:
        return []
    s = snapshot.settings
    if not s.is_recorded:
        return [("Settings", "not recorded in this file; PyTorch's defaults are assumed")]
    unlimited = "unlimited (default)"
    facts = [
        ("PYTORCH_CUDA_ALLOC_CONF", s.conf or "(empty)"),
        ("backend", s.backend),
        ("expandable_segments", "on" if s.expandable_segments else "off (default)"),
        (
            "max_split_size",
            unlimited if s.max_split_bytes is None else format_size(s.max_split_bytes),
        ),
        ("garbage_collection_threshold", f"{s.garbage_collection_threshold:g}"),
        ("roundup_power2_divisions", _roundup(s)),
        ("large_segment_size", format_size(s.large_segment_bytes)),
    ]
    if s.memory_fraction is not None:
        facts.append(("per_process_memory_fraction", f"{s.memory_fraction:g}"))
    facts += [(str(k), str(v)[:500]) for k, v in list(s.other.items())[:MAX_OTHER]]
    return facts


def _roundup(s: AllocatorSettings) -> str:
    return str(list(s.roundup_power2_divisions)) if s.roundup_is_on else "off (default)"


def capture_facts(diagnosis: Diagnosis, analyses: Mapping[int, DeviceAnalysis]) -> Facts:
    """Return (name, value) of what the inputs are and how much of the story they hold."""
    facts = [("Input", source) for source in diagnosis.case.sources[:MAX_OTHER]]
    snapshot = diagnosis.case.snapshot
    if snapshot is not None:
        facts += _file_facts(snapshot.provenance)
    for device, analysis in sorted(analyses.items()):
        facts += [(f"GPU {device}", text) for text in _device_facts(analysis)]
    said = fidelity_text(diagnosis.fidelity)
    return [*facts, ("Replay", said)] if said else facts


def _file_facts(p: Provenance) -> Facts:
    how = [p.container, p.compression, f"protocol {p.protocol}" if p.protocol >= 0 else ""]
    facts = [("File", ", ".join(t for t in how if t))]
    if p.n_bytes:
        facts.append(("Size", f"{format_size(p.n_bytes)} after decompression"))
    if p.version_low or p.version_high:
        low, high = p.version_low or "the first", p.version_high or "today"
        facts.append(("Written by", f"PyTorch between {low} and {high}, judged by its keys"))
    unknown = [*p.unknown_keys, *p.unknown_values][:MAX_OTHER]
    if unknown:
        facts.append(("Not understood", ", ".join(unknown)))
    if p.n_replaced_strings:
        facts.append(("Repaired", plural(p.n_replaced_strings, "string with broken characters")))
    return facts


def _device_facts(analysis: DeviceAnalysis) -> list[str]:
    capture = analysis.capture
    counts = (
        f"{plural(analysis.n_events, 'event')}, {plural(analysis.n_segments, 'segment')}, "
        f"{plural(analysis.n_blocks, 'block')}"
    )
    stacks = f"stacks for {format_share(capture.has_stacks, 1)} of live blocks and allocations"
    return [counts, stacks, *capture.notes]
