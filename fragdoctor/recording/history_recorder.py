"""The recorder of one process: history on, failures seen, bundles written at the right moments."""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from typing import Any, NamedTuple

from . import bundle_writer
from .census import without_collector
from .census_log import CensusLog, can_take
from .facts import device_facts, masked, program_facts, used_devices
from .module_names import ModuleNames
from .module_paths import ModulePaths
from .record_options import Options, Pace, find_ranks
from .source_lines import passed_through, user_lines, write_sources
from .step_marks import StepMarks

_MESSAGE_CHARACTERS = 64 * 1024
_PATIENCE_S = 60.0
_MOST_WAITING = 64
_MOST_LINES = 64


class _Waiting(NamedTuple):
    """A failure whose message is still to come: the exception is made after the observer ran.

    ``bundle`` is None if this recorder wrote none; ``is_reported`` tells whether any recorder did.
    """

    device: int
    bundle: str | None
    is_reported: bool
    thread: int


class Recorder:
    """Records one process and writes its bundles.

    Every method that the program's own events call catches errors and notes them; only ``start``
    and ``write`` raise.

    Args:
        options: how to record.
        torch: the program's own.
        name: name of every bundle; "" means named after what happened and the process ID.

    Attributes:
        bundles: paths of the bundles written so far.
        problems: what went wrong, for people.
        n_ooms: failures seen; n_skipped: those that left no bundle.
        on_idle: called after each bundle.
        left_nothing: the program ended without ever having reserved memory on a GPU.
    """

    def __init__(self, options: Options, torch: Any, name: str = "") -> None:
        self.options = options
        self.name = name
        self.torch = torch
        self.pid = os.getpid()
        self.bundles: list[str] = []
        self.problems: list[str] = []
        self.n_ooms = 0
        self.n_skipped = 0
        self.left_nothing = False
        self.is_on = False
        self.owns_history = False
        self._pace = Pace()
        self._waiting: list[_Waiting] = []
        self._last_oom = ""
        self._stopping = contextlib.ExitStack()
        self._step_marks: StepMarks | None = None
        self._census: CensusLog | None = None
        self._user_lines: dict[str, set[int]] = {}
        self.on_idle: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._started = time.time()

    def start(self) -> None:
        """Start the history, unless the program records already, and watch for failures."""
        self.pid = os.getpid()
        self.is_on = True
        record = self.torch.cuda.memory._record_memory_history
        # Otherwise only this thread's ranges are noted; a program may train in another one.
        annotates = "global_record_annotations"
        marks_itself = annotates in inspect.signature(record).parameters
        is_recording = getattr(self.torch._C, "_cuda_isHistoryEnabled", bool)
        if not is_recording():
            record(
                enabled="all",
                context="all",
                stacks=self.options.stacks,
                max_entries=self.options.max_entries,
                **({annotates: True} if marks_itself else {}),
            )
            self._stopping.callback(record, enabled=None)
            self.owns_history = True
        if not marks_itself:
            self._step_marks = StepMarks(self.torch, self.options.max_entries)
            self._stopping.callback(self._step_marks.remove)
        paths: ModulePaths | None = None
        if self.options.module_paths:
            with self._noted():
                paths = ModulePaths(self.torch)
                self._stopping.callback(paths.remove)
        self._census = self._new_census(None if paths is None else paths.names)
        if self._census is not None:
            self._stopping.callback(self._census.stop)
            self._census.begin()
        _observe(self)

    def stop(self) -> None:
        """Stop watching, and stop the history if it was started here."""
        self.is_on = False
        _watchers[:] = [w for w in _watchers if w is not self]
        self._stopping.close()
        self.owns_history = False
        self._census = self._step_marks = None

    def on_oom(
        self, device: int, asked: int, total: int, free: int, *, writes: bool = True
    ) -> None:
        """Write a bundle of the very moment; called by PyTorch before it raises.

        ``writes`` is False if another recorder of this process writes it.
        """
        if not self.is_on or os.getpid() != self.pid:
            return
        self.n_ooms += 1
        bundle = self._write_oom(device, asked, total, free) if writes else None
        is_reported = bundle is not None or not writes
        waiting = _Waiting(device, bundle, is_reported, threading.get_ident())
        self._waiting = [*self._waiting[1 - _MOST_WAITING :], waiting]

    def _write_oom(self, device: int, asked: int, total: int, free: int) -> str | None:
        """Return the bundle of a failure, or None if it is one too many or cannot be written."""
        if self.is_writing or not self._pace.allows(time.monotonic()):
            self.n_skipped += 1
            return None
        oom = {
            "device": device,
            "asked_bytes": asked,
            "limit_or_total_bytes": total,
            "free_bytes": free,
            "thread": threading.current_thread().name,
        }
        with self._noted(), self._writing():
            return self._write(f"oom{self.n_ooms}", "oom", oom=oom)
        return None

    def on_message(self, text: str) -> None:
        """Add PyTorch's own words to the bundle that they are about."""
        if not self._waiting or os.getpid() != self.pid:
            return
        with self._noted():
            waiting = self._take(text)
            self._last_oom = text if waiting.is_reported else ""
            if waiting.bundle is not None:
                bundle_writer.add_part(waiting.bundle, bundle_writer.MESSAGE, _shown(text))

    def on_exit(self, error: BaseException | None = None, signal_name: str = "") -> None:
        """Write the state at the end, unless the failure that ended the program is recorded."""
        if not self.is_on or os.getpid() != self.pid:
            return
        if isinstance(error, KeyboardInterrupt):
            signal_name = "SIGINT"
        try:
            with self._noted():
                is_reported = self._is_reported(error)
                self._finish(error if is_reported else None)
                is_used = bool(self.n_ooms or used_devices(self.torch))
                self.left_nothing = not (is_reported or is_used)
                if is_used and not is_reported:
                    reason, name = "signal" if signal_name else "exit", signal_name or None
                    with self._writing():
                        self._write(signal_name.lower() or "exit", reason, error, signal=name)
        finally:
            self.is_on = False

    def on_request(self) -> None:
        """Write the current state because another process asks for it."""
        with self._noted(), self._writing():
            self._write("attach", "request")

    def on_block_end(self, error: BaseException | None, *, at_end: bool) -> None:
        """Write the state at the end of a block if asked to, and stop."""
        with self._noted():
            if os.getpid() == self.pid:
                is_reported = self._is_reported(error)
                self._finish(error if is_reported else None)
                if at_end and not is_reported and used_devices(self.torch):
                    with self._writing():
                        self._write("block", "block", error)
        with self._noted():
            self.stop()

    @property
    def is_writing(self) -> bool:
        """Whether a bundle is being written, by any thread."""
        return self._lock.locked()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Let one thread write at a time; then do what had to wait for it (``on_idle``)."""
        if not self._lock.acquire(timeout=_PATIENCE_S):
            raise TimeoutError("another bundle is still being written")
        try:
            yield
        finally:
            self._lock.release()
            self.on_idle()

    def _is_reported(self, error: BaseException | None) -> bool:
        """Return whether an error is the last failure, which already has a bundle."""
        return error is not None and bool(self._last_oom) and str(error) == self._last_oom

    def _finish(self, ended_by: BaseException | None) -> None:
        """Complete the last bundle with what is known only now, such as that it was the end."""
        if not self.bundles:
            return
        changes: dict[str, Any] = {"n_ooms": self.n_ooms, "n_skipped": self.n_skipped}
        if ended_by is not None:
            changes |= {"ended_program": True, "traceback": _lines_of(ended_by)}
        with self._noted():  # it may have been moved: what is yet to be written matters more
            bundle_writer.update_manifest(self.bundles[-1], **changes)

    def _write(
        self, name: str, reason: str, error: BaseException | None = None, **fields: Any
    ) -> str:
        failed = fields.get("oom", {}).get("device")
        devices = sorted({*used_devices(self.torch), *([failed] if failed is not None else ())})
        ranks = find_ranks()
        parts: dict[str, Callable[[str], None]] = {}
        census = self._census or self._new_census()
        if census is not None:  # first: the next parts make objects of their own
            parts[bundle_writer.CENSUS] = census.write
        parts[bundle_writer.SNAPSHOT] = self._dump
        parts[bundle_writer.STATS] = lambda path: bundle_writer.write_json(
            path, {str(d): dict(self.torch.cuda.memory_stats(d)) for d in devices}
        )
        if self.options.sources:
            parts[bundle_writer.SOURCES] = lambda path: write_sources(
                path, self._user_lines, self._started
            )
        if error is not None and is_about_memory(error):
            parts[bundle_writer.MESSAGE] = lambda path: bundle_writer.write_text(
                path, _shown(str(error))
            )
        prefix = "" if ranks.rank is None else f"rank{ranks.rank}-"
        with without_collector():  # of the million dicts of a snapshot
            bundle = bundle_writer.write_bundle(
                self.options.directory,
                prefix + (self.name or f"{name}-pid{self.pid}"),
                {
                    **self._manifest(reason, devices),
                    **ranks._asdict(),
                    **({} if error is None else {"exception": _described(error)}),
                    **fields,
                },
                parts,
            )
        if reason != "request":  # facts that come later concern the program's own end
            self.bundles.append(bundle)
        return bundle

    def _new_census(self, modules: ModuleNames | None = None) -> CensusLog | None:
        is_taken = self.options.census and can_take(self.torch)
        return CensusLog(self.torch, modules) if is_taken else None

    def _manifest(self, reason: str, devices: list[int]) -> dict[str, Any]:
        facts, driver = device_facts(self.torch, devices)
        program = program_facts(self.torch)
        program["versions"]["driver"] = driver
        return {
            "format": bundle_writer.FORMAT,
            "version": bundle_writer.VERSION,
            "reason": reason,
            "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
            **program,
            "command": masked(self.options.command),
            "devices": facts,
            "n_ooms": self.n_ooms,
            "n_skipped": self.n_skipped,
            "max_entries": self.options.max_entries if self.owns_history else None,
            "stacks": self.options.stacks if self.owns_history else None,
            "problems": list(self.problems),
        }

    def _dump(self, path: str) -> None:
        memory = self.torch.cuda.memory
        self._user_lines = {}  # none from an earlier bundle, in case this one fails
        seen: list[Any] = []

        def completed(snapshot: Any) -> Any:
            seen.append(snapshot)
            if self._step_marks is None:
                return snapshot
            return {**snapshot, "external_annotations": list(self._step_marks.marks)}

        with _without_inductor(self.torch), passed_through(memory, completed):
            memory._dump_snapshot(path)
        if seen and self.options.sources:  # after the snapshot is safe on disk
            self._user_lines = user_lines(seen[-1])

    def _take(self, text: str) -> _Waiting:
        """Take out the bundle that a message is about: same thread, else same device, else last.

        The thread differs if autograd failed in its own thread. Earlier failures in that thread
        have no message to come: PyTorch caught them, as cuDNN's search for workspaces does.
        """
        me = threading.get_ident()
        same = [w for w in self._waiting if w.thread == me]
        same = same or [w for w in self._waiting if f"GPU {w.device} " in text] or self._waiting
        found = same[-1]
        self._waiting = [w for w in self._waiting if w.thread != found.thread]
        return found

    @contextlib.contextmanager
    def _noted(self) -> Iterator[None]:
        """Note what goes wrong in a block: the program must see only what it does itself."""
        try:
            yield
        except Exception as e:
            self.problems.append(f"{type(e).__name__}: {e}"[:500])


_watchers: list[Recorder] = []
_observed: list[Any] = []


def _observe(recorder: Recorder) -> None:
    """Attach the observer, once per process: PyTorch has no way to remove it."""
    _watchers.append(recorder)
    torch = recorder.torch
    if any(seen is torch for seen in _observed):
        return
    _observed.append(torch)
    torch._C._cuda_attach_out_of_memory_observer(_on_oom)
    with contextlib.suppress(Exception):  # without it, bundles just lack the text
        _listen(torch.cuda.OutOfMemoryError)


def _on_oom(device: int, asked: int, total: int, free: int) -> None:
    """Notify every recorder; if they are nested, the innermost one writes."""
    recorders = tuple(_watchers)
    for recorder in recorders:
        recorder.on_oom(device, asked, total, free, writes=recorder is recorders[-1])


def is_about_memory(error: BaseException) -> bool:
    """Return whether an exception is about memory, PyTorch's allocator or another one's."""
    text = str(error).lower()
    return any(word in text for word in ("out of memory", "alloc_failed", "not enough memory"))


def _shown(text: str) -> str:
    return f"{text[:_MESSAGE_CHARACTERS]}\n"


def _described(error: BaseException) -> dict[str, str]:
    kind = type(error)
    name = f"{kind.__module__}.{kind.__qualname__}"
    return {"type": name, "text": str(error)[:_MESSAGE_CHARACTERS]}


def _lines_of(error: BaseException) -> list[tuple[str, int, str]]:
    """Return the lines that an exception went through, innermost first.

    The observer of a failure sees none where the autograd engine asked for the memory.
    """
    lines, at = [], error.__traceback__
    while at is not None:
        code = at.tb_frame.f_code
        lines.append((code.co_filename, at.tb_lineno, code.co_name))
        at = at.tb_next
    return lines[-_MOST_LINES:][::-1]


def _listen(kind: Any) -> None:
    """Listen for the text of each failure: the observer has none, and programs may swallow it."""
    initialise = kind.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - it is one
        initialise(self, *args, **kwargs)
        if args and isinstance(args[0], str):
            for recorder in tuple(_watchers):
                recorder.on_message(args[0])

    kind.__init__ = __init__


@contextlib.contextmanager
def _without_inductor(torch: Any) -> Iterator[None]:
    """Keep PyTorch from importing its compiler while it names the frames of a snapshot.

    It asks for ``torch._inductor`` to look up generated code, and asking imports it: this takes
    seconds, in the middle of the program's failure. If it is not loaded, no code was generated.
    """
    if "torch._inductor" in sys.modules or "_inductor" in vars(torch):
        yield
        return
    empty = types.ModuleType("torch._inductor")
    torch._inductor = empty
    try:
        yield
    finally:
        if vars(torch).get("_inductor") is empty:
            del torch._inductor
