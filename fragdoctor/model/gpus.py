"""GPUs by name, as people and drivers write them, or by size.

The facts about each GPU are in :mod:`fragdoctor.model.gpu_table`. A MIG slice has at least 95% of
the memory in its name (NVIDIA, "MIG User Guide", supported profiles: 4.75 of 5, 9.75 of 10, 19.62
of 20 GB). A Mac's GPU may use two thirds of the memory up to 36 GB, and three quarters of a larger
memory (Apple, ``MTLDevice.recommendedMaxWorkingSetSize``).
"""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Final

from fragdoctor.errors import ConfigError
from fragdoctor.lazy import regex
from fragdoctor.model import gpu_table
from fragdoctor.units import GIB, MIB, parse_size

SOURCE: Final = (
    "about the total capacity that out-of-memory messages commonly print for this GPU; drivers "
    "differ by some 0.2 GiB; not measured"
)
LIKE_SHARE: Final = 0.975
"""The lowest share of the memory in their names that known cards have without error correction."""
LIKE_SOURCE: Final = "97.5% of the memory in its name, as similar cards report; not measured"
MIG_SHARE: Final = 0.95
MIG_SOURCE: Final = (
    "95% of the memory in the profile's name, the lowest share in NVIDIA's MIG User Guide"
)
MAC_SOURCE: Final = (
    "Apple, MTLDevice.recommendedMaxWorkingSetSize: two thirds of up to 36 GB, three quarters of "
    "more; the system and other programs use the same memory"
)
FULL_SHARE: Final = 0.9
"""What takes more of a GPU leaves no room for a context, libraries and what is computed."""
SMALL_MAC_GIB: Final = 36

TYPICAL_CONTEXT_BYTES: Final = gpu_table.GENERATIONS[""].context_bytes
"""CUDA context of a process on an unknown GPU."""
CUBLAS_WORKSPACES: Final = frozenset(
    kind.blas_workspace_bytes
    for kind in gpu_table.GENERATIONS.values()
    if kind.threads_per_multiprocessor
)
"""Every size that a cuBLAS workspace has by default."""


@dataclass(frozen=True, slots=True)
class GpuModel:
    """A GPU to run on.

    Attributes:
        name: short name, ``a100-40g``, or the size as the user gave it.
        title: ``NVIDIA A100 40 GB``, or "".
        total_bytes: what ``torch.cuda.get_device_properties().total_memory`` reports.
        source: where that figure comes from.
        compute: compute capability of its generation.
        n_multiprocessors: multiprocessors of the device; 0 if that is not known.
    """

    name: str
    title: str
    total_bytes: int
    source: str
    compute: str = ""
    n_multiprocessors: int = 0

    @property
    def generation(self) -> gpu_table.Generation:
        """What the GPU has in common with others of its compute capability."""
        return gpu_table.GENERATIONS[self.compute]

    @property
    def architecture(self) -> str:
        """``hopper`` and so on, "" if only a size is known."""
        return self.generation.architecture

    @property
    def context_bytes(self) -> int:
        """What the CUDA context and libraries take outside PyTorch."""
        return self.generation.context_bytes

    @property
    def l2_cache_bytes(self) -> int:
        """The L2 cache of the device; 0 if it is not known."""
        own = gpu_table.OTHER_L2_CACHE.get(self.title)
        return self.generation.l2_cache_bytes if own is None else own * MIB

    @property
    def usable_bytes(self) -> int:
        """The most that PyTorch can reserve."""
        return max(0, self.total_bytes - self.context_bytes)

    @property
    def capability(self) -> tuple[int, int] | None:
        """Compute capability; None for a GPU that is not NVIDIA's, or known only by size."""
        if not self.generation.threads_per_multiprocessor:
            return None
        major, minor = self.compute.split(".")
        return int(major), int(minor)


def _models(
    rows: Mapping[str, tuple[str, float, str, int]], share: float, source: str
) -> dict[str, GpuModel]:
    return {
        name: GpuModel(
            name, title, round(share * gib * GIB / MIB) * MIB, source, compute, n_multiprocessors
        )
        for name, (title, gib, compute, n_multiprocessors) in rows.items()
    }


GPUS: Final[Mapping[str, GpuModel]] = {
    **_models(gpu_table.PRINTED, 1, SOURCE),
    **_models(gpu_table.LIKE, LIKE_SHARE, LIKE_SOURCE),
}
DEFAULT: Final = GPUS["h100"]
"""The GPU whose kernels are assumed if none is named."""

