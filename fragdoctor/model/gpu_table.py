"""The table of GPUs: memory, generation, multiprocessors, and what a generation's kernels take.

The single place for facts about GPUs: estimates, rehearsals, diagnoses and reports read it through
:mod:`fragdoctor.model.gpus`.

Sources:
    Memory: what PyTorch's own out-of-memory messages print for the card ("GPU 0 has a total
    capacity of 39.39 GiB"). The driver and, if it is on, error correction keep a part of the memory
    in the name. Drivers differ by some 0.2 GiB; a low figure is taken. Not measured for this table.
    Compute capability: NVIDIA, "CUDA GPU Compute Capability" (developer.nvidia.com/cuda-gpus).
    Multiprocessors: NVIDIA's data sheets and architecture white papers; for AMD, compute units.
    Threads and shared memory of a multiprocessor: CUDA C++ Programming Guide, "Technical
    Specifications per Compute Capability". L2 caches: the architectures' white papers; the 50 MiB
    of an H100 and 60 MiB of an H200 are as PyTorch reports them there.
    Workspace of a cuBLAS or hipBLAS handle: PyTorch, ``aten/src/ATen/cuda/CublasHandlePool.cpp``
    (``:4096:2:16:8``, 32 MiB for compute capability 9, 10 and 12; 32 MiB on AMD GPUs, 128 MiB on
    gfx94x and gfx95x), seen with PyTorch 2.12.1 on each NVIDIA capability.
    Context: roughly what CUDA and its libraries take in a process outside PyTorch's allocator. It
    varies with the driver and the loaded kernels, and no source states it. Hopper's is the sum of
    :data:`OUTSIDE` for a training step with convolutions or attention; the others are not measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from fragdoctor.units import KIB, MIB

_SMALL, _LARGE, _LARGEST = (2 * 4096 + 8 * 16) * KIB, 32 * MIB, 128 * MIB


@dataclass(frozen=True, slots=True)
class Generation:
    """What GPUs of one compute capability have in common; only NVIDIA's have more than a workspace.

    Attributes:
        architecture: ``hopper`` and so on, "" if only a size is known.
        context_bytes: roughly what the CUDA context and libraries take outside PyTorch.
        blas_workspace_bytes: workspace that PyTorch gives a cuBLAS handle by default.
        threads_per_multiprocessor: threads that it holds at once; 0 if that is not known.
        shared_memory_bytes: shared memory of a multiprocessor.
        block_shared_memory_bytes: the most shared memory that a block may use.
        l2_cache_bytes: the device's L2 cache, on most such cards.
    """

    architecture: str
    context_bytes: int
    blas_workspace_bytes: int
    threads_per_multiprocessor: int = 0
    shared_memory_bytes: int = 0
    block_shared_memory_bytes: int = 0
    l2_cache_bytes: int = 0


GENERATIONS: Final[Mapping[str, Generation]] = {
    # For a GPU known only by its size: a typical context, and the largest workspace.
    "": Generation("", 450 * MIB, _LARGE),
    "3.7": Generation("kepler", 300 * MIB, _SMALL, 2048, 112 * KIB, 48 * KIB, 1 * MIB),
    "5.2": Generation("maxwell", 300 * MIB, _SMALL, 2048, 96 * KIB, 48 * KIB, 3 * MIB),
    "6.0": Generation("pascal", 300 * MIB, _SMALL, 2048, 64 * KIB, 48 * KIB, 4 * MIB),
    "6.1": Generation("pascal", 300 * MIB, _SMALL, 2048, 96 * KIB, 48 * KIB, 3 * MIB),
    "7.0": Generation("volta", 330 * MIB, _SMALL, 2048, 96 * KIB, 96 * KIB, 6 * MIB),
    "7.5": Generation("turing", 320 * MIB, _SMALL, 1024, 64 * KIB, 64 * KIB, 6 * MIB),
    "8.0": Generation("ampere", 420 * MIB, _SMALL, 2048, 164 * KIB, 163 * KIB, 40 * MIB),
    "8.6": Generation("ampere", 420 * MIB, _SMALL, 1536, 100 * KIB, 99 * KIB, 6 * MIB),
    "8.7": Generation("ampere", 420 * MIB, _SMALL, 1536, 164 * KIB, 163 * KIB, 4 * MIB),
    "8.9": Generation("ada", 400 * MIB, _SMALL, 1536, 100 * KIB, 99 * KIB, 96 * MIB),
    "9.0": Generation("hopper", 770 * MIB, _LARGE, 2048, 228 * KIB, 227 * KIB, 50 * MIB),
    "10.0": Generation("blackwell", 620 * MIB, _LARGE, 2048, 228 * KIB, 227 * KIB, 126 * MIB),
    "10.3": Generation("blackwell", 620 * MIB, _LARGE, 2048, 228 * KIB, 227 * KIB, 126 * MIB),
    "12.0": Generation("blackwell", 620 * MIB, _LARGE, 1536, 100 * KIB, 99 * KIB, 128 * MIB),
    "12.1": Generation("blackwell", 620 * MIB, _LARGE, 1536, 100 * KIB, 99 * KIB, 24 * MIB),
    "gfx906": Generation("gcn", 600 * MIB, _LARGE),
    "gfx908": Generation("cdna", 600 * MIB, _LARGE),
    "gfx90a": Generation("cdna", 600 * MIB, _LARGE),
    "gfx942": Generation("cdna", 600 * MIB, _LARGEST),
    "gfx950": Generation("cdna", 600 * MIB, _LARGEST),
    "gfx1030": Generation("rdna", 600 * MIB, _LARGE),
    "gfx1100": Generation("rdna", 600 * MIB, _LARGE),
    "gfx1201": Generation("rdna", 600 * MIB, _LARGE),
    "apple": Generation("apple", 0, 0),
}
"""What is known by compute capability, or by AMD's name for it."""

