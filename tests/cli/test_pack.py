"""``fragdoctor pack``: several processes on one GPU."""

from __future__ import annotations

import json
import zipfile

import pytest
from builders import pickled
from schemas import must_fit
from story_logs import message
from training_runs import training


def test_command_answers_in_text_and_json(run):
    words = ["pack", "--per-process", "6GB", "--gpu", "24GiB", "--processes", "4"]

    text, document = run(*words), run(*words, "--format", "json")

    assert text.code == 0
    assert text.out.startswith("4 processes do not fit on 24GiB")
    found = json.loads(document.out)
    must_fit(found, "processes")
    assert found["n_fit"] == 3


def test_command_without_a_gpu_says_what_to_give(run):
    assert run("pack", "--per-process", "6GB").code == 2


def test_message_does_not_say_what_a_process_takes(run, tmp_path):
    path = tmp_path / "oom.txt"
    path.write_text("torch.OutOfMemoryError: " + message(5.0, 0.2), encoding="utf-8")

    result = run("pack", str(path), "--gpu", "24GiB")

    assert (result.code, "No snapshot says what one process takes" in result.err) == (2, True)


@pytest.mark.parametrize("packing", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_command_reads_a_bundle_that_is_a_zip_with_its_gpu(run, tmp_path, packing):
    devices = [{"index": 0, "total_bytes": 8 << 30}]
    manifest = {"format": "fragdoctor-bundle", "version": 1, "reason": "exit", "devices": devices}
    path = tmp_path / "exit-pid7.zip"
    with zipfile.ZipFile(path, "w", packing) as archive:
        archive.writestr("exit-pid7/bundle.json", json.dumps(manifest))
        archive.writestr("exit-pid7/snapshot.pickle", pickled(training(4).data()))

    result = run("pack", str(path))

    assert (result.code, "GPU 0 of the bundle" in result.out) == (0, True)


def test_number_beside_a_recording_is_refused(run, tmp_path):
    path = tmp_path / "b4.pickle"
    path.write_bytes(pickled(training(4).data()))

    result = run("pack", str(path), "--per-process", "6GB", "--gpu", "24GiB")

    assert (result.code, "does not go with a recording" in result.err) == (2, True)
