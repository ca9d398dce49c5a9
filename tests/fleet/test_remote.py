"""URLs as ranks: in memory, on a web server, in an object store; opened where they are read."""

from __future__ import annotations

import functools
import gc
import gzip
import http.server
import json
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fleets
import pytest
from builders import pickled
from cli_fixtures import run as run  # noqa: PLC0414 - a fixture
from command_line import Run

from fragdoctor.errors import InputError
from fragdoctor.fleet.engine import summarise_all
from fragdoctor.fleet.examine import examine
from fragdoctor.fleet.workers import WorkerPool
from fragdoctor.inputs import bundles
from fragdoctor.inputs.discovery import discover
from fragdoctor.inputs.source import zstd_module
from fragdoctor.limits import Limits
from fragdoctor.report.json import document_of

fsspec = pytest.importorskip("fsspec")
pytest.importorskip("aiohttp")

# Sessions of aiohttp live until the interpreter ends, in a thread of fsspec.
pytestmark = pytest.mark.filterwarnings(
    r"ignore:unclosed (client session|connector|connection)\b:ResourceWarning"
)
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total"


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves a folder; names with a word in them answer as that word says."""

    requests: list[str]

    def do_GET(self) -> None:
        self.requests.append(self.path)
        if "forbidden" in self.path:
            self.send_error(403)
        elif "broken" in self.path:
            data = pickled(fleets.rank_snapshot())
            self.send_response(200)
            self.send_header("Content-Length", str(len(data) + 1000))
            self.end_headers()
            self.wfile.write(data[: len(data) // 2])
        else:
            super().do_GET()

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def job(tmp_path: Path) -> Path:
    folder = fleets.write_job(tmp_path / "job", 4, {2: {"held": {10: 900}, "refused_mib": 512}})
    (folder / "rank1.pickle").unlink()
    data = pickled(fleets.rank_snapshot())
    (folder / "rank1.pickle.gz").write_bytes(gzip.compress(data))
    return folder


@pytest.fixture
def web(job: Path) -> Iterator[str]:
    """Return the address of a web server that lists and serves the job."""
    Handler.requests = []
    handler = functools.partial(Handler, directory=str(job))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join(10)
    fsspec.get_filesystem_class("http").clear_instance_cache()
    gc.collect()  # what these tests left open is warned of here, where it is ignored


@pytest.fixture
def memory(job: Path) -> Iterator[str]:
    system = fsspec.filesystem("memory")
    for path in job.iterdir():
        system.pipe(f"/run/{path.name}", path.read_bytes())
    yield "memory://run"
    system.rm("/run", recursive=True)


def rows(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the ranks of a report without what names their files."""
    left_out = {"path", "inputs"}
    ranks = [{k: v for k, v in r.items() if k not in left_out} for r in document["ranks"]]
    return sorted(ranks, key=lambda r: r["rank"])


@pytest.mark.parametrize("name", ["memory://run", "memory://run/", "memory://run/*.pickle*"])
def test_ranks_in_memory_are_those_on_disk(job: Path, memory: str, name: str) -> None:
    expected = document_of("fleet", examine(discover([str(job)]).ranks))

    found = document_of("fleet", examine(discover([name]).ranks))

    assert rows(found) == rows(expected)
    assert found["ranks"][0]["path"] == "memory://run/rank0.pickle"


def test_memory_and_other_processes_exclude_each_other(run: Run, memory: str) -> None:
    for option in (("--workers", "2"), ("--dask", "x"), ("--timeout", "5")):
        outcome = run("analyze", memory, *option)

        assert outcome.code == 2
        assert "Only this process can read" in outcome.err
    assert run("analyze", memory).code == 0


@pytest.mark.parametrize("name", ["/", "/*.pickle*"])
def test_ranks_on_a_web_server_are_those_on_disk(job: Path, web: str, name: str) -> None:
    expected = document_of("fleet", examine(discover([str(job)]).ranks))

    found = discover([f"{web}{name}"])

    assert rows(document_of("fleet", examine(found.ranks))) == rows(expected)


def test_workers_fetch_what_they_read(job: Path, web: str) -> None:
    ranks = discover([f"{web}/"]).ranks
    n_before = len(Handler.requests)

    with WorkerPool(1) as pool:
        fleet = summarise_all(ranks, executor=pool)

    assert fleet == summarise_all(ranks)
    assert sorted(Handler.requests[n_before : n_before + 4]) == [
        f"/rank{i}.pickle{'.gz' if i == 1 else ''}" for i in range(4)
    ]


def test_url_that_fails_is_a_row_with_its_reason(web: str) -> None:
    names = ("rank0.pickle", "rank9.pickle", "forbidden.pickle", "broken.pickle", "rank3.pickle")

    fleet = summarise_all(discover([f"{web}/{n}" for n in names]).ranks)

    said = {r.path.rsplit("/", 1)[-1]: r.error.replace(web, "W") for r in fleet.ranks}
    assert said == {
        "rank0.pickle": "",
        "rank3.pickle": "",
        "rank9.pickle": "W/rank9.pickle does not exist.",
        "forbidden.pickle": "W/forbidden.pickle may not be read: access is denied.",
        "broken.pickle": said["broken.pickle"],
    }
    assert "broke off while it was read" in said["broken.pickle"]


