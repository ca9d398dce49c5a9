"""The words of frameworks, and by which files each is seen."""

from __future__ import annotations

import re

import pytest

from fragdoctor.model.frameworks import (
    FRAMEWORKS,
    Change,
    frameworks_in,
    words_for,
    words_of,
)

SITE = "/opt/venv/lib/python3.11/site-packages"


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (f"{SITE}/transformers/trainer.py", "Trainer"),
        (f"{SITE}/trl/trainer/sft_trainer.py", "TRL"),
        (f"{SITE}/lightning/pytorch/trainer/trainer.py", "Lightning"),
        (f"{SITE}/pytorch_lightning/loops/fit_loop.py", "Lightning"),
        ("C:\\venv\\Lib\\site-packages\\diffusers\\models\\unets\\unet_2d.py", "Diffusers"),
        ("/app/ComfyUI/comfy/ldm/modules/attention.py", "ComfyUI"),
        (f"{SITE}/vllm/v1/worker/gpu_worker.py", "vLLM"),
        (f"{SITE}/torch_geometric/nn/conv/gcn_conv.py", "PyG"),
        (f"{SITE}/torch/distributed/fsdp/_flat_param.py", "FSDP"),
    ],
)
def test_framework_is_seen_by_its_files(path: str, name: str):
    assert frameworks_in([path])[0].name == name


@pytest.mark.parametrize("path", ["/home/me/vllm/train.py", "/app/timm.py", "train.py", ""])
def test_framework_is_not_seen_in_a_program_of_that_name(path: str):
    assert frameworks_in([path]) == ()


def test_words_are_those_of_the_framework_that_runs_the_loop():
    both = frameworks_in(
        [f"{SITE}/transformers/models/llama/x.py", f"{SITE}/transformers/trainer.py"]
    )

    assert words_for(both, Change.CHECKPOINT) == (
        "Trainer",
        "TrainingArguments(gradient_checkpointing=True)",
    )
    assert words_for(frameworks_in([f"{SITE}/timm/models/vit.py"]), Change.FUSED) is None


def test_words_for_what_no_remedy_proposes_are_those_of_a_rehearsal():
    of_rehearsals = {
        Change.ACCUMULATE, Change.BF16, Change.FSDP, Change.ZERO, Change.TENSOR_PARALLEL
    }  # fmt: skip
    for framework in FRAMEWORKS:
        assert framework.key or not of_rehearsals & set(framework.words), framework.name


def test_words_of_every_framework_fit_their_places():
    for framework in FRAMEWORKS:
        for change, words in framework.words.items():
            holes = {Change.ACCUMULATE: {"batch", "n"}, Change.TENSOR_PARALLEL: {"n"}}
            assert set(re.findall(r"{(batch|n)}", words)) == holes.get(change, set())


def test_words_of_a_rehearsal_are_found_by_its_key():
    assert words_of("lightning", Change.BF16) == 'Trainer(precision="bf16-mixed")'
    assert words_of("", Change.BF16) == words_of("lightning", Change.FUSED) == ""