OUTSIDE: Final[Mapping[str, tuple[int, int]]] = {
    "the context": (527, 527),
    "kernels": (92, 94),
    "cuBLAS": (64, 66),
    "cuDNN": (10, 18),
    "cuFFT": (6, 20),
    "cuSOLVER": (96, 100),
    "another stream": (0, 70),
    "NCCL": (388, 650),
}
"""What the first use of each takes outside PyTorch's allocator, in MiB, at least and at most.

CuBLAS takes it for each thread and stream that multiplies (forward and backward passes are two),
NCCL for each communicator, also of a single rank; a CUDA graph is captured on another stream.
Triton and compiled code take 2 MiB at most, the profiler 12; ``CUDA_MODULE_LOADING=EAGER`` loads
1,120 MiB more in all. Measured on an H200 (driver 580.159, PyTorch 2.11.0, CUDA 13.0) with
``torch.cuda.mem_get_info`` and NVML; equal in two runs but for NCCL (490 in an earlier one).
"""

OTHER_L2_CACHE: Final[Mapping[str, int]] = {"NVIDIA H200 141 GB": 60}
"""Title -> L2 cache in MiB, for cards that differ from their generation."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """Peak speeds of a card.

    Attributes:
        operations: 16-bit operations per second.
        memory_bytes: memory traffic per second.
        link_bytes: traffic to other GPUs per second, both directions together.
    """

    operations: float
    memory_bytes: float
    link_bytes: float


SPEEDS: Final[Mapping[str, Speeds]] = {
    "b200": Speeds(2250e12, 8.0e12, 1800e9),
    "h200": Speeds(989e12, 4.8e12, 900e9),
    "gh200": Speeds(989e12, 4.0e12, 900e9),
    "h100": Speeds(989e12, 3.35e12, 900e9),
    "h100-nvl": Speeds(835e12, 3.9e12, 600e9),
    "h100-pcie": Speeds(756e12, 2.0e12, 128e9),
    "a100-80g": Speeds(312e12, 2.039e12, 600e9),
    "a100-40g": Speeds(312e12, 1.555e12, 600e9),
    "l40s": Speeds(362e12, 0.864e12, 64e9),
    "l4": Speeds(121e12, 0.3e12, 64e9),
    "a40": Speeds(150e12, 0.696e12, 64e9),
    "a30": Speeds(165e12, 0.933e12, 64e9),
    "a10": Speeds(125e12, 0.6e12, 64e9),
    "a10g": Speeds(70e12, 0.6e12, 64e9),
    "v100-32g": Speeds(125e12, 0.9e12, 300e9),
    "v100-16g": Speeds(125e12, 0.9e12, 300e9),
    "t4": Speeds(65e12, 0.32e12, 32e9),
    "rtx-pro-6000": Speeds(504e12, 1.792e12, 128e9),
    "rtx-6000-ada": Speeds(364e12, 0.96e12, 64e9),
    "rtx-a6000": Speeds(155e12, 0.768e12, 64e9),
    "rtx-a5000": Speeds(111e12, 0.768e12, 64e9),
    "rtx-5090": Speeds(210e12, 1.792e12, 128e9),
    "rtx-4090": Speeds(165e12, 1.008e12, 64e9),
    "rtx-3090": Speeds(71e12, 0.936e12, 64e9),
    "mi300x": Speeds(1307e12, 5.3e12, 896e9),
}
"""Speeds by name, from the makers' data sheets; operations without sparsity."""

