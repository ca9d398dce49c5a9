"""Keys of ``PYTORCH_CUDA_ALLOC_CONF``: which versions know them, and how their values are read.

Values are read as PyTorch reads them (``std::stoull``, ``std::stod``: the longest prefix that is
a number counts), so ``512MB`` means 512 here too. Observed on 2.4.1, 2.12.1 and 2.15.0; versions
marked "about" next to the keys come from release notes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Final

from fragdoctor.errors import ConfigError
from fragdoctor.units import MIB

Version = tuple[int, int, int]

N_ROUNDUP_INTERVALS: Final = 16
_MAX_U64: Final = 2**64 - 1
_MAX_MIB: Final = _MAX_U64 // MIB
_VERSION = re.compile(r"v?([0-9]{1,4})\.([0-9]{1,4})(?:\.([0-9]{1,4}))?", re.ASCII)
_INTEGER = re.compile(r"([+-]?)([0-9]+)", re.ASCII)
_REAL = re.compile(
    r"[+-]?(?:0[xX](?:[0-9a-fA-F]+\.?[0-9a-fA-F]*|\.[0-9a-fA-F]+)(?:[pP][+-]?[0-9]+)?"
    r"|(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)",
    re.ASCII,
)


KEYS: Final[dict[str, Version]] = {
    "backend": (2, 0, 0),
    "max_split_size_mb": (1, 9, 0),  # about
    "garbage_collection_threshold": (1, 12, 0),
    "roundup_power2_divisions": (1, 12, 0),
    "roundup_bypass_threshold_mb": (1, 13, 0),
    "expandable_segments": (2, 1, 0),
    "release_lock_on_cudamalloc": (2, 2, 0),
    "pinned_use_cuda_host_register": (2, 2, 0),
    "pinned_num_register_threads": (2, 2, 0),
    "pinned_use_background_threads": (2, 6, 0),  # about
    "max_non_split_rounding_mb": (2, 6, 0),
    "pinned_reserve_segment_size_mb": (2, 10, 0),
    "graph_capture_record_stream_reuse": (2, 10, 0),
    "per_process_memory_fraction": (2, 10, 0),
    "large_segment_size_mb": (2, 11, 0),
    "throw_on_cudamalloc_oom": (2, 12, 0),  # about
    "stranded_free_catch_all": (2, 12, 0),  # about
    "pinned_max_round_threshold_mb": (2, 13, 0),
    "pinned_max_cached_size_mb": (2, 13, 0),
    "expandable_segments_reserve": (2, 14, 0),  # absent in 2.13, present in 2.15
    "expandable_segments_reserve_by_class": (2, 14, 0),
}
"""The version that each key came with."""

GONE: Final[dict[str, Version]] = {"roundup_bypass_threshold_mb": (2, 0, 0)}
"""The first version without a key."""

_COMMON: Final = (
    "max_split_size_mb",
    "expandable_segments",
    "garbage_collection_threshold",
    "roundup_power2_divisions",
)


def parse_version(text: str) -> Version:
    """Return the release of a version string such as ``2.12.1+cu130``.

    Raises:
        ConfigError: the text does not begin with a version number.
    """
    match = _VERSION.match(text.strip())
    if match is None:
        raise ConfigError(
            f"{text!r} is not a PyTorch version.", hint="Write it like torch.__version__: 2.12.1."
        )
    return int(match.group(1)), int(match.group(2)), int(match.group(3) or 0)


def key_is_known(key: str, torch_version: str | None = None) -> bool:
    """Return whether this version of PyTorch accepts the key (any version, if None is given).

    A key that the installed version does not know is a hard error at the first CUDA call, so check
    this before recommending a setting.
    """
    if key not in KEYS or torch_version is None:
        return key in KEYS
    version = parse_version(torch_version)
    return KEYS[key] <= version and not (key in GONE and version >= GONE[key])


def check_key(key: str, torch_version: str | None) -> None:
    """Raise ConfigError with a suggestion if this version does not know the key."""
    if key_is_known(key, torch_version):
        return
    if key not in KEYS:
        near = get_close_matches(key.lower(), KEYS, n=1, cutoff=0.6)
        hint = f"Did you mean {near[0]}?" if near else "Known keys: " + ", ".join(_COMMON) + ", ..."
        if "=" in key:
            hint = "Write key:value with a colon, and a comma between settings."
        raise ConfigError(f"The allocator setting {key!r} does not exist.", hint=hint)
    since = ".".join(map(str, KEYS[key][:2]))
    gone = f", gone in {'.'.join(map(str, GONE[key][:2]))}" if key in GONE else ""
    raise ConfigError(
        f"PyTorch {torch_version} does not know the allocator setting {key!r} "
        f"(from {since}{gone}).",
        hint="PyTorch raises an error at the first CUDA call for a key that it does not know.",
    )


def tokens(text: str) -> list[str]:
    """Return the words and the marks ``, : [ ]`` of a setting string, ignoring whitespace."""
    return [t for t in re.split(r"([,:\[\]])", re.sub(r"\s+", "", text)) if t]


def integer(key: str, text: str) -> int:
    """Return an unsigned 64-bit integer as ``std::stoull`` reads it (-1 wraps around)."""
    match = _INTEGER.match(text)
    value = int(match.group(2)) if match and len(match.group(2)) <= 20 else None
    if match is None or value is None or value > _MAX_U64:
        raise _bad(key, text, "a whole number")
    return (_MAX_U64 + 1 - value) % (_MAX_U64 + 1) if match.group(1) == "-" else value


def mebibytes(key: str, text: str) -> int:
    """Return the bytes of a value in MiB, limited to what 64 bits can hold."""
    return min(integer(key, text), _MAX_MIB) * MIB


def real(key: str, text: str) -> float:
    """Return a number as ``std::stod`` reads it."""
    match = _REAL.match(text)
    if match is None:
        raise _bad(key, text, "a number")
    found = match.group()
    return float.fromhex(found) if "x" in found.lower() else float(found)


def boolean(key: str, text: str) -> bool:
    """Return True or False; nothing else is accepted, as in PyTorch."""
    if text not in {"True", "False"}:
        raise _bad(key, text, "True or False (case matters)")
    return text == "True"


def _bad(key: str, text: str, wanted: str) -> ConfigError:
    return ConfigError(f"The value of {key} must be {wanted}, not {text!r}.")


def _is_power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


def scalar_divisions(key: str, text: str) -> tuple[int, ...]:
    """Return the table of ``roundup_power2_divisions:N``."""
    value = integer(key, text)
    if not _is_power_of_two(value) or value > 2**31:
        raise _bad(key, text, "a power of two, or a list like [256:1,512:2,>:4]")
    return (value,) * N_ROUNDUP_INTERVALS


def listed_divisions(
    key: str, entries: Sequence[tuple[str, str]], *, overwrite_last: bool
) -> tuple[int, ...]:
    """Return the table of ``roundup_power2_divisions:[256:1,...,>:8]``.

    The first listed size also fills the intervals below it; later sizes fill only their own. ``>``
    fills the intervals above the last size (and with ``overwrite_last``, up to 2.4, also its own).
    """
    table = [0] * N_ROUNDUP_INTERVALS
    last = 0
    is_first = True
    for size, text in entries:
        value = integer(key, text)
        if value > 2**31 or (value and not _is_power_of_two(value)):
            raise _bad(key, text, "a power of two, or 0 to switch the rounding off")
        if size == ">":
            first = last if overwrite_last else last + 1
            table[first:] = [value] * (N_ROUNDUP_INTERVALS - first)
            continue
        interval = integer(key, size)
        if not _is_power_of_two(interval):
            raise _bad(key, size, "listed by powers of two in MiB")
        last = min(interval.bit_length() - 1, N_ROUNDUP_INTERVALS - 1)
        table[last] = value
        if is_first:
            table[:last] = [value] * last
        is_first = False
    return tuple(table)
