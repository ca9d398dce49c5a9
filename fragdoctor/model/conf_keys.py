"""Keys of ``PYTORCH_CUDA_ALLOC_CONF``: which versions know them, and how their values are read.

Values are read as PyTorch reads them (``std::stoull``, ``std::stod``: the longest prefix that is
a number counts), so ``512MB`` means 512 here too. Observed on 2.4.1, 2.12.1 and 2.15.0; versions
marked "about" next to the keys come from release notes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any, Final, NamedTuple

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
    r"|(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[nN][aA][nN])",
    re.ASCII,
)


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
    known = KEYS.get(key)
    if known is None or torch_version is None:
        return known is not None
    version = parse_version(torch_version)
    return known.since <= version and not (known.gone and version >= known.gone)


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
    since = ".".join(map(str, KEYS[key].since[:2]))
    gone = f", gone in {'.'.join(map(str, KEYS[key].gone[:2]))}" if KEYS[key].gone else ""
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


def _backend(key: str, value: str) -> str:
    if value not in ("native", "cudaMallocAsync", "hipMallocAsync"):
        raise ConfigError(
            f"The allocator {key} {value!r} does not exist.",
            hint="The backends are native and cudaMallocAsync.",
        )
    return value.replace("hip", "cuda")


def _checked(
    read: Callable[[str, str], Any], is_valid: Callable[[Any], bool], wanted: str
) -> Callable[[str, str], Any]:
    """Return a reader that refuses what is not valid."""

    def checked(key: str, value: str) -> Any:
        found = read(key, value)
        if not is_valid(found):
            raise ConfigError(f"The allocator setting {key} must be {wanted}.")
        return found

    return checked


_THRESHOLD: Final = _checked(real, lambda n: 0 < n < 1, "between 0 and 1, both excluded")
_FRACTION: Final = _checked(real, lambda n: 0 <= n <= 1, "between 0 and 1")
_THREADS: Final = _checked(
    integer, lambda n: _is_power_of_two(n) and n <= 128, "a power of two up to 128"
)
_POSITIVE: Final = _checked(integer, bool, "more than 0")
_LARGE_SEGMENT: Final = _checked(mebibytes, lambda n: n > 10 * MIB, "more than 10")


def _text(_key: str, value: str) -> str:
    return value


class Key(NamedTuple):
    """A key: the version that it came with, and how its value is read.

    Attributes:
        field: field of ``AllocatorSettings``; "" for a key that does not affect device memory.
        gone: the first version without the key.
    """

    since: Version
    read: Callable[[str, str], Any]
    field: str = ""
    gone: Version | tuple[()] = ()


KEYS: Final[dict[str, Key]] = {
    "backend": Key((2, 0, 0), _backend, "backend"),
    "max_split_size_mb": Key((1, 9, 0), mebibytes, "max_split_bytes"),  # about
    "garbage_collection_threshold": Key((1, 12, 0), _THRESHOLD, "garbage_collection_threshold"),
    "roundup_power2_divisions": Key((1, 12, 0), scalar_divisions, "roundup_power2_divisions"),
    "roundup_bypass_threshold_mb": Key((1, 13, 0), integer, gone=(2, 0, 0)),
    "expandable_segments": Key((2, 1, 0), boolean, "expandable_segments"),
    "release_lock_on_cudamalloc": Key((2, 2, 0), boolean),
    "pinned_use_cuda_host_register": Key((2, 2, 0), boolean),
    "pinned_num_register_threads": Key((2, 2, 0), _THREADS),
    "pinned_use_background_threads": Key((2, 6, 0), boolean),  # about
    "max_non_split_rounding_mb": Key((2, 6, 0), mebibytes, "max_non_split_rounding_bytes"),
    "pinned_reserve_segment_size_mb": Key((2, 10, 0), _POSITIVE),
    "graph_capture_record_stream_reuse": Key((2, 10, 0), boolean),
    "per_process_memory_fraction": Key((2, 10, 0), _FRACTION, "memory_fraction"),
    "large_segment_size_mb": Key((2, 11, 0), _LARGE_SEGMENT, "large_segment_bytes"),
    "throw_on_cudamalloc_oom": Key((2, 12, 0), boolean),  # about
    "stranded_free_catch_all": Key((2, 12, 0), boolean),  # about
    "pinned_max_round_threshold_mb": Key((2, 13, 0), integer),
    "pinned_max_cached_size_mb": Key((2, 13, 0), integer),
    "expandable_segments_reserve": Key((2, 14, 0), _text),  # absent in 2.13, present in 2.15
    "expandable_segments_reserve_by_class": Key((2, 14, 0), _text),
}
"""All keys; ``settings`` checks the limits that follow from the size of large segments."""