PRINTED: Final[Mapping[str, tuple[str, float, str, int]]] = {
    "b200": ("NVIDIA B200 180 GB", 178.35, "10.0", 148),
    "h200": ("NVIDIA H200 141 GB", 139.72, "9.0", 132),
    "gh200": ("NVIDIA GH200 96 GB", 94.50, "9.0", 132),
    "h100": ("NVIDIA H100 80 GB", 79.10, "9.0", 132),
    "h100-nvl": ("NVIDIA H100 NVL 94 GB", 93.00, "9.0", 132),
    "a100-80g": ("NVIDIA A100 80 GB", 79.15, "8.0", 108),
    "a100-40g": ("NVIDIA A100 40 GB", 39.39, "8.0", 108),
    "l40s": ("NVIDIA L40S 48 GB", 44.32, "8.9", 142),
    "l4": ("NVIDIA L4 24 GB", 21.95, "8.9", 58),
    "a40": ("NVIDIA A40 48 GB", 44.34, "8.6", 84),
    "a30": ("NVIDIA A30 24 GB", 23.50, "8.0", 56),
    "a10": ("NVIDIA A10 24 GB", 21.99, "8.6", 72),
    "a10g": ("NVIDIA A10G 24 GB", 21.99, "8.6", 80),
    "v100-32g": ("NVIDIA V100 32 GB", 31.73, "7.0", 80),
    "v100-16g": ("NVIDIA V100 16 GB", 15.77, "7.0", 80),
    "t4": ("NVIDIA T4 16 GB", 14.56, "7.5", 40),
    "p100": ("NVIDIA P100 16 GB", 15.89, "6.0", 56),
    "rtx-pro-6000": ("NVIDIA RTX PRO 6000 96 GB", 94.97, "12.0", 188),
    "rtx-6000-ada": ("NVIDIA RTX 6000 Ada 48 GB", 47.38, "8.9", 142),
    "rtx-a6000": ("NVIDIA RTX A6000 48 GB", 47.40, "8.6", 84),
    "rtx-a5000": ("NVIDIA RTX A5000 24 GB", 23.58, "8.6", 64),
    "rtx-5090": ("NVIDIA RTX 5090 32 GB", 31.36, "12.0", 170),
    "rtx-5080": ("NVIDIA RTX 5080 16 GB", 15.47, "12.0", 84),
    "rtx-4090": ("NVIDIA RTX 4090 24 GB", 23.52, "8.9", 128),
    "rtx-4080": ("NVIDIA RTX 4080 16 GB", 15.70, "8.9", 76),
    "rtx-4070": ("NVIDIA RTX 4070 12 GB", 11.72, "8.9", 46),
    "rtx-4060-ti-16g": ("NVIDIA RTX 4060 Ti 16 GB", 15.70, "8.9", 34),
    "rtx-4060": ("NVIDIA RTX 4060 8 GB", 7.63, "8.9", 24),
    "rtx-3090": ("NVIDIA RTX 3090 24 GB", 23.57, "8.6", 82),
    "rtx-3080": ("NVIDIA RTX 3080 10 GB", 9.77, "8.6", 68),
    "rtx-3060": ("NVIDIA RTX 3060 12 GB", 11.75, "8.6", 28),
    "rtx-2080-ti": ("NVIDIA RTX 2080 Ti 11 GB", 10.74, "7.5", 68),
    "gtx-1080-ti": ("NVIDIA GTX 1080 Ti 11 GB", 10.91, "6.1", 28),
    "mi300x": ("AMD MI300X 192 GB", 191.69, "gfx942", 304),
    "mi250x": ("AMD MI250X, one die, 64 GB", 63.98, "gfx90a", 110),
}
"""Name -> title, memory in GiB as PyTorch's messages print it, generation, multiprocessors."""

