"""Known GPUs with the memory that CUDA really reports, which is less than the name says.

The total is about what ``torch.cuda.get_device_properties().total_memory`` gives, as PyTorch's own
out-of-memory messages print it ("GPU 0 has a total capacity of 39.39 GiB"): the driver and, where
it is on, error correction keep a part. Drivers differ by some 0.2 GiB; a lower figure is taken.
None of them was measured for the table (``gpus.toml``), and ``source`` says so. Names are found as
nvidia-smi and ``torch.cuda.get_device_name()`` write them too. A MIG slice has at least 95 % of the
memory in its name (NVIDIA, "MIG User Guide", supported profiles: 4.75 of 5, 9.75 of 10, 19.62 of
20 GB); a Mac's GPU may use two thirds of a memory of up to 36 GB and three quarters of a larger one
(Apple, ``MTLDevice.recommendedMaxWorkingSetSize``). The context is what CUDA and its libraries take
in a process before the first tensor, about.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from types import MappingProxyType
from typing import Final

from fragdoctor.errors import ConfigError
from fragdoctor.model.memory_estimate import GpuModel
from fragdoctor.units import GIB, MIB, parse_size

SOURCE: Final = (
    "about the total capacity that out-of-memory messages commonly print for this GPU; drivers "
    "differ by some 0.2 GiB; not measured"
)
GIVEN: Final = "as given"
LIKE_SHARE: Final = 0.975
LIKE_SOURCE: Final = "97.5 % of the memory in its name, as cards of its kind report; not measured"
MIG_SHARE: Final = 0.95
MIG_SOURCE: Final = (
    "95 % of the memory in the profile's name, the lowest share in NVIDIA's MIG User Guide"
)
MAC_SOURCE: Final = (
    "Apple, MTLDevice.recommendedMaxWorkingSetSize: two thirds of up to 36 GB, three quarters of "
    "more; the system and other programs use the same memory"
)
SMALL_MAC_GIB: Final = 36
_DATA: Final = tomllib.loads(
    files("fragdoctor.estimation").joinpath("gpus.toml").read_text(encoding="utf-8")
)


def _context_bytes(architecture: str) -> int:
    return int(_DATA["context_mib"][architecture or "other"]) * MIB


def _model(name: str, title: str, gib: float, architecture: str, source: str = SOURCE) -> GpuModel:
    return GpuModel(
        name=name,
        title=title,
        total_bytes=round(gib * GIB / MIB) * MIB,
        context_bytes=_context_bytes(architecture),
        architecture=architecture,
        source=source,
    )


GPUS: Final[Mapping[str, GpuModel]] = MappingProxyType(
    {name: _model(name, *row) for name, row in _DATA["printed"].items()}
    | {
        name: _model(name, title, LIKE_SHARE * gib, architecture, LIKE_SOURCE)
        for name, (title, gib, architecture) in _DATA["like"].items()
    }
)
_ALIASES: Final[Mapping[str, str]] = _DATA["aliases"]

# What drivers write around the name of a card.
_AROUND: Final = frozenset(
    {"nvidia", "amd", "tesla", "geforce", "instinct", "radeon", "gpu", "generation", "graphics",
     "card", "blackwell", "server", "workstation", "edition", "accelerator", "max-q", "oam", "pcie",
     "sxm", "sxm2", "sxm3", "sxm4", "sxm5", "sxm6", "hbm2", "hbm2e", "hbm3", "hbm3e", "gddr6"}
)  # fmt: skip
_MIG: Final = re.compile(
    r"(?:(.*?)[\s-]*)?(?:mig[\s-]*)?([1-7])(?:c\.\d)?g\.(\d{1,3})gb?(?:\+.*)?", re.ASCII
)
_MAC: Final = re.compile(
    r"(?:apple[\s-]*)?(m[1-9][\s-]*(?:pro|max|ultra)?)(?:[\s-]+(\d{1,3})\s*g(?:i?b)?)?", re.ASCII
)


def _key(name: str) -> str:
    """Return a name without what drivers write around it, in one spelling."""
    words = re.sub(r"[\s_/-]+", "-", name.strip().lower()).split("-")
    words = [word for word in words if word and word not in _AROUND]
    key = re.sub(r"(\d)gi?b\b", r"\1g", "-".join(words))
    for brand in ("rtx", "gtx", "rx"):
        key = re.sub(rf"(^|-){brand}(\d)", rf"\1{brand}-\2", key)
    return key


def _slice(name: str) -> GpuModel | None:
    """Return the slice of a GPU that a MIG profile names: ``A100-SXM4-80GB MIG 1g.10gb``."""
    match = _MIG.fullmatch(name.strip().lower())
    if match is None:
        return None
    whole = _find(_key(match.group(1) or ""))
    architecture = whole.architecture if whole else ""
    total = int(MIG_SHARE * int(match.group(3)) * GIB)
    profile = f"{match.group(2)}g.{match.group(3)}gb"
    of = f"{whole.name}-{profile}" if whole else profile
    context = _context_bytes(architecture)
    return GpuModel(of, f"MIG slice {profile}", total, context, architecture, MIG_SOURCE)


def _mac(name: str) -> GpuModel | None:
    """Return the part of a Mac's memory that its GPU may use: ``M3 Max 64GB``."""
    match = _MAC.fullmatch(name.strip().lower())
    if match is None:
        return None
    if not int(match.group(2) or 0):
        raise ConfigError(
            f"{name} comes with more than one size of memory.",
            hint=f"Write the size behind it: {name.strip()} 64GB.",
        )
    gib = int(match.group(2))
    share = 2 / 3 if gib <= SMALL_MAC_GIB else 3 / 4
    chip = re.sub(r"[\s-]+", "-", match.group(1).strip())
    title = f"Apple {chip.replace('-', ' ').upper()}, shared with the CPU, {gib} GB"
    return GpuModel(f"{chip}-{gib}g", title, int(share * gib * GIB), 0, "", MAC_SOURCE)


