"""Questions in words: which options they mean, and what is said of words that mean none."""

from __future__ import annotations

from typing import Any

import pytest

from fragdoctor.errors import InputError
from fragdoctor.estimation.words import Asked, is_question, read_question

RUN = {"inference": True}
TRAIN = {"inference": False}
QLORA = {**TRAIN, "lora": 16, "dtype": "int4", "checkpointing": "full"}


@pytest.mark.parametrize(
    ("words", "model", "options"),
    [
        ("can I fine-tune llama 3 8b on a 3090", "llama-3-8b", TRAIN | {"gpu": ["rtx-3090"]}),
        ("qlora for Mistral-7B, rtx 4090", "mistral-7b", QLORA | {"gpu": ["rtx-4090"]}),
        (
            "run deepseek r1 distill 32b on 2x3090",
            "qwen2.5-32b",
            RUN | {"gpu": ["rtx-3090"], "tensor_parallel": 2},
        ),
        ("magistral small qlora 3090", "mistral-small-24b", QLORA | {"gpu": ["rtx-3090"]}),
        ("run z-image on 3060", "z-image-turbo", RUN | {"gpu": ["rtx-3060"]}),
        ("qwen2.5 14B 4-bit fine-tuning, 24GB", "qwen2.5-14b", QLORA | {"gpu": ["24GB"]}),
        (
            "Memory needed when lora fine-tuning meta-llama/Meta-Llama-3.1-8B-Instruct",
            "llama-3.1-8b",
            TRAIN | {"lora": 16},
        ),
        ("serve Mistral-Small-24B GPTQ 4bit", "Mistral-Small-24B GPTQ 4bit", RUN),
        ("SmolLM2 360M full FT on a 3060", "smollm2-360m", TRAIN | {"gpu": ["rtx-3060"]}),
        (
            "train llama 3 8b on 2x 4090?",
            "llama-3-8b",
            TRAIN | {"gpu": ["rtx-4090"], "zero": 3, "world_size": 2},
        ),
        (
            "run yi 34b on two 3090s",
            "yi-34b",
            RUN | {"gpu": ["rtx-3090"], "tensor_parallel": 2},
        ),
        (
            "serve llama-3.1-70b on 2 GPUs with 80GB, 32k context",
            "llama-3.1-70b",
            RUN | {"gpu": ["80GB"], "tensor_parallel": 2, "seq": 32_768},
        ),
        (
            "phi-4 lora rank 64, bs 4, seq_len 4096, bf16, 8-bit adam, gradient checkpointing",
            "phi-4",
            TRAIN | {"lora": 64, "batch": 4, "seq": 4096, "dtype": "bf16",
                     "optimizer": "adamw-8bit", "checkpointing": "full"},
        ),
        (
            "llama 2 7b fsdp adafactor mixed precision on 8 x a100 80gb",
            "llama-2-7b",
            TRAIN | {"gpu": ["a100-80g"], "fsdp": True, "world_size": 8,
                     "optimizer": "adafactor", "dtype": "amp-bf16"},
        ),
        (
            "host qwen3 8b with vllm on an L4",
            "qwen3-8b",
            RUN | {"gpu": ["l4"], "gpu_memory_utilization": 0.9},
        ),
        ("finetune phi-2 fully, adamw 8bit", "phi-2", TRAIN | {"optimizer": "adamw-8bit"}),
        ("16GB T4 to run phi-2", "phi-2", RUN | {"gpu": ["t4"]}),
    ],
)  # fmt: skip
def test_words_become_options(words: str, model: str, options: dict[str, Any]) -> None:
    assert Asked(model, options, []) == read_question(words)


def test_model_keeps_the_name_that_says_what_it_is_stored_in() -> None:
    asked = read_question("can Qwen2.5-72B-Instruct-AWQ run on one h100?")

    assert "Qwen2.5-72B-Instruct-AWQ" == asked.model
    assert "dtype" not in asked.options


def test_words_that_were_not_read_are_named() -> None:
    (note,) = read_question("train gpt2 with paging on my 4090, please").notes

    assert "Not read: paging." == note


