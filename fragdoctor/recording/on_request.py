"""A bundle of the running program whenever another process asks for one: ``fragdoctor attach``.

The request is a real-time signal, because programs, schedulers and faulthandler use SIGUSR1 and
SIGUSR2 for their own purposes. A thread writes the bundle, so that the program continues.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

NUMBER: int | None = signal.SIGRTMAX - 7 if hasattr(signal, "SIGRTMAX") else None
"""The signal; None if the system has no real-time signals (macOS, Windows)."""

GRACE_S = 3.0
"""The main thread has this long to get to a handler before a thread answers in its place."""


class OnRequest:
    """Calls ``answer`` in a separate thread for each request.

    Python's handlers run in the main thread. If it hangs outside of Python, it never gets there, so
    whoever reads the wakeup descriptor calls ``step_in``, which answers after a moment.
    """

    def __init__(self, answer: Callable[[], None]) -> None:
        self._answer = answer
        self._pid = os.getpid()
        self._is_seen = threading.Event()

    def install(self) -> bool:
        """Return whether the handler was installed: main thread, and a signal at its default."""
        if NUMBER is None or threading.current_thread() is not threading.main_thread():
            return False
        if signal.getsignal(NUMBER) is not signal.SIG_DFL:
            return False
        signal.signal(NUMBER, self.handle)
        signal.siginterrupt(NUMBER, False)  # libraries that do not try again are not disturbed
        return True

    def handle(self, _number: int, _frame: Any) -> None:
        """Answer, unless this is a forked child."""
        if os.getpid() == self._pid:
            self._is_seen.set()
            threading.Thread(target=self._answer, name="fragdoctor-attach", daemon=True).start()

    def step_in(self, numbers: bytes) -> None:
        """Answer if a request is among these signals and the main thread does not see it."""
        if NUMBER is not None and NUMBER in numbers:
            if not self._is_seen.wait(GRACE_S):
                self._answer()
            self._is_seen.clear()
