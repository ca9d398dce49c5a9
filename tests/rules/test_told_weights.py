"""The size of a model's weights, worked out from what a text says of it."""

from __future__ import annotations

import pytest
from oom_messages import case_of, old_style

from fragdoctor.diagnosis.pipeline import diagnose
from fragdoctor.model.case import OomMessage
from fragdoctor.rules.told_weights import told_weights

FULL = old_style("34.00 MiB", "6.00 GiB", "5.10 GiB", "0 bytes", "5.29 GiB")


def said(text: str) -> OomMessage:
    return OomMessage("pytorch-caching-allocator", "cuda", is_device_oom=True, around=text)


@pytest.mark.parametrize(
    ("text", "billions", "bits"),
    [
        ("me/vicuna-13b-GPTQ-4bit-128g", 13, 4),
        ("Qwen1.5-14B-Chat --dtype half", 14, 16),
        ("Qwen3-30B-A3B in fp8", 30, 8),
        ("a 1.3B model", 1.3, None),
        ("a 7b model in fp16, then in 8 bits", 7, None),
    ],
)
def test_name_of_a_model_says_what_its_weights_take(text, billions, bits):
    told = told_weights(said(text))

    assert told is not None
    assert (told.billions, told.bits) == (billions, bits)


@pytest.mark.parametrize(
    "text", ["Mixtral-8x7B", "a 7b and a 13b model", "0B free", "1024B", "f3b91b", "no size"]
)
def test_other_numbers_are_no_model(text):
    assert told_weights(said(text)) is None


def test_weights_that_fill_the_device_are_what_must_shrink():
    result = diagnose(case_of(f"I load vicuna-13b-4bit\n{FULL}\n"))

    assert "The weights of a 13B model take 6.05 GiB in 4 bits." in result.verdict.summary
    assert result.recommendations[0].code == "less-model-memory"


@pytest.mark.parametrize("text", ["a 3b-4bit model", "vicuna-13b-4bit --tensor-parallel-size 4"])
def test_weights_that_leave_room_or_are_spread_are_not_blamed(text):
    first = diagnose(case_of(f"{text}\n{FULL}\n")).recommendations[0]

    assert first.code != "less-model-memory"
