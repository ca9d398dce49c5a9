"""``fragdoctor view``: the interactive page, served to this machine, with replay behind it."""

from __future__ import annotations

import hmac
import json
import secrets
import threading
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from fragdoctor.cli import console, options
from fragdoctor.cli.exit import OK
from fragdoctor.errors import FragdoctorError

if TYPE_CHECKING:
    from fragdoctor.future.whatif import FairReplay
    from fragdoctor.model.diagnosis import Diagnosis
    from fragdoctor.trace.replay import Reproduction
    from fragdoctor.trace.trace import Trace

Answer = Callable[[object], dict[str, Any]]

HOST: Final = "127.0.0.1"
MAX_QUESTION_BYTES: Final = 4096
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


class Replays:
    """Answers what-ifs by replay; each device is reproduced once, when it is first asked about."""

    def __init__(self, diagnosis: Diagnosis) -> None:
        self._traces: dict[int, Trace] = {d: a.trace for d, a in diagnosis.analyses.items()}
        self._ready: dict[int, tuple[Reproduction, FairReplay]] = {}
        self._lock = threading.Lock()

    def __call__(self, question: object) -> dict[str, Any]:
        """Return what the replay of a question says.

        Args:
            question: ``device``, ``conf`` ("" or null: as recorded), ``capacity_bytes`` (null: as
                recorded) and ``smallest`` (whether to look for the smallest capacity).

        Raises:
            FragdoctorError: a setting is wrong, or there is nothing to replay.
            ValueError: it is no such question.
        """
        from fragdoctor.future.search import with_smallest_capacity
        from fragdoctor.future.whatif import WhatIf
        from fragdoctor.report import words

        if not isinstance(question, dict):
            raise ValueError("no object")  # noqa: TRY004 - what was sent is wrong, not the program
        device, conf, capacity = (question.get(k) for k in ("device", "conf", "capacity_bytes"))
        if type(device) is not int or device not in self._traces:
            raise ValueError("no such device")
        if conf is not None and (not isinstance(conf, str) or len(conf) > MAX_CONF):
            raise ValueError("conf is no text")
        if capacity is not None and (type(capacity) is not int or not 0 < capacity < 2**50):
            raise ValueError("capacity_bytes is no size")
        with self._lock:
            reproduction, fair = self._replay_of(device)
            what_if = WhatIf(conf=conf or None, capacity_bytes=capacity)
            result = fair.replay(what_if)
            if question.get("smallest") is True:
                result = with_smallest_capacity(reproduction, what_if, result)
        outlook = result.outlook
        return {
            **{name: getattr(result, name) for name in _SHOWN},
            "outlook": "" if outlook is None else words.outlook_text(outlook),
            "outlook_state": None if outlook is None else outlook.state.value,
        }

    def _replay_of(self, device: int) -> tuple[Reproduction, FairReplay]:
        from fragdoctor.future.simulator import reproduce
        from fragdoctor.future.whatif import FairReplay

        if device not in self._ready:
            reproduction = reproduce(self._traces[device])
            self._ready[device] = (reproduction, FairReplay(reproduction))
        return self._ready[device]


class Viewer(ThreadingHTTPServer):
    """Serves one page and its questions under an address that nobody can guess.

    Only this machine reaches it; a foreign name for this address (DNS rebinding) is refused, and so
    is a request that a page of another origin sends.
    """

    daemon_threads = True

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
    timeout = 30

    def do_GET(self) -> None:
        if self._may(""):
            self._send(HTTPStatus.OK, "text/html; charset=utf-8", self.server.page)

    def do_POST(self) -> None:
        if not self._may("try"):
            return
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MAX_QUESTION_BYTES:
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
            return
        try:
            question = json.loads(self.rfile.read(int(length)))
            self._say(HTTPStatus.OK, self.server.answer(question))
        except FragdoctorError as e:
            self._say(HTTPStatus.BAD_REQUEST, {"error": e.message, "hint": e.hint})
        except (ValueError, RecursionError):
            self._say(HTTPStatus.BAD_REQUEST, {"error": "This is no question.", "hint": ""})

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
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name
        """Say nothing: the terminal shows the address."""


def view(
    paths: Paths,
    capacity: options.DeviceSize = None,
    device: options.Device = None,
    port: Port = 0,
    no_browser: NoBrowser = False,
) -> int:
    """Diagnose the inputs and serve the page until Ctrl-C."""
    import webbrowser

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
    server = Viewer(page, Replays(diagnosis), port)
    typer.echo(f"{server.address}\nOnly this machine can open it. Ctrl-C ends it.")
    if not no_browser:
        webbrowser.open(server.address)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        typer.echo("")
    finally:
        server.server_close()
    return OK
