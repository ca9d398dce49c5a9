from __future__ import annotations

import sys

import pytest

from fragdoctor.errors import ConfigError
from fragdoctor.rehearsal.process import Runs
from fragdoctor.rehearsal.programs import launched

TORCHRUN = [
    "torchrun --nproc-per-node 4 --nnodes 2 train.py --lr 1",
    "/opt/bin/torchrun --nproc_per_node=4 --standalone --nnodes=2:8 train.py --lr 1",
    "torch.distributed.run -- --nnodes=2 --nproc-per-node=4 -- train.py --lr 1",
    "torch.distributed.launch --use_env --nnodes 2 --nproc_per_node 4 train.py --lr 1",
    "accelerate launch --num_processes 8 --num_machines=2 --multi_gpu train.py --lr 1",
]


@pytest.mark.parametrize("words", TORCHRUN)
def test_a_launcher_is_taken_off(words: str) -> None:
    found = launched(words.split())

    assert found is not None
    assert (found.words, found.is_module) == (["train.py", "--lr", "1"], False)
    assert (found.n_local, found.n_machines) == (4, 2)


def test_a_module_of_a_launcher_is_a_module() -> None:
    found = launched(["torchrun", "-m", "package.train"])

    assert found is not None
    assert (found.words, found.is_module, found.n_local) == (["package.train"], True, 1)


def test_as_many_ranks_as_gpus_are_not_known() -> None:
    found = launched(["torchrun", "--nproc-per-node=gpu", "train.py"])

    assert found is not None
    assert found.n_local is None


def test_accelerate_tells_its_precision_and_what_compiles() -> None:
    words = "accelerate launch --mixed_precision bf16 --dynamo_backend no train.py"

    found = launched(words.split())

    assert found is not None
    assert found.variables == {
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_DYNAMO_BACKEND": "no",
    }


def test_a_script_is_no_launcher() -> None:
    assert launched(["train.py", "torchrun"]) is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("accelerate launch --use_fsdp train.py", "--use-fsdp of accelerate"),
        ("accelerate launch --config_file c.yaml train.py", "--config-file of accelerate"),
        ("accelerate config", "Only accelerate's launch"),
        ("deepspeed --num_gpus 2 train.py", "the configuration of deepspeed"),
        ("torchrun --no-python train.sh", "--no-python of torchrun"),
        ("torchrun --nproc-per-node two train.py", "'two' ranks"),
        ("torchrun --nproc-per-node 2", "no program"),
    ],
)
def test_what_a_launcher_sets_up_is_refused_where_it_is_not_known(words: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        launched(words.split())

    assert said in refused.value.message


def test_on_windows_a_rehearsal_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")

    with pytest.raises(ConfigError, match="on Linux and macOS only"):
        Runs()
