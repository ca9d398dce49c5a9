"""Waiting, at no cost, until the program uses CUDA; then the recorder starts.

The steps: the interpreter starts and a finder waits for ``import torch``; torch is imported and a
call is queued for the initialization of CUDA (``torch.cuda._lazy_call``, PyTorch's own way); CUDA
is initialized and, before the first allocation, recording starts. A program that stops earlier was
not changed.

A bundle is also written at SIGTERM or SIGHUP, after which the program dies of the signal as it
would have. Python's handlers run between two instructions of the main thread. A program that hangs
in a collective or a synchronization never gets there, although without us the signal would have
ended it: so a thread that the signal wakes directly does the same after a moment. SIGINT needs
nothing here: Python turns it into a KeyboardInterrupt, which is seen at exit. SIGUSR1 and others
are left alone: faulthandler and schedulers use them in ways that Python cannot see.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from typing import Any

from .history_recorder import Recorder
from .on_request import GRACE_S, OnRequest
from .record_options import Options

NAMES = ("SIGTERM", "SIGHUP")
"""Schedulers and kill send the first; a terminal that goes away (such as SSH) sends the second."""


class OnTerm:
    """Calls ``act`` once with the name of a signal, then lets the signal take its default effect.

    While ``is_busy`` (a bundle is being written), it waits: ``resume`` must be called after that.
    It steps back from each signal for which the program has its own handler or which it ignores,
    as under nohup, and hides from programs that ask whether there is a handler.
    ``on_others`` is called, in a thread, with the numbers of all signals that come.
    """

    def __init__(
        self,
        act: Callable[[str], None],
        is_busy: Callable[[], bool],
        on_others: Callable[[bytes], None] = lambda numbers: None,  # noqa: ARG005
    ) -> None:
        self._act = act
        self._is_busy = is_busy
        self._on_others = on_others
        self._deferred = 0  # number of the signal waiting for a bundle
        self._pid = os.getpid()
        self._begun = threading.Event()
        self._lock = threading.Lock()

    def install(self) -> bool:
        """Return whether the handler was installed: main thread, and a signal at its default."""
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

    def handle(self, number: int, _frame: Any) -> None:
        """Act and die; a forked child only dies."""
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
        """Start the thread that steps in if the main thread does not come back."""
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
            ours = [getattr(signal, name, 0) for name in NAMES]
            # Our handler appears as the default; other signals belong to the program.
            is_default = (n for n in ours if n in numbers and signal.getsignal(n) is signal.SIG_DFL)
            number = next(is_default, 0)
            if number and not self._begun.wait(GRACE_S):
                self._act_once(number)
                _die(number)
            self._on_others(numbers)

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


def arm(options: Options) -> None:
    """Wait for the program to import torch."""
    note(options, "started", sys.executable or "")
    if "torch" in sys.modules:
        _on_torch(options, sys.modules["torch"])
    else:
        missing = functools.partial(note, options, "missing", sys.executable or "")
        sys.meta_path.insert(0, _Finder(lambda torch: _on_torch(options, torch), missing))


def note(options: Options, word: str, detail: str = "") -> None:
    """Append a line to the status file, for the sentence that ``fragdoctor run`` ends with."""
    if not options.status:
        return
    line = f"{os.getpid()}\t{word}\t{' '.join(detail.split())[:500]}\n"
    with contextlib.suppress(OSError):
        descriptor = os.open(options.status, os.O_WRONLY | os.O_APPEND)
        try:
            os.write(descriptor, line.encode("utf-8", "replace"))
        finally:
            os.close(descriptor)


class _Finder:
    """Finds nothing itself; calls ``done`` once torch has been imported, and goes away.

    If there is no torch, ``missing`` is called instead. It stays while torch is only looked for:
    transformers and vLLM call ``importlib.util.find_spec("torch")`` before they import it.
    """

    def __init__(self, done: Callable[[Any], None], missing: Callable[[], None]) -> None:
        self._done = done
        self._missing = missing

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the other finders' spec for torch, with a call added to its loader."""
        if name != "torch":
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None) if finder is not self else None
            spec: ModuleSpec | None = find(name, path, target) if find is not None else None
            if spec is not None:
                self._extend(spec.loader)
                return spec
        self._missing()
        return None

    def _extend(self, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: Any) -> None:
            with contextlib.suppress(AttributeError, ValueError):
                del loader.exec_module  # the loader is as it was
                sys.meta_path.remove(self)
            execute(module)
            with contextlib.suppress(Exception):
                self._done(module)

        with contextlib.suppress(AttributeError, TypeError):  # a loader that cannot be extended
            loader.exec_module = exec_module


def _on_torch(options: Options, torch: Any) -> None:
    cuda = getattr(getattr(torch, "version", None), "cuda", None)
    hip = getattr(getattr(torch, "version", None), "hip", None)
    note(options, "torch", f"{torch.__version__} {cuda or hip or '-'}")
    if cuda or hip:
        torch.cuda._lazy_call(lambda: _on_cuda(options, torch))


def _on_cuda(options: Options, torch: Any) -> None:
    """Start recording. An exception here would reach the program, so none may escape."""
    try:
        recorder = Recorder(options, torch)
        recorder.start()
        note(options, "cuda")

        def reported(call: Callable[..., None]) -> Callable[..., None]:
            def act(*args: Any) -> None:
                call(*args)
                report(options, recorder)

            return act

        def ended() -> None:
            recorder.on_exit(getattr(sys, "last_exc", None) or getattr(sys, "last_value", None))

        at_exit = reported(ended)
        atexit.register(at_exit)
        if "multiprocessing.util" in sys.modules:
            # Forked children end by os._exit, which runs only multiprocessing's finalizers.
            finalize = sys.modules["multiprocessing.util"].Finalize
            _quietly(finalize, None, at_exit, exitpriority=100)
        on_request = OnRequest(reported(recorder.on_request))
        on_term = OnTerm(
            reported(lambda name: recorder.on_exit(signal_name=name)),
            lambda: recorder.is_writing,
            on_request.step_in,
        )
        recorder.on_idle = on_term.resume
        _quietly(on_request.install)
        _quietly(on_term.install)
    except Exception as e:  # see above
        note(options, "problem", f"{type(e).__name__}: {e}")


def report(options: Options, recorder: Recorder) -> None:
    """Report to the parent what went wrong, if anything did."""
    if os.getpid() == recorder.pid:
        if recorder.left_nothing:
            note(options, "unused")
        for problem in recorder.problems:
            note(options, "problem", problem)
        recorder.problems.clear()


def _quietly(call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    with contextlib.suppress(Exception):
        call(*args, **kwargs)
