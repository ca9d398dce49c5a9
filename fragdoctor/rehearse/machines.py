"""The GPU that a program meets in a rehearsal: its size, and what decides about kernels."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from fragdoctor.errors import ConfigError
from fragdoctor.estimation.gpus import gpu_of
from fragdoctor.frozen import frozen
from fragdoctor.model.estimate import GpuModel

DEFAULT: Final = "h100"
# name -> compute capability and multiprocessors, as NVIDIA's data sheets say
_KERNELS: Final = MappingProxyType(
    {
        "b200": ((10, 0), 148),
        "h200": ((9, 0), 132),
        "gh200": ((9, 0), 132),
        "h100": ((9, 0), 132),
        "h100-nvl": ((9, 0), 132),
        "a100-80g": ((8, 0), 108),
        "a100-40g": ((8, 0), 108),
        "l40s": ((8, 9), 142),
        "l4": ((8, 9), 58),
        "a40": ((8, 6), 84),
        "a30": ((8, 0), 56),
        "a10": ((8, 6), 72),
        "a10g": ((8, 6), 80),
        "v100-32g": ((7, 0), 80),
        "v100-16g": ((7, 0), 80),
        "t4": ((7, 5), 40),
        "p100": ((6, 0), 56),
        "rtx-pro-6000": ((12, 0), 188),
        "rtx-6000-ada": ((8, 9), 142),
        "rtx-a6000": ((8, 6), 84),
        "rtx-a5000": ((8, 6), 64),
        "rtx-5090": ((12, 0), 170),
        "rtx-5080": ((12, 0), 84),
        "rtx-4090": ((8, 9), 128),
        "rtx-4080": ((8, 9), 76),
        "rtx-4070": ((8, 9), 46),
        "rtx-4060-ti-16g": ((8, 9), 34),
        "rtx-4060": ((8, 9), 24),
        "rtx-3090": ((8, 6), 82),
        "rtx-3080": ((8, 6), 68),
        "rtx-3060": ((8, 6), 28),
        "rtx-2080-ti": ((7, 5), 68),
        "gtx-1080-ti": ((6, 1), 28),
    }
)


@frozen
class RehearsedGpu:
    """The GPU that the program sees.

    Attributes:
        name: as the user asked for it.
        title: as ``torch.cuda.get_device_name`` says it.
        total_bytes: memory of the device.
        capacity_bytes: what PyTorch can have of it; None = no limit.
        context_bytes: what CUDA itself takes in a process, estimated.
        capability: compute capability.
        n_multiprocessors: of the device.
    """

    name: str
    title: str
    total_bytes: int
    capacity_bytes: int | None
    context_bytes: int
    capability: tuple[int, int]
    n_multiprocessors: int


def rehearsed_gpu(
    name: str | None, capacity_bytes: int | None, *, is_unlimited: bool
) -> RehearsedGpu:
    """Return the GPU that was asked for.

    Args:
        name: of a known GPU or a size; None = kernels as on an H100.
        capacity_bytes: what PyTorch can have; None = the GPU's memory without CUDA's context.
        is_unlimited: whether requests never fail; so it is where nothing says a size.

    Raises:
        ConfigError: there is no such GPU, or it is not one of NVIDIA's.
    """
    model = gpu_of(name or DEFAULT)
    if model.name not in _KERNELS and model.architecture:
        raise ConfigError(
            f"Programs are rehearsed on GPUs of NVIDIA, and {model.title} is none.",
            hint="Choose another with --gpu; fragdoctor estimate --list-gpus names them.",
        )
    kernels = model if model.name in _KERNELS else gpu_of(DEFAULT)
    capability, n_multiprocessors = kernels_of(kernels)
    total_bytes = model.total_bytes
    if name is None and capacity_bytes is not None:
        total_bytes = capacity_bytes
    if capacity_bytes is None and name is not None:
        capacity_bytes = model.usable_bytes
    return RehearsedGpu(
        name=model.name if name is not None else "",
        title=kernels.title,
        total_bytes=max(total_bytes, capacity_bytes or 0),
        capacity_bytes=None if is_unlimited else capacity_bytes,
        context_bytes=kernels.context_bytes,
        capability=capability,
        n_multiprocessors=n_multiprocessors,
    )


def kernels_of(gpu: GpuModel | None) -> tuple[tuple[int, int], int]:
    """Return compute capability and multiprocessors; those of an H100 where they are not known."""
    return _KERNELS.get(gpu.name if gpu else DEFAULT, _KERNELS[DEFAULT])
