"""``fragdoctor view``: serve the interactive page to this machine, backed by replays."""

from __future__ import annotations

import contextlib
import hmac
import html
import json
import secrets
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedIOBase
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import typer

from fragdoctor.cli import console, options
from fragdoctor.cli.exit import OK
from fragdoctor.cli.pages import (
    Abandoned,
    Answer,
    IsWanted,
    Sent,
    Shown,
    announced,
    opened,
    shown_case,
)
from fragdoctor.errors import ConfigError, FragdoctorError
from fragdoctor.model.case import Overrides

HOST: Final = "127.0.0.1"
MAX_QUESTION_BYTES: Final = 4096
MAX_OPENED: Final = 4
MAX_CONNECTIONS: Final = 64
"""The most connections at a time, each with a thread; a browser opens six to one server."""

_QUEUE: Final = 512
_SLOT_WAIT_S: Final = 1.0
_HEADERS: Final = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


Opener = Callable[[Sequence[Sent], BufferedIOBase, IsWanted], Shown]
"""Makes a page from files in the body of a request; raises the errors of ``dropped.opened``."""


class Viewer(ThreadingHTTPServer):
    """Serves a page and its questions under an address that nobody can guess.

    With an ``opener``, the page may send files, whose pages are served below its address; the
    last ``MAX_OPENED`` pages are kept.

    Only this machine can reach it; foreign names for this address (DNS rebinding) and requests
    from pages of another origin are refused. Connections beyond ``MAX_CONNECTIONS`` wait in the
    operating system's queue.
    """

    daemon_threads = True
    request_queue_size = _QUEUE

    def __init__(self, front: Shown, port: int = 0, opener: Opener | None = None) -> None:
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as e:
            raise ConfigError(
                f"Port {port} cannot be used: {e.strerror or e}.", hint="Leave --port out."
            ) from e
        self.pages = {"": front}
        self.opener = opener
        self._n_opened = 0
        self._opening = threading.Lock()
        self.token = secrets.token_urlsafe(24)
        self._slots = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._placed: set[Any] = set()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection in its own thread, or close it if no slot becomes free."""
        if not self._slots.acquire(timeout=_SLOT_WAIT_S):
            self.shutdown_request(request)
            return
        self._placed.add(request)
        try:
            super().process_request(request, client_address)
        except BaseException:  # including Ctrl-C once the answering thread has started
            self._make_place(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, and free the slot for the next connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._make_place(request)

    def _make_place(self, request: Any) -> None:
        """Free the slot of a connection, only once."""
        with contextlib.suppress(KeyError):
            self._placed.remove(request)
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore connections that the other side broke; any other error is our bug."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    def open(
        self, opener: Opener, files: Sequence[Sent], body: BufferedIOBase, is_wanted: IsWanted
    ) -> str:
        """Make a page of files, one page at a time; return its address."""
        with self._opening:
            shown = opener(files, body, is_wanted)
            self._n_opened += 1
            place = f"{self._n_opened}/"
            self.pages = {
                name: page
                for name, page in [*self.pages.items(), (place, shown)]
                if not name or int(name[:-1]) > self._n_opened - MAX_OPENED
            }
            return place

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
    default_request_version = "HTTP/1.0"  # the default is 0.9, whose answers have no headers
    timeout = 10

    def do_GET(self) -> None:
        if (place := self._place()) is not None:
            shown = self.server.pages.get(place)
            if shown is None:
                self._refuse(HTTPStatus.NOT_FOUND)
            else:
                self._send(HTTPStatus.OK, "text/html; charset=utf-8", shown.page)

    def do_POST(self) -> None:
        place = self._place()
        if place is None:
            return
        opener = self.server.opener
        if place == "open" and opener is not None:
            self._answer(partial(self._open, opener))
            return
        shown = self.server.pages.get(place.removesuffix("try")) if place.endswith("try") else None
        if shown is None or shown.answer is None:
            self._refuse(HTTPStatus.NOT_FOUND)
            return
        n_bytes = _length(self.headers.get("Content-Length", ""))
        if n_bytes is None:
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
            return
        self._answer(partial(self._try, shown.answer, n_bytes))

    def _try(self, answer: Answer, n_bytes: int) -> Mapping[str, Any]:
        return answer(json.loads(self.rfile.read(n_bytes)), self._is_wanted)

    def _open(self, opener: Opener) -> Mapping[str, Any]:
        self.close_connection = True  # a refused request is not read to its end
        files = announced(self.headers.get("Fragdoctor-Files", ""))
        if self.headers.get("Content-Length", "") != str(sum(file.n_bytes for file in files)):
            raise ValueError("another length")
        return {"page": self.server.open(opener, files, self.rfile, self._is_wanted)}

    def _answer(self, answer_of: Callable[[], Mapping[str, Any]]) -> None:
        try:
            answer = answer_of()
        except Abandoned:
            self.close_connection = True
        except FragdoctorError as e:
            self._say(HTTPStatus.BAD_REQUEST, {"error": e.message, "hint": e.hint})
        except (ValueError, RecursionError):
            self._say(HTTPStatus.BAD_REQUEST, {"error": "This is no question.", "hint": ""})
        else:
            self._say(HTTPStatus.OK, answer)

    def _is_wanted(self) -> bool:
        """Return whether the other side still has the connection open."""
        self.connection.settimeout(0)
        try:
            return len(self.connection.recv(1, socket.MSG_PEEK)) > 0
        except BlockingIOError:
            return True
        except OSError:
            return False
        finally:
            self.connection.settimeout(self.timeout)

    def _place(self) -> str | None:
        """Return what is requested, or None after refusing a request not from the page itself."""
        start = f"/{self.server.token}/"
        host = f"{HOST}:{self.server.server_port}"
        origin = self.headers.get("Origin", self.server.origin)
        if self.headers.get("Host") != host or origin != self.server.origin:
            self._refuse(HTTPStatus.FORBIDDEN)
        elif not hmac.compare_digest(self.path[: len(start)].encode(), start.encode()):
            self._refuse(HTTPStatus.NOT_FOUND)
        else:
            return self.path[len(start) :]
        return None

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse a request that is not supported, with the same headers as all answers."""
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
    """Return the length of a question, or None if it is not a number or too large."""
    if not text.isdecimal() or len(text) > len(str(MAX_QUESTION_BYTES)):
        return None
    return int(text) if int(text) <= MAX_QUESTION_BYTES else None