def gpu_of(name: str) -> GpuModel:
    """Return the GPU of this name, or one of the size that is given.

    Raises:
        ConfigError: neither a known GPU nor a size.
    """
    key = _key(name)
    known = _find(key) or _slice(name) or _mac(name)
    if known is not None:
        return known
    try:
        total = parse_size(name)
    except ConfigError as e:
        if name.strip().isdigit():
            hint = f"Write {name.strip()}GiB, or a name of: fragdoctor estimate --list-gpus"
            raise ConfigError(e.message, hint=hint) from e
        total = 0
    if total:
        return GpuModel(name, "", total, _context_bytes(""), "", GIVEN)
    near = difflib.get_close_matches(key, (*GPUS, *_ALIASES), n=2, cutoff=0.5)
    guess = f"Did you mean {' or '.join(near)}? " if near else ""
    raise ConfigError(
        f"{name!r} is neither a known GPU nor a size.",
        hint=f"{guess}See: fragdoctor estimate --list-gpus; or write a size such as 24GiB.",
    )


def _find(key: str) -> GpuModel | None:
    """Return the GPU of a key; memory that the key states must be that of the table."""
    stated = re.fullmatch(r"(.+?)-?(\d{2,3})g", key)
    found = _named(key)
    if found is not None or stated is None:
        return found
    found = _named(stated.group(1))
    return found if found and f" {stated.group(2)} GB" in found.title else None


def _named(key: str) -> GpuModel | None:
    for candidate in (key, key.replace("-", "")):
        for name, gpu in GPUS.items():
            short = name.removeprefix("rtx-").removeprefix("gtx-")
            if candidate in (name, short, name.replace("-", ""), short.replace("-", "")):
                return gpu
        alias = _ALIASES.get(candidate)
        if alias is not None:
            return GPUS[alias]
    return None


def known_gpus() -> Sequence[GpuModel]:
    """Return the table, in its order."""
    return tuple(GPUS.values())
