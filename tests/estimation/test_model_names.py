"""Names of tuned models and mirrors: the base that they say, and no other."""

from __future__ import annotations

import pytest

from fragdoctor.errors import InputError
from fragdoctor.estimation.model_shapes import configuration_of, model_of, preset_of


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
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct", "qwen3-30b-a3b"),
        ("qwen 2.5 coder 32b instruct", "qwen2.5-32b"),
        ("deepseek coder v2 lite instruct", "deepseek-v2-lite"),
        ("Qwen/QwQ-32B", "qwen2.5-32b"),
        ("mistralai/Mistral-Large-Instruct-2411", "mistral-large"),
        ("allenai/OLMo-2-1124-7B-Instruct", "olmo-2-7b"),
        ("lmsys/vicuna-13b-v1.5", "llama-2-13b"),
        ("HuggingFaceH4/zephyr-7b-beta", "mistral-7b"),
        ("NousResearch/Hermes-3-Llama-3.1-8B", "llama-3.1-8b"),
        ("HuggingFaceTB/SmolLM-360M-Instruct", "smollm2-360m"),
        ("deepseek-ai/DeepSeek-V3-0324", "deepseek-v3"),
        ("microsoft/Phi-3.5-mini-instruct", "phi-3-mini"),
        ("google/gemma-2-9b-it", "gemma-2-9b"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "qwen2.5-7b"),
        ("llama3-8b", "llama-3-8b"),
        ("Gemma2_9B", "gemma-2-9b"),
        ("Llama 3.1 8B Instruct", "llama-3.1-8b"),
        ("llama3.2:3b", "llama-3.2-3b"),
        ("Qwen/Qwen2-7B-Instruct", "qwen2.5-7b"),
        ("ibm-granite/granite-3.1-8b-instruct", "granite-3.1-8b"),
        ("deepseek-r1:32b", "qwen2.5-32b"),
        ("deepseek-r1:8b", "qwen3-8b"),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-70B", "llama-3.1-70b"),
        ("deepseek-ai/DeepSeek-R1-0528-Qwen3-8B", "qwen3-8b"),
        ("llama3.1:8b-instruct", "llama-3.1-8b"),
    ],
)
def test_tuned_model_has_the_shape_of_its_base(name: str, base: str) -> None:
    found = preset_of(name)

    assert found is not None
    assert base == found.name
    assert any(name in note for note in model_of([name]).shape.assumptions)


@pytest.mark.parametrize(
    "name",
    ["Qwen/Qwen2.5-VL-7B-Instruct", "Qwen/Qwen2.5-VL-7B-Instruct-AWQ",
     "meta-llama/Llama-3.2-11B-Vision-Instruct", "my-org/merge-of-qwen2.5-7b", "llama-38b",
     "chat", "it", "-"],
)  # fmt: skip
def test_name_with_another_word_is_not_guessed(name: str) -> None:
    assert preset_of(name) is None


@pytest.mark.parametrize(
    ("name", "base", "dtype"),
    [
        ("TheBloke/Mistral-7B-Instruct-v0.2-GPTQ", "mistral-7b", "gptq"),
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4", "qwen2.5-7b", "gptq"),
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int8", "qwen2.5-7b", "int8"),
        ("Qwen/Qwen2.5-7B-Instruct-AWQ", "qwen2.5-7b", "awq"),
        ("unsloth/llama-3-8b-bnb-4bit", "llama-3-8b", "int4"),
        ("Qwen/Qwen3-8B-FP8", "qwen3-8b", "fp8-weights"),
    ],
)
def test_quantised_copy_is_stored_in_what_its_name_says(name: str, base: str, dtype: str) -> None:
    found = model_of([name])

    assert (base, dtype) == (found.shape.name, found.dtype)


def test_quantised_copy_is_not_rehearsed_as_its_base() -> None:
    with pytest.raises(InputError, match="neither a local file nor a known model"):
        configuration_of(["Qwen/Qwen2.5-7B-Instruct-AWQ"])


@pytest.mark.parametrize(
    ("asked", "command"),
    [
        ("bartowski/Meta-Llama-3.1-8B-GGUF", "llama-3.1-8b --inference --dtype int4"),
        ("llama3.2:3b-instruct-q4_K_M", "llama-3.2-3b --inference --dtype int4"),
        ("7b", "--params 7B"),
    ],
)
def test_what_is_no_name_is_answered_with_a_command(asked: str, command: str) -> None:
    with pytest.raises(InputError) as refused:
        model_of([asked])

    assert refused.value.hint.endswith(f"fragdoctor estimate {command}")


def test_name_of_the_model_itself_takes_nothing_for_granted() -> None:
    assert not any("By its name" in note for note in model_of(["llama-3.1-8b"]).shape.assumptions)
