"""Where memory is, by a text's tables, its launch lines and its words."""

from __future__ import annotations

import pytest

from fragdoctor.inputs.ledger import ledger_of
from fragdoctor.inputs.told_failures import told_kill
from fragdoctor.model.ledger import Ledger

GPUSTAT = (
    "[0] Tesla T4 | 60'C,  99 % | 14980 / 15360 MB | ann(14800M)\n"
    "[1] Tesla T4 | 31'C,   0 % |     3 / 15360 MB |\n"
)


@pytest.mark.parametrize(
    "said",
    [
        "Another training is already using GPU 0.",
        "My colleague says that cards 0 and 1 are occupied.",
        "There is one job already running on the first card.",
        "The GPU is used by someone from another lab.",
    ],
)
def test_ledger_others_on_a_gpu(said: str) -> None:
    assert ledger_of(f"It is out of memory. {said}").has_others


@pytest.mark.parametrize(
    "said",
    [
        "No other process is using the GPU.",
        "I use a GPU with 24 GB.",
        "The memory is occupied by my model on the GPU.",
        "Someone uses a newer version.",
    ],
)
def test_ledger_nobody_else_on_the_gpu(said: str) -> None:
    assert not ledger_of(f"It is out of memory. {said}").has_others


def test_ledger_free_gpus() -> None:
    assert ledger_of("The second card is empty.").has_others
    assert ledger_of("I want it on the unused GPU.").has_others
    assert not ledger_of("It fails with 10 GB free GPU memory.").has_others
    assert not ledger_of("It fails on a 10gb free GPU.").has_others
    assert ledger_of(GPUSTAT).free_gpu == 1
    assert not ledger_of(GPUSTAT).has_room


@pytest.mark.parametrize(
    ("said", "n"),
    [
        ('rllib train --config \'{"num_workers": 8, "num_gpus_per_worker": 0.25}\'', 4),
        ('tune.run(f, resources_per_trial={"cpu": 1, "gpu": 0.5})', 2),
        ("Three instances of the service run on the same GPU.", 3),
        ("All processes load the model onto the same GPU.", 2),
        ("With 6 workers the API is out of GPU memory, with 2 it is not.", 6),
        ("I train on a single GPU with a batch of 8.", 1),
        ("With 6 workers of the DataLoader it is out of GPU memory.", 1),
        ("gpu_memory_utilization=0.25", 1),
    ],
)
def test_ledger_processes_that_share_a_gpu(said: str, n: int) -> None:
    assert ledger_of(said).n_sharing == n


def test_ledger_only_gpu_is_shared() -> None:
    shared = "All processes load the model onto the same GPU."

    assert ledger_of(shared).is_shared
    assert not ledger_of(f"{shared} The machine has four GPUs.").is_shared


@pytest.mark.parametrize(
    "said",
    [
        "CUDA out of memory as soon as I increase num_workers.",
        "Why is it out of GPU memory for num_workers=4?",
        "It works without block swap, but with it I get CUDA out of memory.",
    ],
)
def test_ledger_fails_with_more_on_the_host(said: str) -> None:
    assert ledger_of(said).needs_host


@pytest.mark.parametrize(
    "said", ["I use num_workers=4. CUDA out of memory.", "CUDA out of memory with num_workers=0."]
)
def test_ledger_workers_that_change_nothing(said: str) -> None:
    assert not ledger_of(said).needs_host


def test_ledger_of_nothing() -> None:
    assert ledger_of("") == Ledger()


@pytest.mark.parametrize(
    "told",
    [
        "While the data set is being loaded my process gets killed.",
        'After the scenes were loaded I got "Killed", with 32 GB of RAM.',
        "Killed while loading the weights",
        "The training is killed by the kernel after an hour.",
    ],
)
def test_told_kill(told: str) -> None:
    message = told_kill(f"{told}\n")

    assert message is not None
    assert (message.kind, message.sub_kind) == ("host-ram", "oom-killer")
    assert not message.is_device_oom


@pytest.mark.parametrize(
    "said",
    [
        "I killed the training.",
        "The training was killed by me.",
        "A model that takes too long may be killed.",
        "The training needs to be killed by hand.",
        "The child is killed when its parent exits.",
    ],
)
def test_told_kill_of_something_else(said: str) -> None:
    assert told_kill(f"{said}\n") is None
