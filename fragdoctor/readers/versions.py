"""Estimates which PyTorch wrote a snapshot, from the keys it holds. An estimation only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from fragdoctor.model.snapshot import Action

_VERSIONS: Final = (
    "1.4", "1.12", "1.13", "2.0", "2.1", "2.2", "2.3", "2.4", "2.5", "2.6", "2.7", "2.8", "2.9",
    "2.10", "2.11", "2.12", "2.13", "2.14", "2.15",
)  # fmt: skip

# (table, key, first version that writes it)
_SINCE: Final = (
    ("block", "history", "1.12"),
    ("segment", "requested_size", "2.0"),
    ("block", "requested_size", "2.0"),
    ("top", "device_traces", "2.0"),
    ("segment", "is_expandable", "2.1"),
    ("segment", "segment_pool_id", "2.1"),
    ("segment", "frames", "2.1"),
    ("block", "address", "2.1"),
    ("top", "allocator_settings", "2.1"),
    ("event", "time_us", "2.2"),
    ("event", "compile_context", "2.6"),
    ("top", "external_annotations", "2.6"),
    ("event", "user_metadata", "2.10"),
    ("frame", "fx_node_op", "2.10"),
    ("event", "pool_id", "2.12"),
    ("event", "internal_metadata", "2.15"),
    ("top", "host_segments", "2.15"),
    ("top", "host_traces", "2.15"),
)
# (table, key, last version that does not write it); looked at where the table has rows.
_UNTIL: Final = (
    ("block", "requested_size", "1.13"),
    ("segment", "is_expandable", "2.0"),
    ("top", "allocator_settings", "2.3"),
    ("event", "time_us", "2.1"),
    ("top", "external_annotations", "2.6"),
    ("event", "user_metadata", "2.9"),
    ("event", "pool_id", "2.11"),
    ("top", "host_segments", "2.14"),
)
_SETTINGS_SINCE: Final = (
    ("graph_capture_record_stream_reuse", "2.10"),
    ("max_round_threshold", "2.15"),
)


def estimate_versions(tables: Mapping[str, Any]) -> tuple[str, str]:
    """Return the lowest and the highest PyTorch version that fits; "" is an open end.

    Args:
        tables: what the native reader returns; ``keys_seen`` and ``settings`` are looked at.
    """
    seen: Mapping[str, list[str]] = tables["keys_seen"]
    low = 0
    high = len(_VERSIONS)
    for table, key, version in _SINCE:
        if key in seen[table]:
            low = max(low, _VERSIONS.index(version))
    for key, version in _SETTINGS_SINCE:
        if key in (tables["settings"] or {}):
            low = max(low, _VERSIONS.index(version))
    mapped = 1 << Action.SEGMENT_MAP | 1 << Action.SEGMENT_UNMAP
    if tables["actions_seen"] & mapped:
        low = max(low, _VERSIONS.index("2.1"))
    for table, key, version in _UNTIL:
        if seen[table] and key not in seen[table]:
            high = min(high, _VERSIONS.index(version))
    if "history" in seen["block"]:
        high = min(high, _VERSIONS.index("2.0"))
    high = max(high, low)
    return (
        _VERSIONS[low] if low else "",
        _VERSIONS[high] if high < len(_VERSIONS) - 1 else "",
    )