def test_single_url_is_one_case(run: Run, web: str, job: Path) -> None:
    (job / "oom.txt").write_text(OOM)

    for names in ((f"{web}/rank2.pickle",), (f"{web}/rank2.pickle", f"{web}/oom.txt")):
        outcome = run("analyze", *names)

        assert outcome.code == 0, outcome.err
        assert "Not enough capacity" in outcome.out
    assert run("oom", f"{web}/oom.txt").code == 0
    assert run("simulate", f"{web}/rank0.pickle").code == 0


def test_zstd_over_the_web_is_unpacked_on_the_way(web: str, job: Path) -> None:
    data = (job / "rank0.pickle").read_bytes()
    (job / "rank9.pickle.zst").write_bytes(zstd_module().compress(data))

    fleet = summarise_all(discover([f"{web}/rank0.pickle", f"{web}/rank9.pickle.zst"]).ranks)

    assert [r.error for r in fleet.ranks] == ["", ""]
    assert len({r.peak_bytes for r in fleet.ranks}) == 1


def zipped(path: Path, *, rank: int) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("b/bundle.json", manifest(rank=rank))
        archive.writestr("b/snapshot.pickle", pickled(fleets.rank_snapshot()))


def test_zip_bundles_over_the_web_are_ranks_and_cases(web: str, job: Path, run: Run) -> None:
    for i in (7, 8):
        zipped(job / f"b{i}.zip", rank=i)
    whole = (job / "b7.zip").read_bytes()
    (job / "torn.zip").write_bytes(whole[: len(whole) // 2])
    names = [f"{web}/b7.zip?sig=SECRET", f"{web}/b8.zip", f"{web}/torn.zip"]

    fleet = summarise_all(discover(names).ranks)

    said = [(r.rank, r.error.replace(web, "W")) for r in fleet.ranks]
    assert said == [(7, ""), (8, ""), (None, "W/torn.zip is a damaged zip file.")]
    outcome = run("analyze", names[0], "--format", "json")
    assert outcome.code == 0, outcome.err
    assert "SECRET" not in outcome.out
    assert run("compare", *names[:2]).code == 0


def test_zip_longer_than_the_limit_is_refused(
    web: str, job: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    zipped(job / "b7.zip", rank=7)
    monkeypatch.setattr(bundles, "DEFAULT_LIMITS", Limits(max_input_bytes=100))

    outcome = run("analyze", f"{web}/b7.zip")

    assert outcome.code == 3
    assert "b7.zip is longer than 100 B." in outcome.err


def test_compare_takes_urls_and_shows_no_signature(run: Run, web: str, job: Path) -> None:
    names = (f"{web}/rank0.pickle?sig=SECRET", str(job / "rank2.pickle"))

    outcome = run("compare", *names, "--format", "json")

    assert outcome.code == 0, outcome.err
    assert json.loads(outcome.out)["runs"][0]["name"] == f"{web}/rank0.pickle?sig=..."
    assert "SECRET" not in outcome.out


def test_export_takes_a_url(run: Run, web: str, job: Path) -> None:
    outcome = run("export", f"{web}/rank0.pickle")

    assert outcome.code == 0, outcome.err
    assert outcome.out == run("export", str(job / "rank0.pickle")).out
    assert "does not exist" in run("export", f"{web}/none.pickle").err


def test_bundle_beside_others_is_a_rank() -> None:
    system = fsspec.filesystem("memory")
    try:
        for i in range(2):
            data = pickled(fleets.rank_snapshot())
            system.pipe(f"/bundles/r{i}/snapshot.pickle", data)
            system.pipe(f"/bundles/r{i}/bundle.json", manifest(rank=7 + i))

        fleet = summarise_all(discover(["memory://bundles"]).ranks)

        assert [(r.path, r.rank, r.error) for r in fleet.ranks] == [
            ("memory://bundles/r0/", 7, ""),
            ("memory://bundles/r1/", 8, ""),
        ]
    finally:
        system.rm("/bundles", recursive=True)


def manifest(*, rank: int) -> bytes:
    return json.dumps({"format": "fragdoctor-bundle", "version": 1, "rank": rank}).encode()


def test_unknown_scheme_and_missing_library_are_sentences(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = run("analyze", "reference://x/rank0.pickle")
    assert outcome.code == 2
    assert "fragdoctor cannot read reference:// URLs." in outcome.err

    monkeypatch.setitem(sys.modules, "s3fs", None)
    outcome = run("analyze", "s3://bucket/rank0.pickle")
    assert outcome.code == 2
    assert "pip install s3fs" in outcome.err

    monkeypatch.setitem(sys.modules, "fsspec", None)
    outcome = run("analyze", "https://127.0.0.1/rank0.pickle")
    assert outcome.code == 2
    assert "pip install 'fragdoctor[remote]'" in outcome.err


def test_pattern_or_folder_without_ranks_is_a_sentence(web: str, memory: str) -> None:
    with pytest.raises(InputError, match="Nothing matches"):
        discover(["memory://run/*.nothing"])
    with pytest.raises(InputError, match=r"nowhere/ does not exist|holds no snapshot"):
        discover([f"{web}/nowhere/"])
