from __future__ import annotations

import pytest

from fragdoctor.errors import ConfigError
from fragdoctor.estimation.gpus import GPUS, gpu_of, known_gpus
from fragdoctor.estimation.states import workspace_bytes
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


def test_near_miss_is_suggested() -> None:
    with pytest.raises(ConfigError) as caught:
        gpu_of("h1000")

    assert "h100" in caught.value.hint


def test_workspace_is_of_the_architecture() -> None:
    assert workspace_bytes("hopper") == 32 * MIB
    assert workspace_bytes("ampere") == 8_519_680
    assert {workspace_bytes(g.architecture) for g in known_gpus()} == {32 * MIB, 8_519_680}


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
