"""``fragdoctor fit``: recordings at several batch sizes."""

from __future__ import annotations

import gzip
import json
import zipfile

import pytest
from builders import pickled
from schemas import must_fit
from training_runs import training


@pytest.fixture
def runs(tmp_path):
    """Return recordings as a file, a packed file and a directory."""
    plain, packed, folder = tmp_path / "b2.pickle", tmp_path / "b4.pickle.gz", tmp_path / "bs_8"
    plain.write_bytes(pickled(training(2).data()))
    packed.write_bytes(gzip.compress(pickled(training(4).data())))
    folder.mkdir()
    (folder / "snapshot.pickle").write_bytes(pickled(training(8).data()))
    return [str(plain), str(packed), str(folder)]


def test_command_answers_first_and_explains(run, runs):
    result = run("fit", *runs, "--capacity", "1GiB", "--explain")

    assert result.code == 0
    assert result.out.startswith("The largest batch that fits in 1.00 GiB for PyTorch is ")
    assert "How it was found" in result.out


def test_document_follows_its_schema(run, runs):
    result = run("fit", *runs, "--gpu", "24GiB", "--format", "json")

    document = json.loads(result.out)
    must_fit(document, "batch-fit")
    assert [p["batch"] for p in document["points"]] == [2, 4, 8]
    assert document["prediction"]["largest"] > 8


def test_given_batches_go_before_names(run, runs):
    result = run("fit", *runs, "--batches", "20,40,80", "--format", "json")

    assert [p["batch"] for p in json.loads(result.out)["points"]] == [20, 40, 80]


def test_directory_alone_is_a_recording_of_one_process(run, runs):
    result = run("estimate", runs[2], "--gpu", "24GiB", "-q")

    assert (result.code, "processes fit" in result.out) == (0, True)


@pytest.mark.parametrize(
    "words", [["--batches", "2"], ["--gpu", "24GiB", "--capacity", "1GiB"], ["--batches", "2,x,4"]]
)
def test_incomplete_question_is_one_sentence(run, runs, words):
    result = run("fit", *(runs[:1] if words == ["--batches", "2"] else runs), *words)

    assert result.code == 2
    assert "Traceback" not in result.err


def test_samples_foretell_the_largest_batch_that_really_ran(run, samples):
    """On a simulated device of 4,096 MiB batch 33 ran to the end and 34 ran out of memory."""
    names = [str(samples / f"gpt_batch{b}.pickle.gz") for b in (2, 4, 8)]

    result = run("fit", *names, "--capacity", "4096MiB", "--format", "json")

    prediction = json.loads(result.out)["prediction"]
    assert prediction["largest"] == 33
    assert prediction["low"] <= 33 <= prediction["high"]
    assert prediction["is_extrapolated"]


@pytest.mark.parametrize("packing", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_command_reads_bundles_that_are_zips(run, tmp_path, packing):
    manifest = {"format": "fragdoctor-bundle", "version": 1, "reason": "exit"}
    names = []
    for batch in (2, 4):
        names.append(str(tmp_path / f"run_b{batch}.zip"))
        with zipfile.ZipFile(names[-1], "w", packing) as archive:
            archive.writestr("exit-pid7/bundle.json", json.dumps(manifest))
            archive.writestr("exit-pid7/snapshot.pickle", pickled(training(batch).data()))

    result = run("fit", *names, "--gpu", "24GiB", "--format", "json")

    assert [p["batch"] for p in json.loads(result.out)["points"]] == [2, 4]
