"""A bundle at SIGTERM or SIGHUP, after which the program dies of it as it would have.

Python's handlers run between two instructions of the main thread. A program that hangs in a
collective or a synchronisation never gets there, and without us the signal would have ended it: so
a thread that the signal wakes directly does the same after a moment. SIGINT needs nothing here:
Python makes a KeyboardInterrupt of it, which is seen at the exit. SIGUSR1 and others are left
alone: faulthandler and schedulers use them, in ways that Python cannot see.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

GRACE_S = 3.0
NAMES = ("SIGTERM", "SIGHUP")
"""Schedulers and kill send the first; a terminal that goes away, as of SSH, the second."""


class OnTerm:
    """Calls ``act`` once with the name of a signal, then lets it do what it does by default.

    While ``is_busy`` (a bundle is being written) it waits: ``resume`` is to be called after that.
    It steps back from each signal for which the program has a handler of its own or which it
    ignores, as under nohup, and hides from programs that ask whether there is a handler.
    """

    def __init__(self, act: Callable[[str], None], is_busy: Callable[[], bool]) -> None:
        self._act = act
        self._is_busy = is_busy
        self._deferred = 0  # number of the signal that waits for a bundle
        self._pid = os.getpid()
        self._begun = threading.Event()
        self._lock = threading.Lock()

    def install(self) -> bool:
        """Return whether it is in place: main thread, and a signal at its default."""
        if threading.current_thread() is not threading.main_thread():
            return False
        numbers = [getattr(signal, name, None) for name in NAMES]
        free = [n for n in numbers if n is not None and signal.getsignal(n) is signal.SIG_DFL]
        if not free:
            return False
        for number in free:
            signal.signal(number, self.handle)
        self._hide()
        self._watch()
        return True

    def handle(self, number: int, frame: Any) -> None:
        """Act and die; a forked child only dies."""
        del frame
        if os.getpid() == self._pid:
            if self._is_busy():
                self._deferred = number
                self._begun.set()
                return
            self._act_once(number)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def resume(self) -> None:
        """Die of a signal that came while a bundle was written, which shows the same moment."""
        if self._deferred and os.getpid() == self._pid:
            _die(self._deferred)

    def _act_once(self, number: int) -> None:
        self._begun.set()
        if self._lock.acquire(blocking=False):
            self._act(signal.Signals(number).name)

    def _watch(self) -> None:
        """Start the thread that steps in for a main thread that does not come back."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        previous = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        if previous != -1:  # the program's own event loop: leave it alone
            signal.set_wakeup_fd(previous)
            os.close(reader)
            os.close(writer)
            return
        os.register_at_fork(after_in_child=lambda: _quietly(signal.set_wakeup_fd, -1))
        threading.Thread(
            target=self._wait, args=(reader,), name="fragdoctor-signals", daemon=True
        ).start()

    def _wait(self, reader: int) -> None:
        while True:
            numbers = os.read(reader, 64)
            if not numbers:
                return
            number = self._ours_of(numbers)
            if number and not self._begun.wait(GRACE_S):
                self._act_once(number)
                _die(number)

    def _ours_of(self, numbers: bytes) -> int:
        """Return a signal that our handler is for, 0 where all are the program's own."""
        ours = [getattr(signal, name, 0) for name in NAMES]
        # Our handler hides as the default.
        return next((n for n in ours if n in numbers and signal.getsignal(n) is signal.SIG_DFL), 0)

    def _hide(self) -> None:
        """Make our handler look like the default: frameworks install theirs only over that."""
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
    """Restore the default from a thread, which Python's own call does not do, and raise."""
    with contextlib.suppress(Exception):
        import ctypes

        ctypes.CDLL(None).signal(ctypes.c_int(number), ctypes.c_void_p(0))
        os.kill(os.getpid(), number)
        return
    os._exit(128 + number)


def _quietly(call: Callable[..., Any], *args: Any) -> None:
    with contextlib.suppress(Exception):
        call(*args)
