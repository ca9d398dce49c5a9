"""Secrets stay out of the manifest of a bundle."""

from __future__ import annotations

import pytest

from fragdoctor.recording.facts import masked


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--api-key", "abc", "--lr", "1"], ["--api-key", "***", "--lr", "1"]),
        (["--api_key=abc"], ["--api_key=***"]),
        (["env", "HF_TOKEN=abc", "python"], ["env", "HF_TOKEN=***", "python"]),
        (["+wandb.apiKey=abc"], ["+wandb.apiKey=***"]),
        (["--password", "1234"], ["--password", "***"]),
        (["-H", "Authorization: Bearer abc d"], ["-H", "Authorization: ***"]),
        (["-c", "DB_PASSWD=abc python train.py"], ["-c", "DB_PASSWD=***"]),
        (
            ["-c", "X=1; DB_PASSWD=abc python train.py"],
            ["-c", "X=1; DB_PASSWD=*** python train.py"],
        ),
        (['{"secret": "abc", "n": 3}'], ['{"secret": "***", "n": 3}']),
        (["https://me:abc@host/x?token=abc&n=1"], ["https://me:***@host/x?token=***&n=1"]),
        (["--use-auth", "--lr", "1"], ["--use-auth", "--lr", "1"]),
        (["--credentials", "a.json"], ["--credentials", "***"]),
    ],
)
def test_values_of_secrets_are_masked(words, expected) -> None:
    assert masked(words) == expected


@pytest.mark.parametrize(
    "words",
    [
        ["train.py", "--max-tokens", "512", "--lr=1e-4", "--data", "C:/x/y"],
        ["--tokenizer", "gpt2", "--tokenizer-path=a/b", "--author", "me"],
        ["--url", "https://host:80/x", "model.layers=3", "--max_new_tokens=64"],
    ],
)
def test_other_words_stay_as_they_are(words) -> None:
    assert masked(words) == words