# What drivers write around the name of a card.
_AROUND: Final = frozenset(
    {"nvidia", "amd", "tesla", "geforce", "instinct", "radeon", "gpu", "generation", "graphics",
     "card", "blackwell", "server", "workstation", "edition", "accelerator", "max-q", "oam", "pcie",
     "sxm", "sxm2", "sxm3", "sxm4", "sxm5", "sxm6", "hbm2", "hbm2e", "hbm3", "hbm3e", "gddr6",
     "colab", "kaggle"}
)  # fmt: skip
_MIG: Final = regex(
    r"(?:(.*?)[\s-]*)?(?:mig[\s-]*)?([1-7])(?:c\.\d)?g\.(\d{1,3})gb?(?:\+.*)?", re.ASCII
)
_MAC: Final = regex(
    r"(?:apple[\s-]*)?(m[1-9][\s-]*(?:pro|max|ultra)?)(?:[\s-]+(\d{1,3})\s*g(?:i?b)?)?", re.ASCII
)


def _key(name: str, around: frozenset[str] = _AROUND) -> str:
    """Return a name in a uniform spelling, without the words that drivers write around it."""
    words = re.sub(r"[\s_/-]+", "-", name.strip().lower()).split("-")
    words = [word for word in words if word and word not in around]
    key = re.sub(r"(\d)-?gi?b\b", r"\1g", "-".join(words))
    key = re.sub(r"^(\d{2,3}g)-(.+)", r"\2-\1", key)  # memory is said before the name, too
    for brand in ("rtx", "gtx", "rx"):
        key = re.sub(rf"(^|-){brand}(\d)", rf"\1{brand}-\2", key)
    return key


def _slice(name: str) -> GpuModel | None:
    """Return the slice of a GPU that a MIG profile names: ``A100-SXM4-80GB MIG 1g.10gb``."""
    match = _MIG.fullmatch(name.strip().lower())
    if match is None:
        return None
    whole = _find(match.group(1) or "")
    total = int(MIG_SHARE * int(match.group(3)) * GIB)
    profile = f"{match.group(2)}g.{match.group(3)}gb"
    title = f"MIG slice {profile}"
    if whole is None:
        return GpuModel(profile, title, total, MIG_SOURCE)
    n_slices = gpu_table.MIG_SLICES.get(whole.name, 7)
    own = whole.n_multiprocessors * int(match.group(2)) // n_slices
    return GpuModel(f"{whole.name}-{profile}", title, total, MIG_SOURCE, whole.compute, own)


def _rented(name: str) -> GpuModel | None:
    """Return the GPU in a rented machine of this type: ``g5.xlarge``."""
    kinds = gpu_table.INSTANCES.items()
    return next((GPUS[gpu] for start, gpu in kinds if name.strip().lower().startswith(start)), None)


def _mac(name: str) -> GpuModel | None:
    """Return the part of a Mac's memory that its GPU may use: ``M3 Max 64GB``."""
    match = _MAC.fullmatch(name.strip().lower())
    if match is None:
        return None
    if not int(match.group(2) or 0):
        raise ConfigError(
            f"{name} comes with more than one size of memory.",
            hint=f"Add the size to the name: {name.strip()} 64GB.",
        )
    gib = int(match.group(2))
    share = 2 / 3 if gib <= SMALL_MAC_GIB else 3 / 4
    chip = re.sub(r"[\s-]+", "-", match.group(1).strip())
    title = f"Apple {chip.replace('-', ' ').upper()}, shared with the CPU, {gib} GB"
    return GpuModel(f"{chip}-{gib}g", title, int(share * gib * GIB), MAC_SOURCE, "apple")


CARDS: Final = (
    r"(?:[ahv][1-8]00|h20|p100|[tl]4|l40s?|l20|a10g?|a[346]0(?:00)?|[1-5]0[5-9]0(?: ?ti)?)"
)
"""Pattern for the names of common cards as people write them, without regard to case."""
SIZED: Final = regex(r"\d{1,7} ?(?:gi?b?|mi?b)", re.ASCII)
_NUMBERS: Final = {"two": "2", "four": "4", "eight": "8", "sixteen": "16"}
_SEVERAL: Final = regex(
    rf"([1-9]\d{{0,3}}|{'|'.join(_NUMBERS)})(?:\s*[x*-]\s*|\s+)(.+)|(.+?)\s*[x*]\s*([1-9]\d{{0,3}})"
)


