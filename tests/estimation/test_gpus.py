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
