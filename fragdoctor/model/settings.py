"""Settings of the caching allocator: as a file records them, and as a string gives them.

Keys, valid values, and the versions that know them: PyTorch's ``CUDAAllocatorConfig``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from fragdoctor.errors import ConfigError
from fragdoctor.units import MIB

N_ROUNDUP_INTERVALS: Final = 16
NO_ROUNDUP: Final = (0,) * N_ROUNDUP_INTERVALS


@dataclass(frozen=True, slots=True)
class AllocatorSettings:
    """What decides how the native caching allocator behaves.

    Attributes:
        conf: the raw string (``PYTORCH_CUDA_ALLOC_CONF``); hostile text.
        backend: ``native`` or ``cudaMallocAsync``.
        max_split_bytes: blocks of at least this size are never split; None = unlimited.
        garbage_collection_threshold: 0 = off; needs a memory fraction to have an effect.
        expandable_segments: whether new memory comes from expandable segments.
        roundup_power2_divisions: 16 entries for sizes of 1 MiB .. 32 GiB; 0 and 1 = off.
        max_non_split_rounding_bytes: how much larger than an oversize request a block may be.
        large_segment_bytes: segment size for requests of 1 to 10 MiB, and the page of expandable
            segments in the large pool.
        memory_fraction: ``per_process_memory_fraction``; None = not set.
        is_recorded: False where the file or the user says nothing and these are the defaults.
        other: further keys, by name, with their values as recorded.
    """

    conf: str = ""
    backend: str = "native"
    max_split_bytes: int | None = None
    garbage_collection_threshold: float = 0.0
    expandable_segments: bool = False
    roundup_power2_divisions: tuple[int, ...] = NO_ROUNDUP
    max_non_split_rounding_bytes: int = 20 * MIB
    large_segment_bytes: int = 20 * MIB
    memory_fraction: float | None = None
    is_recorded: bool = False
    other: Mapping[str, Any] = field(default_factory=dict)

    @property
    def roundup_is_on(self) -> bool:
        """Whether any size class is rounded up to power-of-two divisions."""
        return any(d > 1 for d in self.roundup_power2_divisions)

    @classmethod
    def from_recorded(cls, recorded: Mapping[str, Any]) -> AllocatorSettings:
        """Return the settings of a snapshot's ``allocator_settings`` dict, tolerantly.

        Wrongly typed values are left at their defaults and kept in ``other``. Keys that only the
        raw string holds (``large_segment_size_mb``, ``max_non_split_rounding_mb``,
        ``per_process_memory_fraction``, ``backend``) are taken from it where it can be parsed.
        """
        conf = recorded.get("PYTORCH_CUDA_ALLOC_CONF", "")
        conf = conf if isinstance(conf, str) else ""
        try:
            base = parse_conf(conf)
        except ConfigError:
            base = cls(conf=conf)
        changes: dict[str, Any] = {}
        other: dict[str, Any] = {}
        for key, value in recorded.items():
            if key == "max_split_size" and _is_int(value):
                changes["max_split_bytes"] = value if value >= 0 else None
            elif key == "garbage_collection_threshold" and isinstance(value, int | float):
                changes["garbage_collection_threshold"] = value if math.isfinite(value) else 0.0
            elif key == "expandable_segments" and isinstance(value, bool):
                changes["expandable_segments"] = value
            elif key == "roundup_power2_divisions" and isinstance(value, Mapping):
                changes["roundup_power2_divisions"] = _divisions(value)
            elif key != "PYTORCH_CUDA_ALLOC_CONF":
                other[key] = value
        return replace(base, conf=conf, is_recorded=True, other=other, **changes)


def parse_conf(text: str) -> AllocatorSettings:
    """Return the settings that a ``PYTORCH_CUDA_ALLOC_CONF`` string means."""
    return AllocatorSettings(conf=text)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _divisions(recorded: Mapping[Any, Any]) -> tuple[int, ...]:
    table = list(NO_ROUNDUP)
    for i in range(N_ROUNDUP_INTERVALS):
        value = recorded.get(str(1 << i), 0)
        if _is_int(value) and value >= 0:
            table[i] = value
    return tuple(table)
