from __future__ import annotations

import pytest

from fragdoctor.errors import ConfigError
from fragdoctor.model.gpu_table import ALIASES, GENERATIONS
from fragdoctor.model.gpus import GPUS, gpu_of, kernels_of
from fragdoctor.units import GIB, MIB


def test_names_are_found_however_people_write_them() -> None:
    for text in ("a100-40g", "A100-40GB", "a100 40gb", "NVIDIA A100-40GB"):
        assert gpu_of(text).name == "a100-40g"
    for text in ("4090", "rtx4090", "RTX 4090", "rtx-4090"):
        assert gpu_of(text).name == "rtx-4090"


@pytest.mark.parametrize("name", GPUS)
def test_memory_is_below_what_the_name_says(name: str) -> None:
    gpu = GPUS[name]
    stated = float(gpu.title.split()[-2])

    # Makers count in powers of 1000, CUDA's figure is of powers of 1024 less the driver's part.
    assert 0.85 * stated * 1e9 < gpu.total_bytes <= 1.08 * stated * 1e9
    assert gpu.usable_bytes < gpu.total_bytes
    assert gpu.source


def test_size_is_a_gpu_too() -> None:
    gpu = gpu_of("24GiB")

    assert gpu.total_bytes == 24 * GIB
    assert gpu.architecture == ""


@pytest.mark.parametrize("text", ["h10", "", "24", "a100-41g", "toaster"])
def test_what_is_neither_is_refused_with_a_next_step(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        gpu_of(text)

    assert "--list-gpus" in caught.value.hint


@pytest.mark.parametrize(
    "text", ["2x3090", "2 x RTX 3090", "rtx3090x2", "2*rtx-3090", "two 3090s", "2-3090"]
)
def test_several_are_told_apart_from_the_card(text: str) -> None:
    with pytest.raises(ConfigError, match="is 2 GPUs") as refused:
        gpu_of(text)

    assert "--gpu rtx-3090," in refused.value.hint
    assert "--world-size 2 --zero 3" in refused.value.hint


def test_one_of_a_card_is_the_card() -> None:
    assert gpu_of("1x A100 80GB") == gpu_of("a100-80g")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("7900 XTX", "rx-7900-xtx"),
        ("RTX 8000", "quadro-rtx-8000"),
        ("RTX 3080 12GB", "rtx-3080-12g"),
        ("3080 10gb", "rtx-3080"),
        ("40 GB A100", "a100-40g"),
        ("Radeon VII", "radeon-vii"),
        ("Colab T4", "t4"),
        ("g5.xlarge", "a10g"),
        ("p4de.24xlarge", "a100-80g"),
        ("a3-highgpu-8g", "h100"),
        ("p4", "p4"),
    ],
)
def test_names_that_people_type(text: str, name: str) -> None:
    assert gpu_of(text).name == name


def test_near_miss_is_suggested() -> None:
    with pytest.raises(ConfigError) as caught:
        gpu_of("h1000")

    assert "h100" in caught.value.hint


@pytest.mark.parametrize(
    ("compute", "n_bytes"),
    [
        ("7.5", 8_519_680),
        ("8.0", 8_519_680),
        ("8.9", 8_519_680),
        ("9.0", 32 * MIB),
        ("10.0", 32 * MIB),
        ("12.0", 32 * MIB),
        ("12.1", 32 * MIB),
    ],
)
def test_workspace_is_what_pytorch_takes_for_a_handle(compute: str, n_bytes: int) -> None:
    """As PyTorch 2.12.1 asked its own allocator on each compute capability."""
    assert GENERATIONS[compute].blas_workspace_bytes == n_bytes


@pytest.mark.parametrize("name", [n for n, g in GPUS.items() if g.title.startswith("NVIDIA")])
def test_each_gpu_of_nvidia_has_what_its_kernels_go_by(name: str) -> None:
    gpu = GPUS[name]

    assert gpu.capability is not None
    assert gpu.n_multiprocessors > 0
    assert gpu.generation.threads_per_multiprocessor in {1024, 1536, 2048}
    assert gpu.generation.block_shared_memory_bytes <= gpu.generation.shared_memory_bytes
    assert kernels_of(gpu) is gpu


def test_kernels_of_a_size_are_those_of_an_h100() -> None:
    assert kernels_of(gpu_of("24GiB")).name == kernels_of(None).name == "h100"


def test_slice_has_its_share_of_the_multiprocessors() -> None:
    """MIG User Guide: a seventh of an A100, a quarter of an A30."""
    assert gpu_of("A100-SXM4-80GB MIG 7g.80gb").n_multiprocessors == 108
    assert gpu_of("NVIDIA A30 MIG 2g.12gb").n_multiprocessors == 28
    assert gpu_of("H100 MIG 1g.10gb").capability == (9, 0)
    assert gpu_of("MIG 1g.10gb").capability is None


def test_other_names_lead_to_a_gpu_and_hide_none() -> None:
    assert set(ALIASES.values()) <= set(GPUS)
    assert not set(ALIASES) & set(GPUS)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-80g"),
        ("NVIDIA A100-PCIE-40GB", "a100-40g"),
        ("NVIDIA A100 80GB PCIe", "a100-80g"),
        ("Tesla T4", "t4"),
        ("Tesla V100-SXM2-32GB", "v100-32g"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200 NVL", "h200"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "rtx-4090-laptop"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000"),
        ("AMD Instinct MI300X", "mi300x"),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", "a100-80g-1g.10gb"),
        ("M3 Max 64GB", "m3-max-64g"),
        ("NVIDIA GB10", "gb10"),
        ("rtx 3070", "rtx-3070"),
        ("RTX3070", "rtx-3070"),
        ("rtx_3070", "rtx-3070"),
        ("3070", "rtx-3070"),
        ("a100-80gb", "a100-80g"),
    ],
)
def test_names_that_drivers_write_are_found(text: str, name: str) -> None:
    assert gpu_of(text).name == name


def test_mac_without_its_memory_is_asked_for_it() -> None:
    with pytest.raises(ConfigError, match="more than one size"):
        gpu_of("Apple M3 Max")


def test_slice_and_shared_memory_are_less_than_their_names_say() -> None:
    assert gpu_of("MIG 3g.20gb").total_bytes == int(0.95 * 20 * GIB)
    assert gpu_of("M2 16GB").usable_bytes == int(16 * GIB * 2 / 3)
    assert gpu_of("M3 Max 64GB").usable_bytes == 48 * GIB
    assert gpu_of("A100-40GB MIG 1g.5gb").architecture == "ampere"
