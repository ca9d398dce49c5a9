"""An HTTP trigger beside the signal: ``POST /record?seconds=N`` asks a program for bundles.

For servers, whose interesting seconds are known to whoever sends them requests. The recorders keep
the last events anyway, so a bundle that is written after these seconds holds what happened in them.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, Final

from fragdoctor.capture.attach import bundles_below
from fragdoctor.errors import ConfigError

HOST: Final = "127.0.0.1"
_WAIT_S: Final = 60.0
_ASKED: Final = re.compile(r"/record(?:\?seconds=([0-9]{1,3}))?")


class _Handler(BaseHTTPRequestHandler):
    server_version = "fragdoctor"
    sys_version = ""
    timeout = 10

    def do_POST(self) -> None:
        """Wait, then have the processes of the program write bundles; one request at a time."""
        found = _ASKED.fullmatch(self.path)
        host = self.headers.get("Host", "").split(":")[0]
        if found is None or "Origin" in self.headers or host not in {HOST, "localhost"}:
            # A page of a browser, from wherever it came, names its origin or another host.
            self._answer(400, error="Ask with: curl -X POST http://127.0.0.1:PORT/record?seconds=N")
        else:
            time.sleep(int(found[1] or 0))
            try:
                bundles = bundles_below(os.getpid(), _WAIT_S)
            except ConfigError as e:
                self._answer(503, error=str(e))
            else:
                self._answer(200, bundles=[str(bundle) for bundle in bundles])

    def _answer(self, status: int, **content: Any) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(content).encode() + b"\n")

    def log_message(self, *_: Any) -> None:
        """Leave standard error to the program."""


def listen(port: int) -> None:
    """Answer on this machine until this process ends.

    Raises:
        ConfigError: if the port cannot be used.
    """
    try:
        server = HTTPServer((HOST, port), _Handler)
    except OSError as e:
        raise ConfigError(
            f"Port {port} cannot be used: {e.strerror or e}.", hint="Choose another: --listen PORT"
        ) from e
    threading.Thread(target=server.serve_forever, name="fragdoctor-trigger", daemon=True).start()