LIKE: Final[Mapping[str, tuple[str, float, str, int]]] = {
    "b300": ("NVIDIA B300 288 GB", 275, "10.3", 148),
    "gb200": ("NVIDIA GB200, one GPU, 186 GB", 189, "10.0", 152),
    "h100-pcie": ("NVIDIA H100 PCIe 80 GB", 80, "9.0", 114),
    "h20": ("NVIDIA H20 96 GB", 96, "9.0", 78),
    "h800": ("NVIDIA H800 80 GB", 80, "9.0", 132),
    "a800": ("NVIDIA A800 80 GB", 80, "8.0", 108),
    "gb10": ("NVIDIA GB10 (DGX Spark), shared with the CPU, 128 GB", 120, "12.1", 48),
    "orin-64g": ("NVIDIA Jetson AGX Orin, shared with the CPU, 64 GB", 62, "8.7", 16),
    "l40": ("NVIDIA L40 48 GB", 45, "8.9", 142),
    "l20": ("NVIDIA L20 48 GB", 45, "8.9", 92),
    "a2": ("NVIDIA A2 16 GB", 15, "8.6", 10),
    "a16": ("NVIDIA A16, one of four, 16 GB", 15, "8.6", 10),
    "p40": ("NVIDIA P40 24 GB", 23, "6.1", 30),
    "p4": ("NVIDIA P4 8 GB", 7.6, "6.1", 20),
    "m40": ("NVIDIA M40 24 GB", 23, "5.2", 24),
    "m60": ("NVIDIA M60, one of two, 8 GB", 8, "5.2", 16),
    "k80": ("NVIDIA K80, one of two, 12 GB", 11.5, "3.7", 13),
    "rtx-pro-5000": ("NVIDIA RTX PRO 5000 48 GB", 48, "12.0", 110),
    "rtx-pro-4500": ("NVIDIA RTX PRO 4500 32 GB", 32, "12.0", 82),
    "rtx-pro-4000": ("NVIDIA RTX PRO 4000 24 GB", 24, "12.0", 70),
    "rtx-5000-ada": ("NVIDIA RTX 5000 Ada 32 GB", 32, "8.9", 100),
    "rtx-4000-ada": ("NVIDIA RTX 4000 Ada 20 GB", 20, "8.9", 48),
    "rtx-4500-ada": ("NVIDIA RTX 4500 Ada 24 GB", 24, "8.9", 60),
    "rtx-2000-ada": ("NVIDIA RTX 2000 Ada 16 GB", 16, "8.9", 22),
    "rtx-a4000": ("NVIDIA RTX A4000 16 GB", 16, "8.6", 48),
    "rtx-a4500": ("NVIDIA RTX A4500 20 GB", 20, "8.6", 56),
    "rtx-a2000": ("NVIDIA RTX A2000 12 GB", 12, "8.6", 26),
    "quadro-rtx-8000": ("NVIDIA Quadro RTX 8000 48 GB", 48, "7.5", 72),
    "quadro-rtx-6000": ("NVIDIA Quadro RTX 6000 24 GB", 24, "7.5", 72),
    "quadro-gv100": ("NVIDIA Quadro GV100 32 GB", 32, "7.0", 80),
    "quadro-p6000": ("NVIDIA Quadro P6000 24 GB", 24, "6.1", 30),
    "titan-rtx": ("NVIDIA TITAN RTX 24 GB", 24, "7.5", 72),
    "titan-v": ("NVIDIA TITAN V 12 GB", 12, "7.0", 80),
    "titan-xp": ("NVIDIA TITAN Xp 12 GB", 12, "6.1", 30),
    "rtx-5090-laptop": ("NVIDIA RTX 5090 Laptop 24 GB", 24, "12.0", 82),
    "rtx-5070-ti": ("NVIDIA RTX 5070 Ti 16 GB", 16, "12.0", 70),
    "rtx-5070": ("NVIDIA RTX 5070 12 GB", 12, "12.0", 48),
    "rtx-5060-ti": ("NVIDIA RTX 5060 Ti 16 GB", 16, "12.0", 36),
    "rtx-5060": ("NVIDIA RTX 5060 8 GB", 8, "12.0", 30),
    "rtx-4090-laptop": ("NVIDIA RTX 4090 Laptop 16 GB", 16, "8.9", 76),
    "rtx-4080-super": ("NVIDIA RTX 4080 SUPER 16 GB", 16, "8.9", 80),
    "rtx-4070-ti-super": ("NVIDIA RTX 4070 Ti SUPER 16 GB", 16, "8.9", 66),
    "rtx-4070-ti": ("NVIDIA RTX 4070 Ti 12 GB", 12, "8.9", 60),
    "rtx-4070-super": ("NVIDIA RTX 4070 SUPER 12 GB", 12, "8.9", 56),
    "rtx-4070-laptop": ("NVIDIA RTX 4070 Laptop 8 GB", 8, "8.9", 36),
    "rtx-4060-ti": ("NVIDIA RTX 4060 Ti 8 GB", 8, "8.9", 34),
    "rtx-4060-laptop": ("NVIDIA RTX 4060 Laptop 8 GB", 8, "8.9", 24),
    "rtx-3090-ti": ("NVIDIA RTX 3090 Ti 24 GB", 24, "8.6", 84),
    "rtx-3080-ti": ("NVIDIA RTX 3080 Ti 12 GB", 12, "8.6", 80),
    "rtx-3080-12g": ("NVIDIA RTX 3080 12 GB", 12, "8.6", 70),
    "rtx-3070-ti": ("NVIDIA RTX 3070 Ti 8 GB", 8, "8.6", 48),
    "rtx-3070": ("NVIDIA RTX 3070 8 GB", 8, "8.6", 46),
    "rtx-3060-ti": ("NVIDIA RTX 3060 Ti 8 GB", 8, "8.6", 38),
    "rtx-3050": ("NVIDIA RTX 3050 8 GB", 8, "8.6", 20),
    "rtx-2080-super": ("NVIDIA RTX 2080 SUPER 8 GB", 8, "7.5", 48),
    "rtx-2080": ("NVIDIA RTX 2080 8 GB", 8, "7.5", 46),
    "rtx-2070-super": ("NVIDIA RTX 2070 SUPER 8 GB", 8, "7.5", 40),
    "rtx-2070": ("NVIDIA RTX 2070 8 GB", 8, "7.5", 36),
    "rtx-2060-super": ("NVIDIA RTX 2060 SUPER 8 GB", 8, "7.5", 34),
    "rtx-2060": ("NVIDIA RTX 2060 6 GB", 6, "7.5", 30),
    "gtx-1660-ti": ("NVIDIA GTX 1660 Ti 6 GB", 6, "7.5", 24),
    "gtx-1660-super": ("NVIDIA GTX 1660 SUPER 6 GB", 6, "7.5", 22),
    "gtx-1660": ("NVIDIA GTX 1660 6 GB", 6, "7.5", 22),
    "gtx-1650": ("NVIDIA GTX 1650 4 GB", 4, "7.5", 14),
    "gtx-1080": ("NVIDIA GTX 1080 8 GB", 8, "6.1", 20),
    "gtx-1070-ti": ("NVIDIA GTX 1070 Ti 8 GB", 8, "6.1", 19),
    "gtx-1070": ("NVIDIA GTX 1070 8 GB", 8, "6.1", 15),
    "gtx-1060": ("NVIDIA GTX 1060 6 GB", 6, "6.1", 10),
    "mi325x": ("AMD MI325X 256 GB", 256, "gfx942", 304),
    "mi350x": ("AMD MI350X 288 GB", 288, "gfx950", 256),
    "mi355x": ("AMD MI355X 288 GB", 288, "gfx950", 256),
    "mi210": ("AMD MI210 64 GB", 64, "gfx90a", 104),
    "mi100": ("AMD MI100 32 GB", 32, "gfx908", 120),
    "mi60": ("AMD MI60 32 GB", 32, "gfx906", 64),
    "mi50": ("AMD MI50 32 GB", 32, "gfx906", 60),
    "radeon-vii": ("AMD Radeon VII 16 GB", 16, "gfx906", 60),
    "rx-7900-xtx": ("AMD Radeon RX 7900 XTX 24 GB", 24, "gfx1100", 96),
    "rx-7900-xt": ("AMD Radeon RX 7900 XT 20 GB", 20, "gfx1100", 84),
    "rx-9070-xt": ("AMD Radeon RX 9070 XT 16 GB", 16, "gfx1201", 64),
    "rx-6900-xt": ("AMD Radeon RX 6900 XT 16 GB", 16, "gfx1030", 80),
    "rx-6800-xt": ("AMD Radeon RX 6800 XT 16 GB", 16, "gfx1030", 72),
    "pro-w7900": ("AMD Radeon PRO W7900 48 GB", 48, "gfx1100", 96),
}
"""The same for GPUs without a known message: the GiB in the name, minus what ECC takes."""

