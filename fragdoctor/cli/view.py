"""``fragdoctor view``: the interactive page, served to this machine, with replay behind it."""

from __future__ import annotations

import contextlib
import hmac
import html
import json
import secrets
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from fragdoctor.cli import console, options
from fragdoctor.cli.exit import OK
from fragdoctor.errors import FragdoctorError
from fragdoctor.model.hooks import watched_by

if TYPE_CHECKING:
    from fragdoctor.future.whatif import FairReplay
    from fragdoctor.model.diagnosis import Diagnosis
    from fragdoctor.trace.replay import Reproduction
    from fragdoctor.trace.trace import Trace

IsWanted = Callable[[], bool]
Answer = Callable[[object, IsWanted], dict[str, Any]]

HOST: Final = "127.0.0.1"
MAX_QUESTION_BYTES: Final = 4096
MAX_CONNECTIONS: Final = 64
"""At a time, each with a thread; a browser opens six to one server."""

_QUEUE: Final = 512
_SLOT_WAIT_S: Final = 1.0
_LOOK_EVERY_S: Final = 0.05
MAX_CONF: Final = 1000
_SHOWN: Final = (
    *("conf", "capacity_bytes", "margin_bytes", "fits", "is_conclusive", "note"),
    *("oom_event", "oom_bytes", "ooms", "retries", "driver_calls"),
    *("peak_reserved_bytes", "peak_allocated_bytes"),
    *("smallest_capacity_bytes", "smallest_capacity_note"),
)
_HEADERS: Final = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

Paths = Annotated[
    list[str],
    typer.Argument(metavar="PATH...", help="A snapshot, with its messages, statistics and logs"),
]
Port = Annotated[
    int, options.option("--port", "N", "Set the port; 0 is any free", min=0, max=65535)
]
NoBrowser = Annotated[bool, typer.Option("--no-browser", help="Print the address only")]


class Abandoned(Exception):  # noqa: N818 - no error: whoever asked went away
    """Nobody waits for the answer any more."""


class ViewReplays:
    """Answers what-ifs by replay; each device is reproduced once, when it is first asked about."""

    def __init__(self, diagnosis: Diagnosis) -> None:
        self._traces: dict[int, Trace] = {d: a.trace for d, a in diagnosis.analyses.items()}
        self._ready: dict[int, tuple[Reproduction, FairReplay]] = {}
        self._lock = threading.Lock()

    def __call__(self, question: object, is_wanted: IsWanted) -> dict[str, Any]:
        """Return what the replay of a question says.

        Args:
            is_wanted: returns whether somebody still waits for the answer.
            question: ``device``, ``conf`` ("" or null: as recorded), ``capacity_bytes`` (null: as
                recorded) and ``smallest`` (whether to look for the smallest capacity).

        Raises:
            FragdoctorError: a setting is wrong, or there is nothing to replay.
            ValueError: it is no such question.
            Abandoned: nobody waits for the answer.
        """
        from fragdoctor.future.search import with_smallest_capacity
        from fragdoctor.future.whatif import WhatIf
        from fragdoctor.model.simulation import Promise
        from fragdoctor.report import words
        from fragdoctor.report.views.advice import PROMISES

        if not isinstance(question, dict):
            raise ValueError("no object")  # noqa: TRY004 - what was sent is wrong, not the program
        device, conf, capacity = (question.get(k) for k in ("device", "conf", "capacity_bytes"))
        if type(device) is not int or device not in self._traces:
            raise ValueError("no such device")
        if conf is not None and (not isinstance(conf, str) or len(conf) > MAX_CONF):
            raise ValueError("conf is no text")
        if capacity is not None and (type(capacity) is not int or not 0 < capacity < 2**50):
            raise ValueError("capacity_bytes is no size")
        with self._turn(is_wanted):
            reproduction, fair = self._replay_of(device)
            what_if = WhatIf(conf=conf or None, capacity_bytes=capacity)
            with watched_by(lambda *_: _go_on(is_wanted)):
                _go_on(is_wanted)
                result = fair.replay(what_if)
                if question.get("smallest") is True:
                    result = with_smallest_capacity(reproduction, what_if, result)
        outlook = result.outlook
        promise = Promise.of(result.fits, outlook)
        return {
            **{name: getattr(result, name) for name in _SHOWN},
            "outlook": "" if outlook is None else words.outlook_text(outlook),
            "said": [PROMISES[promise].value, promise.value],
        }

    @contextlib.contextmanager
    def _turn(self, is_wanted: IsWanted) -> Iterator[None]:
        """Wait until no other question is answered, as long as somebody waits for this one."""
        while not self._lock.acquire(timeout=_LOOK_EVERY_S):
            _go_on(is_wanted)
        try:
            yield
        finally:
            self._lock.release()

    def _replay_of(self, device: int) -> tuple[Reproduction, FairReplay]:
        from fragdoctor.future.simulator import reproduce
        from fragdoctor.future.whatif import FairReplay

        if device not in self._ready:
            reproduction = reproduce(self._traces[device])
            self._ready[device] = (reproduction, FairReplay(reproduction))
        return self._ready[device]


def _go_on(is_wanted: IsWanted) -> None:
    if not is_wanted():
        raise Abandoned