def test_format_of_llama_cpp_is_counted_as_what_comes_near_and_says_so() -> None:
    asked = read_question("run llama 3.1 70b q4_k_m on 48gb")

    assert "int4" == asked.options["dtype"]
    assert [
        "q4_k_m is for llama.cpp, whose memory is not estimated; 4 bits come close."
    ] == asked.notes


def test_question_without_a_verb_is_about_running_and_says_so() -> None:
    asked = read_question("how much vram for deepseek v3")

    assert asked.options == RUN
    assert "running is counted" in asked.notes[0]


@pytest.mark.parametrize(
    ("inputs", "is_one"),
    [
        (["llama 3.1 8b"], False),
        (["llama-3.1-8b"], False),
        (["my model.safetensors"], False),
        (["train llama 3.1 8b"], True),
        (["train", "llama", "3.1", "8b"], True),
        ([], False),
    ],
)
def test_question_is_words_and_no_name(inputs: list[str], is_one: bool) -> None:
    assert is_question(inputs) is is_one


def test_words_without_a_known_model_get_near_names() -> None:
    with pytest.raises(InputError, match="name no local file and no known model") as refused:
        read_question("qwn2.5 lora on a 3090?")

    assert "Similar are qwen2.5" in refused.value.hint


@pytest.mark.parametrize("words", ["DeepSeek R1 Distill on a 4090", "train vicuna"])
def test_name_of_a_series_is_no_model_of_another_size(words: str) -> None:
    with pytest.raises(InputError, match="is the name of several models"):
        read_question(words)


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("finetune a 7B model", TRAIN | {"params": "7B", "dtype": "bf16"}),
        (
            "Is it possible to train 70b model on 8*A100 80G with full fine tunning?",
            TRAIN
            | {"params": "70B", "dtype": "bf16", "gpu": ["a100-80g"], "zero": 3, "world_size": 8},
        ),
        (
            "How to finetue an 8B model on 4*40G A100",
            TRAIN
            | {"params": "8B", "dtype": "bf16", "gpu": ["a100-40g"], "zero": 3, "world_size": 4},
        ),
        ("train Guanaco-Remix_13B-v2", TRAIN | {"params": "13B", "dtype": "bf16"}),
        ("fine-tune 3B_v2", TRAIN | {"params": "3B", "dtype": "bf16"}),
        ("run `3B-Instruct-AWQ` on 16G", RUN | {"params": "3B", "dtype": "awq", "gpu": ["16G"]}),
        ("run 72B, max-model-len 8192", RUN | {"params": "72B", "seq": 8192}),
        (
            "Finetuning 7B using FSDP+4-bit-quantization+PEFT on 4 A40's",
            QLORA | {"params": "7B", "fsdp": True, "world_size": 4, "gpu": ["a40"]},
        ),
        ("How many H100s to serve a 70B?", RUN | {"params": "70B", "plan": True, "gpu": ["h100"]}),
        ("How many cards to serve a 70B?", RUN | {"params": "70B"}),
        ("run 70B on 2 x L40S", RUN | {"params": "70B", "tensor_parallel": 2, "gpu": ["l40s"]}),
    ],
)
def test_size_stands_for_a_model_that_nobody_names(words: str, options: dict[str, Any]) -> None:
    asked = read_question(words)

    assert ("", options) == (asked.model, asked.options)


def test_known_models_near_a_name_are_told_where_its_size_is_counted() -> None:
    asked = read_question("qwen 7b lora on a 3090?")

    assert "7B" == asked.options["params"]
    assert "Similar are qwen2.5-7b" in asked.notes[0]


@pytest.mark.parametrize("words", ["phi-4 reasoner 70b on 2x3090", "qlora phi 4 merged 70B"])
def test_model_whose_name_goes_on_with_another_size_is_no_known_one(words: str) -> None:
    asked = read_question(words)

    assert (asked.model, asked.options["params"]) == ("", "70B")
    assert any("reasoner" in note or "merged" in note for note in asked.notes)


@pytest.mark.parametrize("words", ["train phi-4 on 70b tokens", "phi-4 14b", "phi-4 lora 14B"])
def test_another_number_near_a_known_model_is_not_its_size(words: str) -> None:
    assert read_question(words).model == "phi-4"