def gpu_of(name: str) -> GpuModel:
    """Return the GPU with this name, or a GPU of the given size.

    Raises:
        ConfigError: the name is neither a known GPU nor a size.
    """
    n, each = counted(name)
    if n > 1:
        one = gpu_of(each)
        raise ConfigError(
            f"{name!r} is {n} GPUs; --gpu names one.",
            hint=f"Write --gpu {one.name}, and for an estimate --world-size {n} --zero 3 to train, "
            f"--tensor-parallel {n} to serve, or --plan.",
        )
    known = known_gpu(each)
    if known is not None:
        return known
    with contextlib.suppress(ConfigError):
        if total := parse_size(each):
            return GpuModel(name, "", total, "as given")
    spelled = _spelled()
    near = difflib.get_close_matches(_key(name), spelled, n=4, cutoff=0.5)
    meant = list(dict.fromkeys(spelled[key].name for key in near))[:2]
    guess = f"Did you mean {' or '.join(meant)}? " if meant else ""
    size = f"{name.strip()}GiB" if re.fullmatch(r"\s*\d{1,3}\s*", name) else "24GiB"
    raise ConfigError(
        f"{name!r} is neither a known GPU nor a size.",
        hint=f"{guess}See: fragdoctor estimate --list-gpus; or write a size such as {size}.",
    )


def counted(text: str) -> tuple[int, str]:
    """Return how many GPUs a text means, and which: ``two 4090s`` are 2 ``4090``."""
    several = None if known_gpu(text) else _SEVERAL.fullmatch(text.strip().lower())
    n, one = (
        ("1", text) if several is None else (several[1] or several[4], several[2] or several[3])
    )
    for name in (one, one.removesuffix("s")):
        if known_gpu(name) is not None or SIZED.fullmatch(name.lower()) is not None:
            return int(_NUMBERS.get(n, n)), name
    return 1, text


def known_gpu(name: str) -> GpuModel | None:
    """Return the GPU with this name, or None if it is not known."""
    return _find(name) or _slice(name) or _mac(name) or _rented(name)


def _find(name: str) -> GpuModel | None:
    """Return the GPU with this name; a PCIe card may differ from the module of the same name."""
    return _of_key(_key(name, _AROUND - {"pcie"})) or _of_key(_key(name))


def _of_key(key: str) -> GpuModel | None:
    """Return the GPU with this key; memory stated in the key must match the table."""
    spelled = _spelled()
    found = spelled.get(key) or spelled.get(key.replace("-", ""))
    stated = None if found else re.fullmatch(r"(.+?)-?(\d{2,3})g", key)
    if stated is None:
        return found
    found = spelled.get(stated.group(1)) or spelled.get(stated.group(1).replace("-", ""))
    return found if found and f" {stated.group(2)} GB" in found.title else None


@cache
def _spelled() -> Mapping[str, GpuModel]:
    """Return GPUs by every spelling of their names; the first GPU with a spelling gets it."""
    found: dict[str, GpuModel] = {}
    for name, gpu in GPUS.items():
        short = re.sub("^(?:rtx|gtx|rx)-", "", name)
        for spelling in (name, short, name.replace("-", ""), short.replace("-", "")):
            found.setdefault(spelling, gpu)
    for alias, name in gpu_table.ALIASES.items():
        found.setdefault(alias, GPUS[name])
    return found


def kernels_of(gpu: GpuModel | None) -> GpuModel:
    """Return the GPU whose kernels to assume: the GPU itself, or an H100 if they are not known."""
    return DEFAULT if gpu is None or gpu.capability is None else gpu


_MONITORS: Final = {
    "rocm": "rocm-smi",
    "xpu": "xpu-smi",
    "npu": "npu-smi",
    "musa": "mthreads-gmi",
    "mlu": "cnmon",
    "mps": "Activity Monitor",
}


_OF_NVIDIA: Final = regex(r"nvidia-smi(?: \(?or fuser -v /dev/nvidia\*\)?)?")


def with_monitor_of(backend: str, text: str) -> str:
    """Return advice with the backend's tool that shows who uses a device, for NVIDIA's in it."""
    tool = _MONITORS.get(backend)
    return text if tool is None else _OF_NVIDIA.sub(tool, text)
