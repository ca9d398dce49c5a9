"""Known GPUs with the memory that CUDA really reports, which is less than the name says.

The total is about what ``torch.cuda.get_device_properties().total_memory`` gives, as PyTorch's own
out-of-memory messages print it ("GPU 0 has a total capacity of 39.39 GiB"): the driver and, where
it is on, error correction keep a part. Drivers differ by some 0.2 GiB; a lower figure is taken.
None of them was measured for this table, and ``source`` says so. Names are found as nvidia-smi and
``torch.cuda.get_device_name()`` write them too. A MIG slice has at least 95 % of the memory in its
name (NVIDIA, "MIG User Guide", supported profiles: 4.75 of 5, 9.75 of 10, 19.62 of 20 GB); a Mac's
GPU may use two thirds of a memory of up to 36 GB and three quarters of a larger one (Apple,
``MTLDevice.recommendedMaxWorkingSetSize``). The context is what CUDA and its
libraries take in a process before the first tensor, about.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
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
CONTEXT_MIB: Final = MappingProxyType(
    {
        "blackwell": 620,
        "hopper": 520,
        "ada": 400,
        "ampere": 420,
        "turing": 320,
        "volta": 330,
        "pascal": 300,
        "cdna": 600,
        "": 450,
    }
)

# name -> (title, GiB as PyTorch prints them, architecture)
_TABLE: Final = (
    ("b200", "NVIDIA B200 180 GB", 178.35, "blackwell"),
    ("h200", "NVIDIA H200 141 GB", 139.72, "hopper"),
    ("gh200", "NVIDIA GH200 96 GB", 94.50, "hopper"),
    ("h100", "NVIDIA H100 80 GB", 79.10, "hopper"),
    ("h100-nvl", "NVIDIA H100 NVL 94 GB", 93.00, "hopper"),
    ("a100-80g", "NVIDIA A100 80 GB", 79.15, "ampere"),
    ("a100-40g", "NVIDIA A100 40 GB", 39.39, "ampere"),
    ("l40s", "NVIDIA L40S 48 GB", 44.32, "ada"),
    ("l4", "NVIDIA L4 24 GB", 21.95, "ada"),
    ("a40", "NVIDIA A40 48 GB", 44.34, "ampere"),
    ("a30", "NVIDIA A30 24 GB", 23.50, "ampere"),
    ("a10", "NVIDIA A10 24 GB", 21.99, "ampere"),
    ("a10g", "NVIDIA A10G 24 GB", 21.99, "ampere"),
    ("v100-32g", "NVIDIA V100 32 GB", 31.73, "volta"),
    ("v100-16g", "NVIDIA V100 16 GB", 15.77, "volta"),
    ("t4", "NVIDIA T4 16 GB", 14.56, "turing"),
    ("p100", "NVIDIA P100 16 GB", 15.89, "pascal"),
    ("rtx-pro-6000", "NVIDIA RTX PRO 6000 96 GB", 94.97, "blackwell"),
    ("rtx-6000-ada", "NVIDIA RTX 6000 Ada 48 GB", 47.38, "ada"),
    ("rtx-a6000", "NVIDIA RTX A6000 48 GB", 47.40, "ampere"),
    ("rtx-a5000", "NVIDIA RTX A5000 24 GB", 23.58, "ampere"),
    ("rtx-5090", "NVIDIA RTX 5090 32 GB", 31.36, "blackwell"),
    ("rtx-5080", "NVIDIA RTX 5080 16 GB", 15.47, "blackwell"),
    ("rtx-4090", "NVIDIA RTX 4090 24 GB", 23.52, "ada"),
    ("rtx-4080", "NVIDIA RTX 4080 16 GB", 15.70, "ada"),
    ("rtx-4070", "NVIDIA RTX 4070 12 GB", 11.72, "ada"),
    ("rtx-4060-ti-16g", "NVIDIA RTX 4060 Ti 16 GB", 15.70, "ada"),
    ("rtx-4060", "NVIDIA RTX 4060 8 GB", 7.63, "ada"),
    ("rtx-3090", "NVIDIA RTX 3090 24 GB", 23.57, "ampere"),
    ("rtx-3080", "NVIDIA RTX 3080 10 GB", 9.77, "ampere"),
    ("rtx-3060", "NVIDIA RTX 3060 12 GB", 11.75, "ampere"),
    ("rtx-2080-ti", "NVIDIA RTX 2080 Ti 11 GB", 10.74, "turing"),
    ("gtx-1080-ti", "NVIDIA GTX 1080 Ti 11 GB", 10.91, "pascal"),
    ("mi300x", "AMD MI300X 192 GB", 191.69, "cdna"),
    ("mi250x", "AMD MI250X, one die, 64 GB", 63.98, "cdna"),
)
# Of these no message was at hand: 97.5 % of the name's GiB, the lowest share of the cards above
# whose error correction is off.
_LIKE: Final = (
    ("h20", "NVIDIA H20 96 GB", 96, "hopper"),
    ("h800", "NVIDIA H800 80 GB", 80, "hopper"),
    ("a800", "NVIDIA A800 80 GB", 80, "ampere"),
    ("gb10", "NVIDIA GB10 (DGX Spark), shared with the CPU, 128 GB", 120, "blackwell"),
    ("orin-64g", "NVIDIA Jetson AGX Orin, shared with the CPU, 64 GB", 62, "ampere"),
    ("l40", "NVIDIA L40 48 GB", 45, "ada"),
    ("l20", "NVIDIA L20 48 GB", 45, "ada"),
    ("a2", "NVIDIA A2 16 GB", 15, "ampere"),
    ("a16", "NVIDIA A16, one of four, 16 GB", 15, "ampere"),
    ("rtx-5000-ada", "NVIDIA RTX 5000 Ada 32 GB", 32, "ada"),
    ("rtx-4000-ada", "NVIDIA RTX 4000 Ada 20 GB", 20, "ada"),
    ("rtx-a4000", "NVIDIA RTX A4000 16 GB", 16, "ampere"),
    ("rtx-a4500", "NVIDIA RTX A4500 20 GB", 20, "ampere"),
    ("rtx-a2000", "NVIDIA RTX A2000 12 GB", 12, "ampere"),
    ("quadro-rtx-8000", "NVIDIA Quadro RTX 8000 48 GB", 48, "turing"),
    ("quadro-rtx-6000", "NVIDIA Quadro RTX 6000 24 GB", 24, "turing"),
    ("titan-rtx", "NVIDIA TITAN RTX 24 GB", 24, "turing"),
    ("rtx-5090-laptop", "NVIDIA RTX 5090 Laptop 24 GB", 24, "blackwell"),
    ("rtx-5070-ti", "NVIDIA RTX 5070 Ti 16 GB", 16, "blackwell"),
    ("rtx-5070", "NVIDIA RTX 5070 12 GB", 12, "blackwell"),
    ("rtx-5060-ti", "NVIDIA RTX 5060 Ti 16 GB", 16, "blackwell"),
    ("rtx-5060", "NVIDIA RTX 5060 8 GB", 8, "blackwell"),
    ("rtx-4090-laptop", "NVIDIA RTX 4090 Laptop 16 GB", 16, "ada"),
    ("rtx-4080-super", "NVIDIA RTX 4080 SUPER 16 GB", 16, "ada"),
    ("rtx-4070-ti-super", "NVIDIA RTX 4070 Ti SUPER 16 GB", 16, "ada"),
    ("rtx-4070-ti", "NVIDIA RTX 4070 Ti 12 GB", 12, "ada"),
    ("rtx-4070-super", "NVIDIA RTX 4070 SUPER 12 GB", 12, "ada"),
    ("rtx-4070-laptop", "NVIDIA RTX 4070 Laptop 8 GB", 8, "ada"),
    ("rtx-4060-ti", "NVIDIA RTX 4060 Ti 8 GB", 8, "ada"),
    ("rtx-4060-laptop", "NVIDIA RTX 4060 Laptop 8 GB", 8, "ada"),
    ("rtx-3090-ti", "NVIDIA RTX 3090 Ti 24 GB", 24, "ampere"),
    ("rtx-3080-ti", "NVIDIA RTX 3080 Ti 12 GB", 12, "ampere"),
    ("rtx-3070-ti", "NVIDIA RTX 3070 Ti 8 GB", 8, "ampere"),
    ("rtx-3070", "NVIDIA RTX 3070 8 GB", 8, "ampere"),
    ("rtx-3060-ti", "NVIDIA RTX 3060 Ti 8 GB", 8, "ampere"),
    ("rtx-3050", "NVIDIA RTX 3050 8 GB", 8, "ampere"),
    ("rtx-2080", "NVIDIA RTX 2080 8 GB", 8, "turing"),
    ("rtx-2070", "NVIDIA RTX 2070 8 GB", 8, "turing"),
    ("rtx-2060", "NVIDIA RTX 2060 6 GB", 6, "turing"),
    ("gtx-1660", "NVIDIA GTX 1660 6 GB", 6, "turing"),
    ("gtx-1080", "NVIDIA GTX 1080 8 GB", 8, "pascal"),
    ("mi325x", "AMD MI325X 256 GB", 256, "cdna"),
    ("mi350x", "AMD MI350X 288 GB", 288, "cdna"),
    ("mi355x", "AMD MI355X 288 GB", 288, "cdna"),
    ("mi210", "AMD MI210 64 GB", 64, "cdna"),
    ("mi100", "AMD MI100 32 GB", 32, "cdna"),
    ("rx-7900-xtx", "AMD Radeon RX 7900 XTX 24 GB", 24, "cdna"),
    ("rx-7900-xt", "AMD Radeon RX 7900 XT 20 GB", 20, "cdna"),
    ("pro-w7900", "AMD Radeon PRO W7900 48 GB", 48, "cdna"),
)
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


def _model(name: str, title: str, gib: float, architecture: str, source: str = SOURCE) -> GpuModel:
    return GpuModel(
        name=name,
        title=title,
        total_bytes=round(gib * GIB / MIB) * MIB,
        context_bytes=CONTEXT_MIB[architecture] * MIB,
        architecture=architecture,
        source=source,
    )


GPUS: Final = MappingProxyType(
    {row[0]: _model(*row) for row in _TABLE}
    | {row[0]: _model(row[0], row[1], LIKE_SHARE * row[2], row[3], LIKE_SOURCE) for row in _LIKE}
)
_ALIASES: Final = MappingProxyType(
    {
        "a100": "a100-80g",
        "v100": "v100-16g",
        "h100-80g": "h100",
        "h100-sxm": "h100",
        "h100-pcie": "h100",
        "h200-141g": "h200",
        "h200-nvl": "h200",
        "a6000": "rtx-a6000",
        "a5000": "rtx-a5000",
        "6000-ada": "rtx-6000-ada",
        "mi250": "mi250x",
        "mi300": "mi300x",
        "gh200-480g": "gh200",
        "b200-180g": "b200",
        "spark": "gb10",
        "dgx-spark": "gb10",
        "8000": "quadro-rtx-8000",
    }
)


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
    context = CONTEXT_MIB[architecture] * MIB
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
        return GpuModel(name, "", total, CONTEXT_MIB[""] * MIB, "", GIVEN)
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