@pytest.mark.parametrize(
    ("words", "model"),
    [
        ("can i fintune Mistrall 7B on a 3060", "mistral-7b"),
        ("train lama-3-8b", "llama-3-8b"),
        ("quen2.5 7b full finetune", "qwen2.5-7b"),
        ("whisper large 8gb", "whisper-large-v3"),
        ("Codestral on a 3090", "codestral-22b"),
        ("finetune qwen3.5 14b", ""),  # another number is another model
        ("falcon 40b qlora", ""),
    ],
)
def test_misspelled_and_shortened_names_are_those_of_known_models(words: str, model: str) -> None:
    assert read_question(words).model == model


def test_training_on_pairs_is_training_and_says_what_is_not_counted() -> None:
    asked = read_question("qwen3 4b grpo 24gb")

    assert asked.options["inference"] is False
    assert "has_more" not in asked.options
    assert any("generation are not counted" in note for note in asked.notes)


def test_number_of_a_card_is_no_part_of_the_name_of_a_model() -> None:
    asked = read_question("run on a single RTX 3070? llama 7b int8")

    assert ("llama 7b int8", ["rtx-3070"]) == (asked.model, asked.options["gpu"])


@pytest.mark.parametrize(
    ("words", "dtype"),
    [
        ("run llama3.2:3b-q8_0 on a 3060", "int8"),
        ("someone/Llama-3.2-3B-Instruct-GGUF Q4_K_M on a 3060", "int4"),
        ("someone/Llama-3.2-3B-Instruct-GGUF Q8_0 on a 3060", "int8"),
    ],
)
def test_file_of_llama_cpp_is_a_copy_of_the_model_that_it_names(words: str, dtype: str) -> None:
    asked = read_question(words)

    assert ("llama-3.2-3b", dtype) == (asked.model, asked.options["dtype"])
    assert "is for llama.cpp, whose memory is not estimated" in asked.notes[-1]
    assert not any("Not read" in note for note in asked.notes)


def test_file_of_llama_cpp_of_an_unknown_model_is_refused() -> None:
    with pytest.raises(InputError, match=r"is for llama\.cpp"):
        read_question("run someone/chatterbox-GGUF on a 3060")


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("train phi-4 batch size 8 seq len 4096 l4", {"gpu": ["l4"], "batch": 8, "seq": 4096}),
        ("train phi-4 zero 3 3090", {"gpu": ["rtx-3090"], "zero": 3, "dtype": "deepspeed-bf16"}),
        ("train phi-4 batch 2 4090 seq 1024", {"gpu": ["rtx-4090"], "batch": 2, "seq": 1024}),
    ],
)
def test_number_of_a_phrase_counts_no_gpus(words: str, options: dict[str, Any]) -> None:
    assert TRAIN | options == read_question(words).options


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("train gpt2 deepspeed zero 2 on 2x t4",
         TRAIN | {"zero": 2, "dtype": "deepspeed-bf16", "world_size": 2, "gpu": ["t4"]}),
        ("serve gpt2 with tensor parallel 4", RUN | {"tensor_parallel": 4}),
        ("serve gpt2, tp 2, context 1k", RUN | {"tensor_parallel": 2, "seq": 1024}),
        ("fine-tune bert-base for text classification", TRAIN | {"logits": "none"}),
        ("finetune unsloth/llama-3-8b-bnb-4bit", TRAIN | {"lora": 16, "checkpointing": "full"}),
    ],
)  # fmt: skip
def test_words_of_frameworks_and_copies_decide_what_is_counted(
    words: str, options: dict[str, Any]
) -> None:
    assert options == read_question(words).options


def test_unknown_repository_is_refused_with_the_command_that_fetches_it() -> None:
    with pytest.raises(InputError) as refused:
        read_question("lora/qlora of someone/Strange-7x on a 3090")

    assert "hf download someone/Strange-7x config.json" in refused.value.hint


def test_endless_words_are_cut() -> None:
    with pytest.raises(InputError, match="name no local file"):
        read_question(f"train {'x' * 10**6} " * 100)