@contextlib.contextmanager
def in_browser(address: str) -> Iterator[None]:
    """Open an address in the browser without exposing it in the arguments of a process.

    Other users of the machine can see arguments, and thus the token. Instead the browser opens a
    file that only this user can read and that redirects; it is removed at the end of the block.
    """
    import webbrowser

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


@options.taken
class ViewOptions:
    """What to show, and where."""

    paths: list[str] | None = options.argument(
        "[PATH]...",
        "A snapshot, with its messages, statistics and logs; without one, drop files on the page",
        default=None,
    )
    capacity: int | None = options.DEVICE_SIZE
    device: int | None = options.DEVICE
    port: int = options.option("N", "Set the port; 0 is any free", default=0, min=0, max=65535)
    no_browser: bool = options.flag("Print the address only")


def view(asked: ViewOptions) -> int:
    """Serve the page of the inputs, or of files dropped on it, until Ctrl-C."""
    known = Overrides(capacity_bytes=asked.capacity, device=asked.device)
    if asked.paths:
        from fragdoctor.inputs.cases import read_case

        with console.Progress("Reading"):
            server = Viewer(shown_case(read_case(asked.paths, known)), asked.port)
    else:
        from fragdoctor.report.page.page import render_drop_page

        server = Viewer(Shown(render_drop_page().encode()), asked.port, partial(opened, known))
    typer.echo(f"{server.address}\nOnly this machine can open it. Ctrl-C ends it.")
    try:
        with contextlib.nullcontext() if asked.no_browser else in_browser(server.address):
            server.serve_forever()
    except KeyboardInterrupt:
        typer.echo("")
    finally:
        server.server_close()
    return OK
