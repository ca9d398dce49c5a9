"""Settings of the caching allocator, as recorded in a file or given as a string.

The meaning of the keys and their valid values follow PyTorch's ``CUDAAllocatorConfig``, observed on
2.4.1, 2.12.1 and 2.15.0. ``conf_keys`` says which versions know a key.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, Final

from fragdoctor.errors import ConfigError
from fragdoctor.lazy import regex
from fragdoctor.model.conf_keys import (
    KEYS,
    N_ROUNDUP_INTERVALS,
    Version,
    check_key,
    listed_divisions,
    mebibytes,
    parse_version,
    tokens,
)
from fragdoctor.units import MIB

NO_ROUNDUP: Final = (0,) * N_ROUNDUP_INTERVALS

_MARKS: Final = frozenset(",:[]")
_ENDLESS: Final = 2**63
_ASSIGNMENT: Final = regex(
    r"\s*(?:export\s+|set\s+)?PYTORCH_(?:CUDA_|HIP_)?ALLOC_CONF\s*=\s*([\"']?)(.*)\1\s*"
)
_MAX_OTHER: Final = 200


@dataclass(frozen=True, slots=True)
class AllocatorSettings:
    """What decides how the native caching allocator behaves.

    Attributes:
        conf: the raw string (``PYTORCH_CUDA_ALLOC_CONF``); hostile text.
        backend: ``native`` or ``cudaMallocAsync``.
        max_split_bytes: blocks of at least this size are never split; None means unlimited.
        garbage_collection_threshold: 0 means off; it takes effect only with a memory fraction.
        expandable_segments: whether new memory comes from expandable segments.
        roundup_power2_divisions: 16 entries for sizes of 1 MiB .. 32 GiB; 0 and 1 = off.
        max_non_split_rounding_bytes: how much larger than an oversize request a block may be.
        large_segment_bytes: segment size for requests of 1 to 10 MiB, and the page size of
            expandable segments in the large pool.
        memory_fraction: ``per_process_memory_fraction``; None means not set.
        is_recorded: False if neither file nor user says anything and these are the defaults.
        other: other keys, by name, with their values as recorded.
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

    def changed(self, **changes: Any) -> AllocatorSettings:
        """Return these settings with other values of some fields."""
        return replace(self, **changes)

    def over(self, before: AllocatorSettings) -> AllocatorSettings:
        """Return the settings in effect after a change from ``before`` to these at run time.

        ``expandable_segments`` and ``large_segment_size_mb`` keep their values if the string does
        not name them; everything else returns to its default.
        """
        kept: dict[str, Any] = {}
        if "expandable_segments:" not in "".join(self.conf.split()):
            kept["expandable_segments"] = before.expandable_segments
        if "large_segment_size_mb" not in self.conf:
            kept["large_segment_bytes"] = before.large_segment_bytes
        return self.changed(**kept)

    @property
    def roundup_is_on(self) -> bool:
        """Whether any size class is rounded up to power-of-two divisions."""
        return any(d > 1 for d in self.roundup_power2_divisions)

    def described(self) -> dict[str, str]:
        """Return every setting by its key, as text: ``max_split_size_mb`` -> ``128``."""
        split, fraction = self.max_split_bytes, self.memory_fraction
        threshold = self.garbage_collection_threshold
        return {
            "backend": self.backend,
            "expandable_segments": str(self.expandable_segments),
            "max_split_size_mb": "unlimited" if split is None else f"{split / MIB:g}",
            "garbage_collection_threshold": f"{threshold:g}" if threshold else "off",
            "roundup_power2_divisions": _divisions_text(self.roundup_power2_divisions),
            "max_non_split_rounding_mb": f"{self.max_non_split_rounding_bytes / MIB:g}",
            "large_segment_size_mb": f"{self.large_segment_bytes / MIB:g}",
            "per_process_memory_fraction": "not set" if fraction is None else f"{fraction:g}",
            **{str(key): str(value)[:_MAX_OTHER] for key, value in self.other.items()},
        }

    def recorded(self) -> dict[str, Any]:
        """Return the settings under the names that a snapshot uses."""
        limit = self.max_split_bytes
        divisions = enumerate(self.roundup_power2_divisions)
        return {
            "PYTORCH_CUDA_ALLOC_CONF": self.conf,
            "max_split_size": -1 if limit is None else limit,
            "garbage_collection_threshold": float(self.garbage_collection_threshold),
            "expandable_segments": self.expandable_segments,
            "roundup_power2_divisions": {str(1 << i): d for i, d in divisions},
        }

    @classmethod
    def from_recorded(cls, recorded: Mapping[str, Any]) -> AllocatorSettings:
        """Return the settings in a snapshot's ``allocator_settings`` dict, tolerating bad values.

        Settings with a wrongly typed value keep their defaults, and the value goes into ``other``.
        Keys that only the raw string has (``large_segment_size_mb``, ``max_non_split_rounding_mb``,
        ``per_process_memory_fraction``, ``backend``) are taken from it if it can be parsed.
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


class Era(IntEnum):
    """How the allocator orders free blocks of equal size."""

    ADDRESS = 0
    BLOCK_COUNTER = 1
    SEGMENT_COUNTER = 2


def era_of(torch_version: str) -> Era:
    """Return how a PyTorch version breaks ties between free blocks of equal size.

    Up to 2.11, the lower address wins; in 2.12, the block that was made first; from 2.13 on, the
    block of the older segment, then the lower address.

    Raises:
        ConfigError: the text is not a version.
    """
    major, minor, _ = parse_version(torch_version)
    if (major, minor) <= (2, 11):
        return Era.ADDRESS
    return Era.BLOCK_COUNTER if (major, minor) == (2, 12) else Era.SEGMENT_COUNTER


def is_same_conf(a: str, b: str) -> bool:
    """Return whether two setting strings differ at most in whitespace, which PyTorch ignores."""
    return "".join(a.split()) == "".join(b.split())


def conf_of(text: str) -> str:
    """Return the settings in a shell assignment, such as our own advice; other text unchanged."""
    match = _ASSIGNMENT.fullmatch(text)
    return text if match is None else match[2]


def parse_conf(text: str, torch_version: str | None = None) -> AllocatorSettings:
    """Return the settings that a ``PYTORCH_CUDA_ALLOC_CONF`` string means.

    Reads the string as PyTorch does: whitespace is ignored, a trailing comma is fine, the last of a
    repeated key counts, and a number ends where its digits end. Strings that PyTorch refuses are
    refused here too, with better words. Without a version, the keys of all versions are accepted,
    under the newest rules.

    Args:
        text: ``key:value,key:value``; empty for the defaults.
        torch_version: version such as ``2.12.1`` whose keys and rules apply.

    Raises:
        ConfigError: the version would refuse the string.
    """
    pairs = _pairs(text, torch_version)
    version = (9999, 0, 0) if torch_version is None else parse_version(torch_version)
    settings = AllocatorSettings(conf=text)
    # PyTorch reads the large segment size first, because other limits follow it.
    for key, value in sorted(pairs, key=lambda pair: pair[0] != "large_segment_size_mb"):
        settings = _apply(settings, key, value, version)
    return settings


_Value = str | list[tuple[str, str]]


def _pairs(text: str, torch_version: str | None) -> list[tuple[str, _Value]]:
    words = tokens(text)
    pairs: list[tuple[str, _Value]] = []
    at = 0
    while at < len(words):
        key = words[at]
        if ";" in key or ";" in text:
            raise ConfigError(
                f"The allocator settings {text!r} hold a semicolon, which PyTorch does not read.",
                hint="Separate settings by commas: key:value,key:value.",
            )
        if key in _MARKS:
            raise ConfigError(
                f"A key is missing before {key!r} in the allocator settings {text!r}."
            )
        check_key(key, torch_version)
        if at + 2 >= len(words) or words[at + 1] != ":":
            raise ConfigError(
                f"The allocator setting {key!r} has no value.", hint=f"Write {key}:value."
            )
        value: _Value = words[at + 2]
        at += 3
        if value == "[":
            value, at = _list_from(words, at, key)
        elif value in _MARKS:
            raise ConfigError(f"The allocator setting {key!r} has no value before {value!r}.")
        pairs.append((key, value))
        at += 1  # the separator; PyTorch does not look at what it is
    return pairs


def _list_from(words: list[str], at: int, key: str) -> tuple[list[tuple[str, str]], int]:
    """Return the entries of a list that opened before ``at``, and the index after its end."""
    entries: list[tuple[str, str]] = []
    while at < len(words) and words[at] != "]":
        if at + 2 >= len(words) or words[at + 1] != ":" or words[at] in _MARKS:
            break
        entries.append((words[at], words[at + 2]))
        at += 3
        if at < len(words) and words[at] == ",":
            at += 1
    if at >= len(words) or words[at] != "]":
        raise ConfigError(
            f"The list of {key} is not well formed.", hint="Write it like [256:1,512:2,>:4]."
        )
    return entries, at + 1


def _apply(
    settings: AllocatorSettings, key: str, value: _Value, version: Version
) -> AllocatorSettings:
    if isinstance(value, list):
        if key == "roundup_power2_divisions":
            divisions = listed_divisions(key, value, overwrite_last=version < (2, 5, 0))
            return settings.changed(roundup_power2_divisions=divisions)
        if key != "expandable_segments_reserve_by_class":
            raise ConfigError(f"The allocator setting {key!r} does not take a list.")
        return settings.changed(other={**settings.other, key: tuple(value)})
    if key == "max_split_size_mb":
        return settings.changed(max_split_bytes=_max_split(settings, key, value, version))
    if key == "max_non_split_rounding_mb":
        _at_least(key, mebibytes(key, value), settings.large_segment_bytes)
    known = KEYS[key]
    read = known.read(key, value)
    if key == "large_segment_size_mb":
        settings = settings.changed(max_non_split_rounding_bytes=read)
    if known.field:
        return settings.changed(**{known.field: read})
    return settings.changed(other={**settings.other, key: read})


def _max_split(settings: AllocatorSettings, key: str, value: str, version: Version) -> int | None:
    size = mebibytes(key, value)
    if version < (2, 5, 0) and size <= settings.large_segment_bytes:
        raise ConfigError(
            f"The allocator setting {key} must be more than 20.",
            hint="PyTorch 2.5 and later also accept 20.",
        )
    _at_least(key, size, settings.large_segment_bytes)
    return None if size >= _ENDLESS else size  # -1 wraps around to more than any device has


def _at_least(key: str, size: int, limit: int) -> None:
    if size < limit:
        raise ConfigError(f"The allocator setting {key} must be at least {limit // MIB}.")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _divisions_text(divisions: tuple[int, ...]) -> str:
    """Return the divisions as one number, or as a list of the ones that are on."""
    shown = {d if d > 1 else 0 for d in divisions}
    if len(shown) == 1:
        only = shown.pop()
        return str(only) if only else "off"
    parts = [f"{1 << i}:{d}" for i, d in enumerate(divisions) if d > 1]
    return f"[{','.join(parts)}]"


def _divisions(recorded: Mapping[Any, Any]) -> tuple[int, ...]:
    table = list(NO_ROUNDUP)
    for i in range(N_ROUNDUP_INTERVALS):
        value = recorded.get(str(1 << i), 0)
        if _is_int(value) and value >= 0:
            table[i] = value
    return tuple(table)
