"""Which settings differ, by their key, as PyTorch spells it."""

from __future__ import annotations

from typing import Any

from fragdoctor.errors import ConfigError
from fragdoctor.model.comparison import SettingChange
from fragdoctor.model.settings import AllocatorSettings, parse_conf
from fragdoctor.units import MIB


def setting_changes(
    before: AllocatorSettings | None, after: AllocatorSettings | None
) -> tuple[SettingChange, ...] | None:
    """Return the settings that differ; None where a run does not record its settings."""
    if before is None or after is None or not (before.is_recorded and after.is_recorded):
        return None
    a, b = described(before), described(after)
    changes = [
        SettingChange(key, a.get(key, "not set"), b.get(key, "not set"))
        for key in dict.fromkeys((*a, *b))
        if a.get(key) != b.get(key)
    ]
    if not changes and before.conf.replace(" ", "") != after.conf.replace(" ", ""):
        # Spelled in another way, or a key that fragdoctor does not know.
        changes = [SettingChange("PYTORCH_CUDA_ALLOC_CONF", before.conf, after.conf)]
    return tuple(changes)


def described(settings: AllocatorSettings) -> dict[str, str]:
    """Return every setting by its key, as text."""
    split, fraction = settings.max_split_bytes, settings.memory_fraction
    threshold = settings.garbage_collection_threshold
    return {
        "backend": settings.backend,
        "expandable_segments": str(settings.expandable_segments),
        "max_split_size_mb": "unlimited" if split is None else _mebibytes(split),
        "garbage_collection_threshold": f"{threshold:g}" if threshold else "off",
        "roundup_power2_divisions": _divisions(settings.roundup_power2_divisions),
        "max_non_split_rounding_mb": _mebibytes(settings.max_non_split_rounding_bytes),
        "large_segment_size_mb": _mebibytes(settings.large_segment_bytes),
        "per_process_memory_fraction": "not set" if fraction is None else f"{fraction:g}",
        **{str(key): _text(value) for key, value in settings.other.items()},
    }


def _mebibytes(n_bytes: int) -> str:
    return f"{n_bytes / MIB:g}"


def _divisions(divisions: tuple[int, ...]) -> str:
    """Return the divisions as one number, or as a list of those that are on."""
    shown = {d if d > 1 else 0 for d in divisions}
    if len(shown) == 1:
        only = shown.pop()
        return str(only) if only else "off"
    parts = [f"{1 << i}:{d}" for i, d in enumerate(divisions) if d > 1]
    return f"[{','.join(parts)}]"


def _text(value: Any) -> str:
    return str(value)[:200]


def conf_of(settings: AllocatorSettings) -> str:
    """Return a setting string that means these settings.

    The recorded string, unless the program changed its settings afterwards without it.
    """
    try:
        told = parse_conf(settings.conf)
    except ConfigError:
        return settings.conf
    keys = ("max_split_bytes", "garbage_collection_threshold", "expandable_segments")
    if all(getattr(told, key) == getattr(settings, key) for key in keys):
        return settings.conf
    parts = []
    if settings.expandable_segments:
        parts.append("expandable_segments:True")
    if settings.max_split_bytes is not None:
        parts.append(f"max_split_size_mb:{settings.max_split_bytes // MIB}")
    if settings.garbage_collection_threshold:
        parts.append(f"garbage_collection_threshold:{settings.garbage_collection_threshold:g}")
    if settings.roundup_is_on:
        parts.append(f"roundup_power2_divisions:{_divisions(settings.roundup_power2_divisions)}")
    return ",".join(parts)
