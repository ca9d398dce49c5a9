"""What a recorder does at signals: it writes a bundle, and the program goes on or dies.

A bundle is written at SIGTERM or SIGHUP, after which the program dies of the signal as it would
have. Python's handlers run between two instructions of the main thread. A program that hangs in a
collective or a synchronization never gets there, although without us the signal would have ended
it: so a thread that the signal wakes directly does the same after a moment. SIGINT needs nothing
here: Python turns it into a KeyboardInterrupt, which is seen at exit.

Another process asks for a bundle of the running program (``fragdoctor attach``) with a real-time
signal, because programs, schedulers and faulthandler use SIGUSR1 and SIGUSR2 for their own
purposes, in ways that Python cannot see. A thread writes it, so that the program continues.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

NAMES = ("SIGTERM", "SIGHUP")
"""Schedulers and kill send the first; a terminal that goes away (such as SSH) sends the second."""

NUMBER: int | None = signal.SIGRTMAX - 7 if hasattr(signal, "SIGRTMAX") else None
"""The request; None if the system has no real-time signals (macOS, Windows)."""

GRACE_S = 3.0
"""The main thread has this long to get to a handler before a thread acts in its place."""


class Signals:
    """Calls ``end`` once with the name of a signal, then lets the signal take its default effect.

    ``answer`` is called, in a separate thread, for each request. While ``is_busy`` (a bundle is
    being written), the end waits: ``resume`` must be called after that. It steps back from each
    signal for which the program has its own handler or which it ignores, as under nohup, and hides
    from programs that ask whether there is a handler.
    """

    def __init__(
        self, end: Callable[[str], None], answer: Callable[[], None], is_busy: Callable[[], bool]
    ) -> None:
        self._end = end
        self._answer = answer
        self._is_busy = is_busy
        self._deferred = 0  # number of the signal waiting for a bundle
        self._pid = os.getpid()
        self._has_begun = threading.Event()  # to end
        self._is_seen = threading.Event()  # the request
        self._lock = threading.Lock()

    def install(self) -> None:
        """Install the handlers: in the main thread, for signals at their defaults."""
        if threading.current_thread() is not threading.main_thread():
            return
        if NUMBER is not None and signal.getsignal(NUMBER) is signal.SIG_DFL:
            signal.signal(NUMBER, self._on_request)
            signal.siginterrupt(NUMBER, False)  # libraries that do not try again are not disturbed
        numbers = [getattr(signal, name, None) for name in NAMES]
        free = [n for n in numbers if n is not None and signal.getsignal(n) is signal.SIG_DFL]
        if free:
            for number in free:
                signal.signal(number, self.handle)
            self._hide()
            self._watch()

    def _on_request(self, _number: int, _frame: Any) -> None:
        """Answer, unless this is a forked child."""
        if os.getpid() == self._pid:
            self._is_seen.set()
            threading.Thread(target=self._answer, name="fragdoctor-attach", daemon=True).start()

    def handle(self, number: int, _frame: Any) -> None:
        """Act and die; a forked child only dies."""
        if os.getpid() == self._pid:
            if self._is_busy():
                self._deferred = number
                self._has_begun.set()
                return
            self._act_once(number)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def resume(self) -> None:
        """Die of a signal that came while a bundle was written, which shows the same moment."""
        if self._deferred and os.getpid() == self._pid:
            _die(self._deferred)

    def _act_once(self, number: int) -> None:
        self._has_begun.set()
        if self._lock.acquire(blocking=False):
            self._end(signal.Signals(number).name)

    def _watch(self) -> None:
        """Start the thread that steps in if the main thread does not come back."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        previous = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        if previous != -1:  # the program's own event loop: leave it alone
            signal.set_wakeup_fd(previous)
            os.close(reader)
            os.close(writer)
            return
        os.register_at_fork(after_in_child=lambda: quietly(signal.set_wakeup_fd, -1))
        threading.Thread(
            target=self._wait, args=(reader,), name="fragdoctor-signals", daemon=True
        ).start()

    def _wait(self, reader: int) -> None:
        while True:
            numbers = os.read(reader, 64)
            if not numbers:
                return
            ours = [getattr(signal, name, 0) for name in NAMES]
            # Our handler appears as the default; other signals belong to the program.
            is_default = (n for n in ours if n in numbers and signal.getsignal(n) is signal.SIG_DFL)
            number = next(is_default, 0)
            if number and not self._has_begun.wait(GRACE_S):
                self._act_once(number)
                _die(number)
            if NUMBER is not None and NUMBER in numbers:
                if not self._is_seen.wait(GRACE_S):
                    self._answer()
                self._is_seen.clear()

    def _hide(self) -> None:
        """Make our handler look like the default: frameworks install theirs only over that one."""
        ask, put = signal.getsignal, signal.signal

        def getsignal(signalnum: Any) -> Any:
            found = ask(signalnum)
            return signal.SIG_DFL if found == self.handle else found

        def set_signal(signalnum: Any, handler: Any) -> Any:
            found = put(signalnum, handler)
            return signal.SIG_DFL if found == self.handle else found

        signal.getsignal = functools.update_wrapper(getsignal, ask)
        signal.signal = functools.update_wrapper(set_signal, put)


def _die(number: int) -> None:
    """Restore the default from a thread, which ``signal.signal`` cannot do, and raise it."""
    with contextlib.suppress(Exception):
        import ctypes

        ctypes.CDLL(None).signal(ctypes.c_int(number), ctypes.c_void_p(0))
        os.kill(os.getpid(), number)
        return
    os._exit(128 + number)


def quietly(call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Call a function that may fail without anybody noticing."""
    with contextlib.suppress(Exception):
        call(*args, **kwargs)
