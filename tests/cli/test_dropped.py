"""``fragdoctor view`` without a file: what is dropped on its page, and what is refused."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from urllib.parse import quote

import pytest
from served import served

from fragdoctor.cli import pages
from fragdoctor.cli.pages import MAX_FILES, Sent, Shown, announced, opened
from fragdoctor.cli.view import HOST, MAX_OPENED, Viewer
from fragdoctor.model.case import Overrides
from fragdoctor.report.page.page import render_drop_page

SAMPLES = Path(__file__).parents[2] / "sample_snapshots"
File = tuple[str, bytes]


@pytest.fixture
def viewer() -> Iterator[Viewer]:
    page = Shown(render_drop_page().encode())
    with served(Viewer(page, opener=partial(opened, Overrides()))) as server:
        yield server


def ask(viewer: Viewer, method: str, place: str, body: bytes = b"", **headers: str):
    connection = http.client.HTTPConnection(HOST, viewer.server_port, timeout=60)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, f"/{viewer.token}/{place}", body, named)
    answer = connection.getresponse()
    found = answer.status, answer.read()
    connection.close()
    return found


def drop(viewer: Viewer, *files: File, announce: Sequence[object] | None = None):
    told = announce if announce is not None else [[name, len(data)] for name, data in files]
    body = b"".join(data for _, data in files)
    status, said = ask(viewer, "POST", "open", body, Fragdoctor_Files=quote(json.dumps(told)))
    return status, json.loads(said)


def sample(name: str) -> File:
    return name, (SAMPLES / name).read_bytes()


def test_dropped_recording_has_a_page_whose_what_ifs_are_replayed(viewer: Viewer) -> None:
    status, said = drop(viewer, sample("small_holes_oom.pickle"))

    page = ask(viewer, "GET", said["page"])[1].decode()
    question = json.dumps({"device": 0, "conf": "expandable_segments:True"}).encode()
    tried, answer = ask(viewer, "POST", f"{said['page']}try", question)
    assert (status, tried) == (200, 200)
    assert "small_holes_oom.pickle" in page
    assert "/tmp/" not in page
    assert json.loads(answer)["conf"] == "expandable_segments:True"


def test_message_beside_it_is_read_too(viewer: Viewer) -> None:
    files = sample("fragmentation_oom.pickle"), sample("fragmentation_oom.txt")

    _, said = drop(viewer, *files)

    page = ask(viewer, "GET", said["page"])[1].decode()
    assert "fragmentation_oom.txt" in page


def test_snapshots_of_several_ranks_are_one_job(viewer: Viewer) -> None:
    _, said = drop(viewer, *(sample(f"ranks/rank{n}.pickle.gz") for n in range(4)))

    page = ask(viewer, "GET", said["page"])[1].decode()
    assert "4 ranks" in page
    assert ask(viewer, "POST", f"{said['page']}try", b"{}")[0] == 404


def test_what_cannot_be_read_is_a_sentence_with_its_name_only(viewer: Viewer) -> None:
    for data in (b"\x80\x04cos\nsystem\n.", b"\0" * 100):
        status, said = drop(viewer, ("../../notes.pickle", data))

        assert status == 400
        assert "notes.pickle" in said["error"] + said["hint"]
        assert "/" not in said["error"]


@pytest.mark.parametrize(
    "announce",
    [[], [["a", 5]], [["a", -1], ["b", 2]], [["a", "1"]], [[1, 1]], [["a"]], 7, [["a", 1]] * 999],
)
def test_nonsense_is_refused(viewer: Viewer, announce: Sequence[object]) -> None:
    status, said = drop(viewer, ("a", b"x"), announce=announce)

    assert (status, said["error"]) == (400, "This is no question.")


def test_more_than_there_is_room_for_is_not_read(viewer: Viewer) -> None:
    huge = str(1 << 50)
    named = quote(json.dumps([["a.pickle", 1 << 50]]))

    status, said = ask(viewer, "POST", "open", Fragdoctor_Files=named, Content_Length=huge)

    assert status == 400
    assert "there is room for" in json.loads(said)["error"]


def test_the_last_pages_are_kept(viewer: Viewer) -> None:
    viewer.opener = lambda files, body, is_wanted: Shown(body.read(1))

    places = [drop(viewer, ("a", b"x"))[1]["page"] for _ in range(MAX_OPENED + 1)]

    assert [ask(viewer, "GET", place)[0] for place in places] == [404] + [200] * MAX_OPENED
    assert ask(viewer, "GET", "")[0] == 200


def test_page_of_a_named_file_takes_none() -> None:
    with served(Viewer(Shown(b"page"))) as server:
        assert ask(server, "POST", "open", b"x", Fragdoctor_Files=quote('[["a",1]]'))[0] == 404


def test_names_lose_their_folders() -> None:
    told = quote(json.dumps([["../a\\b/c.txt", 1], ["..", 2], ["", 3], ["x" * 999, 4]]))

    assert announced(told) == [Sent("c.txt", 1), Sent("file", 2), Sent("file", 3),
                               Sent("x" * pages.MAX_NAME, 4)]  # fmt: skip
    assert MAX_FILES >= 64
