"""``fragdoctor view``: what it serves, and to whom it serves nothing."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fragdoctor.cli.view import HOST, MAX_QUESTION_BYTES, Replays, Viewer
from fragdoctor.diagnosis.pipeline import diagnose
from fragdoctor.errors import ConfigError
from fragdoctor.future.simulator import simulate
from fragdoctor.inputs.cases import read_case
from fragdoctor.model.case import Overrides

SAMPLE = Path(__file__).parents[2] / "sample_snapshots" / "small_holes_oom.pickle"


@pytest.fixture(scope="module")
def diagnosis():
    return diagnose(read_case([str(SAMPLE)], Overrides()))


@pytest.fixture(scope="module")
def viewer(diagnosis):
    server = Viewer("<p>the page</p>", Replays(diagnosis))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def ask(viewer, method, path, body=None, **headers):
    connection = http.client.HTTPConnection(HOST, viewer.server_port, timeout=20)
    sent = json.dumps(body) if body is not None and not isinstance(body, bytes) else body
    connection.request(method, path, sent, {k.replace("_", "-"): v for k, v in headers.items()})
    response = connection.getresponse()
    content = response.read()
    connection.close()
    return response, content


def try_(viewer, question, **headers):
    response, content = ask(viewer, "POST", f"/{viewer.token}/try", question, **headers)
    return response.status, json.loads(content)


def test_page_is_served_with_headers_that_keep_it_here(viewer):
    response, content = ask(viewer, "GET", f"/{viewer.token}/")

    assert (response.status, content) == (200, b"<p>the page</p>")
    assert response.headers["Cache-Control"] == "no-store"
    assert response.headers["X-Content-Type-Options"] == "nosniff"
    assert response.headers["Referrer-Policy"] == "no-referrer"
    assert "frame-ancestors 'none'" in response.headers["Content-Security-Policy"]
    assert "Access-Control-Allow-Origin" not in response.headers


@pytest.mark.parametrize("path", ["/", "/try", "/wrong/", "/../etc/passwd", "//", "/%00/"])
def test_without_the_token_there_is_nothing(viewer, path):
    response, content = ask(viewer, "GET", path)

    assert response.status == 404
    assert b"page" not in content


def test_token_is_long_and_new_each_time(diagnosis):
    one, two = (Viewer("", Replays(diagnosis)) for _ in range(2))
    one.server_close()
    two.server_close()

    assert len(one.token) >= 32
    assert one.token != two.token
    assert one.server_address[0] == "127.0.0.1"


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "localhost:1"},
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
    ],
)
def test_other_names_and_origins_are_refused(viewer, headers):
    for method, path in (("GET", ""), ("POST", "try")):
        response, _ = ask(viewer, method, f"/{viewer.token}/{path}", b"{}", **headers)
        assert response.status == 403


@pytest.mark.parametrize("conf", [None, "expandable_segments:True", "max_split_size_mb:64"])
@pytest.mark.parametrize("capacity", [None, 2**29])
def test_answer_is_that_of_simulate(viewer, diagnosis, conf, capacity):
    question = {"device": 0, "conf": conf, "capacity_bytes": capacity, "smallest": True}

    status, answer = try_(viewer, question)

    expected = simulate(
        diagnosis.case.snapshot,
        device=0,
        confs=[conf] if conf else [],
        capacity_bytes=capacity,
        smallest_capacity=True,
    ).results[0]
    assert status == 200
    for name in ("fits", "peak_reserved_bytes", "retries", "smallest_capacity_bytes", "oom_event"):
        assert answer[name] == getattr(expected, name)


def test_wrong_setting_is_answered_in_a_sentence(viewer):
    status, answer = try_(viewer, {"device": 0, "conf": "no_such_key:1"})

    assert status == 400
    assert "no_such_key" in answer["error"]


@pytest.mark.parametrize(
    "question",
    [b"", b"{", b"[]", b"7", b'"x"', {}, {"device": 5}, {"device": True}, {"device": "0"},
     {"device": 0, "conf": 7}, {"device": 0, "conf": "x" * 2000},
     {"device": 0, "capacity_bytes": 0}, {"device": 0, "capacity_bytes": 1e9},
     {"device": 0, "capacity_bytes": 2**60}, b"[" * 4000],
)  # fmt: skip
def test_nonsense_is_refused_and_the_server_goes_on(viewer, question):
    status, answer = try_(viewer, question)

    assert (status, answer["error"]) == (400, "This is no question.")
    assert try_(viewer, {"device": 0})[0] == 200


def test_long_question_is_not_read(viewer):
    response, _ = ask(viewer, "POST", f"/{viewer.token}/try", b"x" * (MAX_QUESTION_BYTES + 1))

    assert response.status == 413


def test_port_in_use_is_said(viewer, diagnosis):
    with pytest.raises(ConfigError, match="cannot be used"):
        Viewer("", Replays(diagnosis), viewer.server_port)


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_command_prints_the_address_and_ends_with_the_interrupt():
    command = [sys.executable, "-m", "fragdoctor", "view", str(SAMPLE), "--no-browser"]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        # A shell's job in the background ignores interrupts, and so do its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    ) as process:
        try:
            address = process.stdout.readline().decode().strip()
            host, _, rest = address.removeprefix("http://").partition("/")
            connection = http.client.HTTPConnection(host, timeout=20)
            connection.request("GET", f"/{rest}")
            page = connection.getresponse().read().decode()
            process.send_signal(signal.SIGINT)
            code = process.wait(20)
        finally:
            process.kill()

    assert address.startswith("http://127.0.0.1:")
    assert "connect-src &#39;self&#39;" in page
    assert code == 0
