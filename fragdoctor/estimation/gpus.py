"""Known GPUs with the memory that CUDA really reports, which is less than the name says.

The total is about what ``torch.cuda.get_device_properties().total_memory`` gives, as PyTorch's own
out-of-memory messages print it ("GPU 0 has a total capacity of 39.39 GiB"): the driver and, where
it is on, error correction keep a part. Drivers differ by some 0.2 GiB; a lower figure is taken.
None of them was measured for this table, and ``source`` says so. The context is what CUDA and its
libraries take in a process before the first tensor, about.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from types import MappingProxyType
from typing import Final

from fragdoctor.errors import ConfigError
from fragdoctor.model.estimate import GpuModel
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


def _model(name: str, title: str, gib: float, architecture: str) -> GpuModel:
    return GpuModel(
        name=name,
        title=title,
        total_bytes=round(gib * GIB / MIB) * MIB,
        context_bytes=CONTEXT_MIB[architecture] * MIB,
        architecture=architecture,
        source=SOURCE,
    )


GPUS: Final = MappingProxyType({row[0]: _model(*row) for row in _TABLE})
_ALIASES: Final = MappingProxyType(
    {
        "a100": "a100-80g",
        "v100": "v100-16g",
        "h100-80g": "h100",
        "h100-sxm": "h100",
        "h100-pcie": "h100",
        "h200-141g": "h200",
        "a6000": "rtx-a6000",
        "a5000": "rtx-a5000",
        "6000-ada": "rtx-6000-ada",
        "mi250": "mi250x",
        "mi300": "mi300x",
    }
)


def _key(name: str) -> str:
    key = "-".join(name.strip().lower().replace("_", "-").replace(" ", "-").split("-"))
    key = key.removeprefix("nvidia-").removeprefix("amd-").removeprefix("geforce-")
    key = key.replace("gib", "g").replace("gb", "g")
    for brand in ("rtx", "gtx"):
        if key.startswith(brand) and key[3:4].isdigit():
            key = f"{brand}-{key[3:]}"
    return key


def gpu_of(name: str) -> GpuModel:
    """Return the GPU of this name, or one of the size that is given.

    Raises:
        ConfigError: neither a known GPU nor a size.
    """
    key = _key(name)
    known = _find(key)
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
