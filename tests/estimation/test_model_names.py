"""Names of tuned models and mirrors: the base that they say, and no other."""

from __future__ import annotations

import pytest

from fragdoctor.estimation.model_shapes import model_of, preset_of


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("NousResearch/Meta-Llama-3-8B-Instruct", "llama-3-8b"),
        ("unsloth/Llama-3.2-1B", "llama-3.2-1b"),
        ("meta-llama/Llama-3.3-70B-Instruct", "llama-3.1-70b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b-v0.3"),
        ("mistralai/Mistral-7B-Instruct-v0.2", "mistral-7b"),
        ("Qwen/Qwen2.5-Coder-32B-Instruct", "qwen2.5-32b"),
        ("Qwen/Qwen3-4B-Instruct-2507", "qwen3-4b"),
        ("google/gemma-2-9b-it", "gemma-2-9b"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "qwen2.5-7b"),
        ("llama3-8b", "llama-3-8b"),
        ("Gemma2_9B", "gemma-2-9b"),
    ],
)
def test_tuned_model_has_the_shape_of_its_base(name: str, base: str) -> None:
    found = preset_of(name)

    assert found is not None
    assert base == found.name
    assert any(name in note for note in model_of([name]).shape.assumptions)


@pytest.mark.parametrize(
    "name",
    ["Qwen/Qwen2.5-VL-7B-Instruct", "Qwen/Qwen3-8B-FP8", "unsloth/Llama-3.2-1B-bnb-4bit",
     "meta-llama/Llama-3.2-11B-Vision-Instruct", "my-org/merge-of-qwen2.5-7b", "llama-38b",
     "chat", "it", "-"],
)  # fmt: skip
def test_name_with_another_word_is_not_guessed(name: str) -> None:
    assert preset_of(name) is None


def test_name_of_the_model_itself_takes_nothing_for_granted() -> None:
    assert not any("By its name" in note for note in model_of(["llama-3.1-8b"]).shape.assumptions)
