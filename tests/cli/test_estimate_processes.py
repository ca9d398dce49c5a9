"""``fragdoctor estimate`` about several processes on one GPU."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
from story_logs import message

import fragdoctor

SCHEMA = Path(fragdoctor.__file__).parent / "report" / "schema" / "processes-1.0.schema.json"


def test_command_answers_in_text_and_json(run):
    words = ["estimate", "--per-process", "6GB", "--gpu", "24GiB", "--processes", "4"]

    text, document = run(*words), run(*words, "--format", "json")

    assert text.code == 0
    assert text.out.startswith("4 processes do not fit on 24GiB")
    found = json.loads(document.out)
    jsonschema.validate(found, json.loads(SCHEMA.read_text(encoding="utf-8")))
    assert found["n_fit"] == 3


def test_command_without_a_gpu_says_what_to_give(run):
    assert run("estimate", "--per-process", "6GB").code == 2


def test_command_reads_a_message(run, tmp_path):
    path = tmp_path / "oom.txt"
    path.write_text("torch.OutOfMemoryError: " + message(5.0, 0.2), encoding="utf-8")

    result = run("estimate", str(path))

    assert (result.code, "GPU 0 of the message" in result.out) == (0, True)
