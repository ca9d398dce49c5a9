"""``fragdoctor estimate recipe.yaml``: what is printed of the file, in every format."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import Run

RECIPE = """
base_model: gpt2
micro_batch_size: 2
sequence_len: 128
optimizer: adamw_torch
chunked_cross_entropy: true
val_set_size: 0.1
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yml"
    path.write_text(RECIPE)
    return path


def test_answer_names_what_is_not_counted(run: Run, recipe: Path) -> None:
    outcome = run("estimate", str(recipe), "--gpu", "24GiB")

    assert 0 == outcome.code
    words = " ".join(outcome.out.split())
    assert "Fits on 24GiB" in words
    assert (
        "4 entries used; not counted, though memory depends on it: chunked_cross_entropy" in words
    )
    assert "fragdoctor estimate gpt2 --batch 2 --seq 128 --gpu 24GiB" in words


def test_json_lists_each_entry(run: Run, recipe: Path) -> None:
    found = json.loads(run("estimate", str(recipe), "--format", "json").out)["recipe"]

    (file,) = found["files"]
    assert {"base_model", "micro_batch_size", "sequence_len", "optimizer"} == {
        entry["key"] for entry in file["used"] if not entry["is_default"]
    }
    bearings = {entry["key"]: entry["bearing"] for entry in file["unused"]}
    assert {"chunked_cross_entropy": "matters", "val_set_size": "none"} == bearings
    assert "fragdoctor estimate gpt2 --batch 2 --seq 128" == found["command"]


def test_question_in_words_is_answered_and_says_what_was_read(run: Run) -> None:
    words = ["can", "I", "train", "gpt2", "with", "paging", "on", "a", "3090?"]
    ours = json.loads(run("estimate", *words, "--batch", "2", "--format", "json").out)

    assert "fragdoctor estimate gpt2 --gpu rtx-3090 --batch 2" == ours["recipe"]["command"]
    assert ["Not read: paging."] == ours["recipe"]["notes"]
    typed = json.loads(run(*ours["recipe"]["command"].split()[1:], "--format", "json").out)
    assert typed["peak_allocated_bytes"] == ours["peak_allocated_bytes"]
    out = " ".join(run("estimate", " ".join(words)).out.split())
    assert "Read as: fragdoctor estimate gpt2 --gpu rtx-3090. Not read: paging." in out


def test_option_on_the_line_beats_the_words(run: Run) -> None:
    found = json.loads(run("estimate", "run gpt2 on a 3090", "--gpu", "t4", "--format", "json").out)

    assert "fragdoctor estimate gpt2 --gpu t4 --inference" == found["recipe"]["command"]


def test_the_printed_command_gives_the_same_figures(run: Run, recipe: Path) -> None:
    ours = json.loads(run("estimate", str(recipe), "--format", "json").out)
    command = ours["recipe"]["command"].split()[1:]

    typed = json.loads(run(*command, "--format", "json").out)

    assert typed["peak_allocated_bytes"] == ours["peak_allocated_bytes"]
    assert typed["recipe"] is None


def test_command_line_wins_and_says_so(run: Run, recipe: Path) -> None:
    outcome = run("estimate", str(recipe), "--batch", "16")

    words = " ".join(outcome.out.split())
    assert "batch 16 x 128 tokens" in words
    assert "--batch 16 of the command line" in words


def test_model_of_the_command_line_wins(run: Run, recipe: Path) -> None:
    found = json.loads(run("estimate", str(recipe), "gpt2-medium", "--format", "json").out)

    assert "gpt2-medium" in found["recipe"]["command"]
    entry = next(e for e in found["recipe"]["files"][0]["used"] if e["key"] == "base_model")
    assert "gpt2-medium" == entry["overridden_by"]


def test_pasted_command_is_a_recipe(run: Run) -> None:
    pasted = "python sft.py --model_name_or_path gpt2 --per_device_train_batch_size 3"

    found = json.loads(run("estimate", "--args", pasted, "--format", "json").out)["recipe"]

    assert "--args" == found["files"][0]["source"]
    assert "--batch 3" in found["command"]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.yaml", "services: {web: {image: x}}\n", "Nothing in"),
        ("a.yaml", "a: [1\n", "is not YAML"),
        ("a.sh", "echo hello\n", "starts no known training program or server"),
        ("a.toml", "[tool.black]\nline-length = 1\n", "Nothing in"),
    ],
)
def test_other_file_is_one_sentence_and_exit_2(
    run: Run, tmp_path: Path, name: str, text: str, said: str
) -> None:
    path = tmp_path / name
    path.write_text(text)

    outcome = run("estimate", str(path))

    assert 2 == outcome.code
    assert said in outcome.err
    assert "Traceback" not in outcome.err


def test_hostile_file_is_exit_3(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("a: !!python/object/apply:os.system ['true']\n")

    outcome = run("estimate", str(path))

    assert 3 == outcome.code
    assert "plain values" in outcome.err


def test_names_and_values_of_a_file_are_made_safe(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "a.yml"
    path.write_text(RECIPE + '"x\\e[31m<script>alert(1)</script>": "y\\e[0m<b>"\n')

    text = run("estimate", str(path)).out
    page = run("estimate", str(path), "--format", "html").out

    assert "\x1b" not in text
    assert "<script>alert(1)" not in page
    assert "&lt;script&gt;alert(1)" in page


def test_rehearsal_of_a_recipe_is_refused(run: Run, recipe: Path) -> None:
    outcome = run("estimate", str(recipe), "--rehearse")

    assert 2 == outcome.code
    assert "estimated by formulas, not rehearsed" in outcome.err


def test_missing_file_is_said_to_be_missing(run: Run, tmp_path: Path) -> None:
    outcome = run("estimate", str(tmp_path / "none.yaml"))

    assert 2 == outcome.code
    assert "none.yaml" in outcome.err