class Viewer(ThreadingHTTPServer):
    """Serves one page and its questions under an address that nobody can guess.

    Only this machine reaches it; a foreign name for this address (DNS rebinding) is refused, and so
    is a request that a page of another origin sends. Connections beyond ``MAX_CONNECTIONS`` wait in
    the operating system's queue.
    """

    daemon_threads = True
    request_queue_size = _QUEUE

    def __init__(self, page: str, answer: Answer, port: int = 0) -> None:
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as e:
            from fragdoctor.errors import ConfigError

            raise ConfigError(
                f"Port {port} cannot be used: {e.strerror or e}.", hint="Leave --port out."
            ) from e
        self.page = page.encode()
        self.answer = answer
        self.token = secrets.token_urlsafe(24)
        self._slots = threading.BoundedSemaphore(MAX_CONNECTIONS)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection in a thread of its own; close it where no place gets free."""
        if not self._slots.acquire(timeout=_SLOT_WAIT_S):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._slots.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, and make place for the next connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of connections that the other side broke; the rest is a fault of ours."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    @property
    def origin(self) -> str:
        """Scheme, host and port."""
        return f"http://{HOST}:{self.server_port}"

    @property
    def address(self) -> str:
        """The page's address."""
        return f"{self.origin}/{self.token}/"


class _Handler(BaseHTTPRequestHandler):
    server: Viewer
    server_version = "fragdoctor"
    sys_version = ""
    default_request_version = "HTTP/1.0"  # of 0.9, which it is else, answers have no headers
    timeout = 10

    def do_GET(self) -> None:
        if self._may(""):
            self._send(HTTPStatus.OK, "text/html; charset=utf-8", self.server.page)

    def do_POST(self) -> None:
        if not self._may("try"):
            return
        n_bytes = _length(self.headers.get("Content-Length", ""))
        if n_bytes is None:
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
            return
        try:
            question = json.loads(self.rfile.read(n_bytes))
            answer = self.server.answer(question, self._is_wanted)
        except Abandoned:
            self.close_connection = True
        except FragdoctorError as e:
            self._say(HTTPStatus.BAD_REQUEST, {"error": e.message, "hint": e.hint})
        except (ValueError, RecursionError):
            self._say(HTTPStatus.BAD_REQUEST, {"error": "This is no question.", "hint": ""})
        else:
            self._say(HTTPStatus.OK, answer)

    def _is_wanted(self) -> bool:
        """Return whether the connection is open on the other side too."""
        self.connection.settimeout(0)
        try:
            return len(self.connection.recv(1, socket.MSG_PEEK)) > 0
        except BlockingIOError:
            return True
        except OSError:
            return False
        finally:
            self.connection.settimeout(self.timeout)

    def _may(self, name: str) -> bool:
        """Refuse what does not come from the page itself, and return whether it does."""
        wanted = f"/{self.server.token}/{name}"
        host = f"{HOST}:{self.server.server_port}"
        origin = self.headers.get("Origin", self.server.origin)
        if self.headers.get("Host") != host or origin != self.server.origin:
            self._refuse(HTTPStatus.FORBIDDEN)
        elif not hmac.compare_digest(self.path.encode(), wanted.encode()):
            self._refuse(HTTPStatus.NOT_FOUND)
        else:
            return True
        return False

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse what is no request that is answered here, with the headers of all answers."""
        del message, explain  # they repeat what was sent
        self._refuse(HTTPStatus(code))

    def _refuse(self, status: HTTPStatus) -> None:
        self.close_connection = True
        self._send(status, "text/plain; charset=utf-8", f"{status.phrase}\n".encode())

    def _say(self, status: HTTPStatus, answer: Mapping[str, Any]) -> None:
        self._send(status, "application/json", json.dumps(answer).encode())

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name
        """Say nothing: the terminal shows the address."""


def _length(text: str) -> int | None:
    """Return the length of a question; None where it is no number, or too long."""
    if not text.isdecimal() or len(text) > len(str(MAX_QUESTION_BYTES)):
        return None
    return int(text) if int(text) <= MAX_QUESTION_BYTES else None


@contextlib.contextmanager
def in_browser(address: str) -> Iterator[None]:
    """Open an address in the browser without naming it in the arguments of a process.

    Other users of a machine see those, and with them the token. The browser is given a file that
    only its user may read and that sends it on; it is removed at the end of the block.
    """
    import webbrowser
    from pathlib import Path
    from tempfile import TemporaryDirectory

    with TemporaryDirectory(prefix="fragdoctor-") as folder:  # readable by its owner only
        page = Path(folder, "view.html")
        where = html.escape(address)
        page.write_text(
            f'<!doctype html><meta charset="utf-8"><title>fragdoctor</title>\n'
            f'<meta name="referrer" content="no-referrer">\n'
            f'<meta http-equiv="refresh" content="0; url={where}">\n'
            f'<a href="{where}">Open the page</a>\n',
            encoding="utf-8",
        )
        webbrowser.open(page.as_uri())
        yield


def view(
    paths: Paths,
    capacity: options.DeviceSize = None,
    device: options.Device = None,
    port: Port = 0,
    no_browser: NoBrowser = False,
) -> int:
    """Diagnose the inputs and serve the page until Ctrl-C."""
    from fragdoctor.diagnosis.pipeline import diagnose
    from fragdoctor.inputs.cases import read_case
    from fragdoctor.model.case import Overrides
    from fragdoctor.report.base import RenderOptions
    from fragdoctor.report.page.page import render_page
    from fragdoctor.report.views.analyze import document

    with console.Progress("Reading"):
        case = read_case(paths, Overrides(capacity_bytes=capacity, device=device))
        diagnosis = diagnose(case)
        page = render_page(diagnosis, document(diagnosis, RenderOptions()), is_live=True)
    server = Viewer(page, ViewReplays(diagnosis), port)
    typer.echo(f"{server.address}\nOnly this machine can open it. Ctrl-C ends it.")
    try:
        with contextlib.nullcontext() if no_browser else in_browser(server.address):
            server.serve_forever()
    except KeyboardInterrupt:
        typer.echo("")
    finally:
        server.server_close()
    return OK
