"""Command lines as people paste them: nothing is run, and what is not known stays as it is."""

from __future__ import annotations

import time

import pytest

from fragdoctor.errors import LimitExceeded
from fragdoctor.estimation.recipes.shell import CommandLine, arguments, command_lines
from fragdoctor.estimation.recipes.trainer import PROGRAM


def only(text: str) -> CommandLine:
    (found,) = command_lines(text)
    return found


def test_options_have_one_value_several_or_none() -> None:
    options, others = arguments(["m", "--a", "1", "--b=2", "--c", "x", "y", "--flag", "-tp", "4"])

    assert {"a": "1", "b": "2", "c": ["x", "y"], "flag": True, "tp": "4"} == options
    assert ["m"] == others


def test_continued_lines_comments_and_variables_are_one_command() -> None:
    found = only(
        "#!/bin/bash\n"
        "export MODEL=org/name-7b\n"
        "# the batch\n"
        "BATCH=4\n"
        "python train.py \\\n"
        "  --model_name_or_path $MODEL \\\n"
        "  --output_dir ${OUT:-out} \\\n"
        "  --per_device_train_batch_size ${BATCH}  # a GPU\n"
    )

    assert {
        PROGRAM: "train.py",
        "model_name_or_path": "org/name-7b",
        "output_dir": "out",
        "per_device_train_batch_size": "4",
    } == found.program


def test_variable_that_is_not_set_stays_as_it_is() -> None:
    assert "$BATCH" == only("python train.py --batch $BATCH").program["batch"]


def test_command_substitution_is_not_run() -> None:
    found = only("python train.py --output_dir out-$(date) --learning_rate 1e-5")

    assert "out-$" == found.program["output_dir"]


@pytest.mark.parametrize(
    ("text", "launch", "program", "files"),
    [
        (
            "accelerate launch --config_file ac.yaml --num_processes 8 sft.py --lr 1",
            {"num_processes": "8"},
            {PROGRAM: "sft.py", "lr": "1"},
            ["ac.yaml"],
        ),
        (
            "accelerate launch --multi_gpu train.py --lr 1",
            {"multi_gpu": True},
            {PROGRAM: "train.py", "lr": "1"},
            [],
        ),
        (
            "torchrun --nproc_per_node=4 --nnodes 2 -m pkg.train --lr 1",
            {"nproc_per_node": "4", "nnodes": "2"},
            {PROGRAM: "pkg.train", "lr": "1"},
            [],
        ),
        (
            "deepspeed --num_gpus 2 train.py --deepspeed ds.json",
            {"num_gpus": "2"},
            {PROGRAM: "train.py", "deepspeed": "ds.json"},
            [],
        ),
        ("trl sft --config sft.yaml --lr 1", {}, {PROGRAM: "trl sft", "lr": "1"}, ["sft.yaml"]),
        ("axolotl train a.yml --lr=1", {}, {PROGRAM: "axolotl train", "lr": "1"}, ["a.yml"]),
        (
            "llamafactory-cli train a.yaml lr=1",
            {},
            {PROGRAM: "llamafactory-cli train", "lr": "1"},
            ["a.yaml"],
        ),
        (
            "tune run --nproc_per_node 2 lora_finetune_distributed --config a.yaml batch_size=8",
            {"nproc_per_node": "2"},
            {PROGRAM: "lora_finetune_distributed", "batch_size": "8"},
            ["a.yaml"],
        ),
    ],
)
def test_launcher_and_program_are_told_apart(
    text: str, launch: dict[str, object], program: dict[str, object], files: list[str]
) -> None:
    found = only(text)

    assert (launch, program, files) == (found.launch, found.program, found.files)
    assert not found.is_server


@pytest.mark.parametrize(
    "text",
    [
        "vllm serve org/model --max-model-len 8192",
        "CUDA_VISIBLE_DEVICES=0 vllm serve org/model --max-model-len 8192",
        "python3 -m vllm.entrypoints.openai.api_server --model org/model --max-model-len 8192",
        (
            "docker run --gpus all -p 8000:8000 vllm/vllm-openai:latest --model org/model "
            "--max-model-len 8192"
        ),
    ],
)
def test_servers_are_known_in_all_their_forms(text: str) -> None:
    found = only(text)

    assert found.is_server
    assert "8192" == found.program["max-model-len"]
    assert "org/model" == found.program.get("model", found.program.get("model_tag"))


def test_other_commands_of_a_script_are_passed_over() -> None:
    found = command_lines("cd /tmp && pip install trl\nnvidia-smi\ntrl dpo --beta 0.1; echo done\n")

    assert ["trl dpo"] == [command.program[PROGRAM] for command in found]


def test_open_quote_is_an_error() -> None:
    with pytest.raises(ValueError, match="quotation"):
        command_lines("python train.py --name 'x\n")


def test_variables_that_double_are_refused() -> None:
    """Forty lines would stand for a million million characters."""
    lines = ["V0=xxxxxxxxxx", *(f"V{i + 1}=$V{i}$V{i}" for i in range(40))]

    with pytest.raises(LimitExceeded):
        command_lines("\n".join([*lines, "python train.py --name $V40"]))


def test_quote_that_is_never_closed_does_not_take_for_ever() -> None:
    text = "python train.py --name '\n" + "x\n" * 100_000

    started = time.monotonic()
    with pytest.raises(ValueError, match="quotation"):
        command_lines(text)

    assert time.monotonic() - started < 10
