"""``fragdoctor view``: what it serves, and to whom it serves nothing."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from served import served

from fragdoctor.cli.pages import Abandoned, Shown, ViewReplays
from fragdoctor.cli.view import (
    HOST,
    MAX_CONNECTIONS,
    MAX_QUESTION_BYTES,
    Viewer,
    in_browser,
)
from fragdoctor.diagnosis.pipeline import diagnose
from fragdoctor.errors import ConfigError
from fragdoctor.future.simulator import simulate
from fragdoctor.future.whatif import FairReplay
from fragdoctor.inputs.cases import read_case
from fragdoctor.model.case import Overrides

SAMPLE = Path(__file__).parents[2] / "sample_snapshots" / "small_holes_oom.pickle"


@pytest.fixture(scope="module")
def diagnosis():
    return diagnose(read_case([str(SAMPLE)], Overrides()))


@pytest.fixture(scope="module")
def viewer(diagnosis):
    with served(Viewer(Shown(b"<p>the page</p>", ViewReplays(diagnosis)))) as server:
        yield server


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
    one, two = (Viewer(Shown(b"", ViewReplays(diagnosis))) for _ in range(2))
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


def raw(viewer, request: bytes) -> socket.socket:
    connection = socket.create_connection((HOST, viewer.server_port), timeout=20)
    connection.sendall(request)
    return connection


def question(viewer, content: bytes = b'{"device": 0}', length: str | None = None) -> bytes:
    head = (
        f"POST /{viewer.token}/try HTTP/1.1\r\nHost: {HOST}:{viewer.server_port}\r\n"
        f"Content-Length: {len(content) if length is None else length}\r\n\r\n"
    )
    return head.encode() + content


def reset(connection: socket.socket) -> None:
    """Close so that the other side is told of a broken connection."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def everything(connection: socket.socket) -> bytes:
    with connection:
        return b"".join(iter(lambda: connection.recv(65536), b""))


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET / HTTP/1.0\r\n\r\n", 403),
        (b"GET /\r\n\r\n", 403),
        (b"nonsense\r\n\r\n", 400),
        (b"GET / HTTP/9.9\r\n\r\n", 505),
        (b"BREW /<script>alert(1)</script> HTTP/1.1\r\n\r\n", 501),
        (b"HEAD / HTTP/1.1\r\n\r\n", 501),
        (b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\n\r\n", 414),
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 200 + b"\r\n", 431),
    ],
)
def test_every_answer_has_the_headers_and_repeats_nothing(viewer, request_, status):
    answer = everything(raw(viewer, request_))

    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.0 %d " % status)
    for name in (b"Content-Security-Policy", b"X-Content-Type-Options", b"Cache-Control",
                 b"Referrer-Policy", b"Cross-Origin-Resource-Policy"):  # fmt: skip
        assert name in head
    assert b"Python" not in answer
    assert b"script" not in body


@pytest.mark.parametrize("length", ["9" * 5000, "9" * 20, "-1", "1e3", "", "0x10", "\u00b2"])
def test_absurd_lengths_are_refused(viewer, capfd, length):
    answer = everything(raw(viewer, question(viewer, b"", length)))

    assert answer.startswith(b"HTTP/1.0 413 ")
    assert capfd.readouterr().err == ""


def test_broken_connections_leave_no_traceback(viewer, capfd):
    asked = question(viewer)
    for n_bytes in (0, 10, len(asked) - 5, len(asked)):
        reset(raw(viewer, asked[:n_bytes]))
        raw(viewer, asked[:n_bytes]).close()
    page = f"GET /{viewer.token}/ HTTP/1.0\r\nHost: {HOST}:{viewer.server_port}\r\n\r\n"
    reset(raw(viewer, page.encode()))

    assert try_(viewer, {"device": 0})[0] == 200
    time.sleep(0.2)  # the threads of the broken ones may still be at work
    assert capfd.readouterr().err == ""


def test_abandoned_questions_do_not_delay_the_next(diagnosis, monkeypatch):
    """Each takes 0.2 s: answered one after the other, 300 of them would take a minute."""
    n_replays = 0
    replay = FairReplay.replay

    def slow(self, what_if):
        nonlocal n_replays
        n_replays += 1
        time.sleep(0.2)
        return replay(self, what_if)

    with served(Viewer(Shown(b"", ViewReplays(diagnosis)))) as server:
        assert try_(server, {"device": 0})[0] == 200  # reproduced: that is needed by all
        monkeypatch.setattr(FairReplay, "replay", slow)
        for i in range(300):
            connection = raw(server, question(server))
            reset(connection) if i % 2 else connection.close()
        start = time.monotonic()
        status, _ = try_(server, {"device": 0})
        took_s = time.monotonic() - start

    assert status == 200
    assert took_s < 1.2  # its own replay included
    assert n_replays < 10


def test_search_for_somebody_who_went_away_ends(diagnosis):
    """The smallest capacity takes many replays."""
    answers = ViewReplays(diagnosis)
    n_left = 3

    def is_wanted():
        nonlocal n_left
        n_left -= 1
        return n_left > 0

    with pytest.raises(Abandoned):
        answers({"device": 0, "smallest": True}, is_wanted)
    assert answers({"device": 0, "smallest": True}, lambda: True)["smallest_capacity_bytes"]


def test_connections_are_bounded(diagnosis):
    with served(Viewer(Shown(b"", ViewReplays(diagnosis)))) as server:
        before = threading.active_count()
        idle = [raw(server, b"GET") for _ in range(MAX_CONNECTIONS + 20)]
        time.sleep(0.5)
        n_threads = threading.active_count() - before
        for connection in idle:
            connection.close()
        status, _ = try_(server, {"device": 0})

    assert n_threads <= MAX_CONNECTIONS
    assert status == 200


def test_browser_is_not_told_the_token_in_its_arguments(monkeypatch):
    opened = []

    def open_(url):
        place = Path(url.removeprefix("file://"))
        mode = place.parent.stat().st_mode & 0o077
        opened.append((url, place, place.read_text(), mode))

    monkeypatch.setattr("webbrowser.open", open_)
    with in_browser("http://127.0.0.1:1/secret-token/"):
        ((url, place, text, mode),) = opened

    assert "secret-token" not in url
    assert re.search(r'url=http://127\.0\.0\.1:1/secret-token/"', text)
    assert mode == 0 or sys.platform == "win32"
    assert not place.exists()


def test_port_in_use_is_said(viewer, diagnosis):
    with pytest.raises(ConfigError, match="cannot be used"):
        Viewer(Shown(b"", ViewReplays(diagnosis)), viewer.server_port)


def test_interrupt_while_an_answer_begins_is_not_lost(diagnosis, monkeypatch):
    server = Viewer(Shown(b"", ViewReplays(diagnosis)))
    start = threading.Thread.start

    def interrupted(thread):
        start(thread)
        thread.join(20)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    ours, theirs = socket.socketpair()
    with server, ours:
        ours.sendall(b"GET / HTTP/1.0\r\n\r\n")
        with pytest.raises(KeyboardInterrupt):
            server.process_request(theirs, ("", 0))

        for _ in range(MAX_CONNECTIONS):
            assert server._slots.acquire(blocking=False)
        assert not server._slots.acquire(blocking=False)


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
