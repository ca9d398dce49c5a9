"""Which GPUs a program can be rehearsed on, and how much memory it finds there."""

from __future__ import annotations

import pytest

from fragdoctor.errors import ConfigError
from fragdoctor.model.gpus import GPUS
from fragdoctor.rehearsal.process import rehearsed_gpu
from fragdoctor.units import GIB

NVIDIAS = [gpu.name for gpu in GPUS.values() if gpu.title.startswith("NVIDIA")]
OTHERS = [gpu.name for gpu in GPUS.values() if gpu.name not in NVIDIAS]


@pytest.mark.parametrize("name", [*NVIDIAS, "24GiB", "a100-80g-1g.10gb", "1g.10gb"])
def test_what_pytorch_can_have_is_the_gpu_less_the_context_that_is_listed(name: str) -> None:
    gpu = rehearsed_gpu(name, None, is_unlimited=False)

    assert gpu.capacity_bytes == gpu.total_bytes - gpu.context_bytes
    assert gpu.name == name
    assert gpu.kernels.title


def test_kernels_are_those_of_the_gpu_and_of_an_h100_for_a_size() -> None:
    gpus = [rehearsed_gpu(name, None, is_unlimited=False) for name in ("l40", "24GiB")]
    of_card, of_size = (gpu.kernels for gpu in gpus)

    assert (of_card.compute, of_card.n_multiprocessors) == ("8.9", 142)
    assert (of_size.compute, of_size.n_multiprocessors) == ("9.0", 132)
    assert gpus[1].total_bytes == 24 * GIB


@pytest.mark.parametrize("name", [*OTHERS, "M3 Max 64GB"])
def test_gpu_of_another_maker_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="NVIDIA GPUs"):
        rehearsed_gpu(name, None, is_unlimited=False)
