"""Run a viewer in a thread for as long as a test needs it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from fragdoctor.cli.view import Viewer


@contextmanager
def served(server: Viewer) -> Iterator[Viewer]:
    """Let a viewer serve requests within a ``with`` block."""
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