MIG_SLICES: Final[Mapping[str, int]] = {"a30": 4, "rtx-pro-6000": 4}
"""How many slices MIG divides a GPU's multiprocessors into, if not seven (NVIDIA, "MIG User Guide",
supported profiles)."""

ALIASES: Final[Mapping[str, str]] = {
    "a100": "a100-80g",
    "v100": "v100-16g",
    "h100-80g": "h100",
    "h100-sxm": "h100",
    "h200-141g": "h200",
    "h200-nvl": "h200",
    "a6000": "rtx-a6000",
    "a5000": "rtx-a5000",
    "6000-ada": "rtx-6000-ada",
    "a6000-ada": "rtx-6000-ada",
    "w7900": "pro-w7900",
    "jetson-agx-orin-64g": "orin-64g",
    "mi250": "mi250x",
    "mi300": "mi300x",
    "gh200-480g": "gh200",
    "b200-180g": "b200",
    "spark": "gb10",
    "dgx-spark": "gb10",
    "8000": "quadro-rtx-8000",
    "rtx-8000": "quadro-rtx-8000",
    "vii": "radeon-vii",
}
"""Other name -> name in the table."""

INSTANCES: Final[Mapping[str, str]] = {
        "g4dn.": "t4", "g5.": "a10g", "g6.": "l4", "g6e.": "l40s", "p3.": "v100-16g",
        "p3dn.": "v100-32g", "p4d.": "a100-40g", "p4de.": "a100-80g", "p5.": "h100",
        "p5e.": "h200", "p5en.": "h200", "p6-b200.": "b200", "a2-highgpu-": "a100-40g",
        "a2-megagpu-": "a100-40g", "a2-ultragpu-": "a100-80g", "a3-highgpu-": "h100",
        "a3-megagpu-": "h100", "a3-ultragpu-": "h200", "a4-highgpu-": "b200", "g2-standard-": "l4",
}  # fmt: skip
"""Prefix of the type of a rented machine -> its GPU (aws.amazon.com/ec2/instance-types,
cloud.google.com/compute/docs/gpus)."""
