"""Ranks in an object store that speaks S3, on this machine: a server of moto, read by s3fs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import fleets
import pytest
from cli_fixtures import run as run  # noqa: PLC0414 - a fixture
from command_line import Run

from fragdoctor.fleet.engine import summarise_all
from fragdoctor.fleet.workers import WorkerPool
from fragdoctor.inputs.discovery import discover

s3fs = pytest.importorskip("s3fs")
server = pytest.importorskip("moto.server")
# Sessions of aiohttp live until the interpreter ends, in a thread of fsspec.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        r"ignore:unclosed (client session|connector|connection)\b:ResourceWarning"
    ),
]


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """Return the address of an empty store."""
    store = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    store.start()
    host, port = store.get_host_and_port()
    yield f"http://{host}:{port}"
    store.stop()


@pytest.fixture
def bucket(endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return the URL of a job of four ranks, of which the third runs out of memory."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "y")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    s3fs.S3FileSystem.clear_instance_cache()
    system = s3fs.S3FileSystem()
    folder = fleets.write_job(tmp_path / "job", 4, {2: {"held": {10: 900}, "refused_mib": 512}})
    if not system.exists("bucket"):
        system.mkdir("bucket")
    for path in folder.iterdir():
        system.pipe(f"bucket/run/{path.name}", path.read_bytes())
    yield "s3://bucket/run"
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.mark.parametrize("name", ["/", "/*.pickle", "/rank[0-3].pickle"])
def test_ranks_in_a_bucket_are_found_by_each_name(bucket: str, name: str) -> None:
    assert discover([f"{bucket}{name}"]).ranks == discover([bucket]).ranks


def test_ranks_in_a_bucket_are_read_by_workers(bucket: str) -> None:
    ranks = discover([bucket]).ranks

    with WorkerPool(2) as pool:
        fleet = summarise_all(ranks, executor=pool)

    assert [(r.path, r.rank, r.has_failed) for r in fleet.ranks] == [
        (f"{bucket}/rank{i}.pickle", i, i == 2) for i in range(4)
    ]
    assert fleet == summarise_all(ranks)


def test_object_or_bucket_that_is_not_there_is_a_row(run: Run, bucket: str) -> None:
    names = (f"{bucket}/rank0.pickle", f"{bucket}/rank9.pickle", "s3://nowhere/rank1.pickle")

    outcome = run("analyze", *names, "--workers", "2")

    assert outcome.code == 0, outcome.err
    assert "s3://nowhere/rank1.pickle does not exist." in outcome.out
    assert f"{bucket}/rank9.pickle does not exist." in outcome.out


@pytest.mark.parametrize("name", ["s3://nowhere/run/", "s3://nowhere/*.pickle"])
def test_bucket_that_is_not_there_is_a_sentence(run: Run, bucket: str, name: str) -> None:
    outcome = run("analyze", name)

    assert (outcome.code, outcome.out) == (2, "")
    assert f"{name} does not exist." in outcome.err or f"Nothing matches {name}." in outcome.err


def test_missing_credentials_are_one_sentence_for_all(
    run: Run, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    s3fs.S3FileSystem.clear_instance_cache()

    for names in ((f"{bucket}/*.pickle",), (f"{bucket}/rank0.pickle", f"{bucket}/rank1.pickle")):
        outcome = run("analyze", *names)

        assert (outcome.code, outcome.out) == (2, "")
        assert outcome.err.count("there are no credentials") == 1


def test_single_objects_are_compared_and_exported(run: Run, bucket: str) -> None:
    compared = run("compare", f"{bucket}/rank0.pickle", f"{bucket}/rank2.pickle")

    assert compared.code == 0, compared.err
    assert "train.py:10 in f10 grew by" in compared.out
    assert run("export", f"{bucket}/rank0.pickle").code == 0
