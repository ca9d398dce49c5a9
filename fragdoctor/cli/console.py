"""The destination and look of output: terminal or pipe, color, width, files."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from io import BufferedWriter
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Self, TextIO

from fragdoctor.errors import ConfigError
from fragdoctor.model.hooks import watched_by
from fragdoctor.opening import open_writable
from fragdoctor.report.base import RenderOptions, Verbosity, render

if TYPE_CHECKING:
    from fragdoctor.cli.options import ReportOutput

PIPE_WIDTH: Final = 80
_PROGRESS_AFTER_S: Final = 0.3
_PROGRESS_EVERY_S: Final = 0.1
_PROGRESS_AT_LEAST_EVERY_S: Final = 0.4
_LINKING_PROGRAMS: Final = ("iTerm.app", "WezTerm", "ghostty", "Hyper", "Tabby")
_LINKING_TERMINALS: Final = ("xterm-kitty", "xterm-ghostty", "alacritty", "foot", "wezterm")
_LINKING_VTE: Final = 5000  # for GNOME Terminal and others; earlier versions crash on links
_MAX_COUNTED: Final = 10_000  # above this, a percentage says more than a count


def prepare_streams() -> None:
    """Make printing safe: write out characters that the encoding lacks instead of raising."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            with contextlib.suppress(ValueError, OSError):
                reconfigure(errors="backslashreplace")


def look_of(asked: object, *, on_stderr: bool = False) -> RenderOptions:
    """Return the look of a report on standard output, on standard error or in a file.

    ``asked`` has the options of a command; an option that the command does not have is unset.

    Raises:
        ConfigError: both quiet and verbose were asked for, or a part of ``path_map`` is not
            ``RECORDED=HERE``.
    """
    to_file = not on_stderr and not is_printed(getattr(asked, "output", None))
    quiet, verbose = getattr(asked, "quiet", False), getattr(asked, "verbose", False)
    if quiet and verbose:
        raise ConfigError("--quiet and --full exclude each other.", hint="Give one of them.")
    # Only the terminal is quiet: a requested file holds the whole report.
    short = Verbosity.QUIET if quiet and not to_file else Verbosity.NORMAL
    stream = sys.stderr if on_stderr else sys.stdout
    is_terminal = not to_file and _is_terminal(stream)
    root = ""
    with contextlib.suppress(OSError):  # the directory was deleted
        root = str(Path.cwd())
    encoding = (getattr(stream, "encoding", "") or "").lower().replace("_", "-")
    return RenderOptions(
        width=_width(is_terminal=is_terminal),
        color=not (to_file or getattr(asked, "no_color", False)) and wants_color(stream),
        unicode=is_terminal and encoding in ("utf-8", "utf8") and os.environ.get("TERM") != "dumb",
        verbosity=Verbosity.FULL if verbose else short,
        source_root=root,
        path_map=tuple(_mapped(text) for text in getattr(asked, "path_map", None) or ()),
        link=_line_link() if is_terminal and not os.environ.get("CI") else "",
    )


def is_printed(output: Path | None) -> bool:
    """Return whether output goes to standard output, not to a file."""
    return output is None or str(output) == "-"


def _line_link() -> str:
    """Return the link target for source lines (OSC 8), or "" if the terminal may lack links."""
    environ = os.environ
    if environ.get("TERM_PROGRAM") == "vscode":
        return "vscode://file{path}:{line}"
    vte = environ.get("VTE_VERSION", "")
    known = (
        environ.get("TERM_PROGRAM") in _LINKING_PROGRAMS
        or environ.get("TERM") in _LINKING_TERMINALS
        or (vte.isdecimal() and int(vte) >= _LINKING_VTE)
        or any(environ.get(name) for name in ("WT_SESSION", "KONSOLE_VERSION", "FORCE_HYPERLINK"))
    )
    return "file://{path}#{line}" if known else ""


def _mapped(text: str) -> tuple[str, str]:
    recorded, equals, here = text.partition("=")
    if not recorded or not equals or not here:
        raise ConfigError(
            f"{text!r} is not RECORDED=HERE.", hint="Write for example --path-map /workspace=."
        )
    return recorded.replace("\\", "/"), here


def wants_color(stream: TextIO) -> bool:
    """Return whether to use color: NO_COLOR forbids it, FORCE_COLOR forces it, else a terminal."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR", "0") != "0":
        return True
    return _is_terminal(stream) and os.environ.get("TERM") != "dumb"


def is_step_summary(output: Path) -> bool:
    """Return whether a file is GitHub's summary of the running step, to which reports are added."""
    return str(output) == os.environ.get("GITHUB_STEP_SUMMARY", "")


def write_report(text: str, output: Path | None, *, force: bool = False) -> None:
    """Write the report to standard output, or atomically to a file; add it to a step's summary.

    Raises:
        ConfigError: the file exists and ``force`` is not given, or it cannot be written.
    """
    if output is None or is_printed(output):
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    if is_step_summary(output):
        with output.open("a", encoding="utf-8") as summary:
            summary.write(text)
        return
    try:
        with binary_output(output, force=force) as file:
            file.write(text.encode())
    except OSError as e:
        raise ConfigError(
            f"The report cannot be written to {output}: {e.strerror or e}.",
            hint="Choose another place with -o.",
        ) from e


def prepared(asked: ReportOutput, inputs: Sequence[str] = ()) -> RenderOptions:
    """Return the look of a report, having checked before any work that it can be written.

    ``inputs`` are files that must not be overwritten.

    Raises:
        ConfigError: as for ``look_of`` and ``check_output``.
    """
    look = look_of(asked)
    check_output(asked.output, force=asked.force, inputs=inputs)
    return look


def give(asked: Any, view: str, result: Any, look: RenderOptions, **more: Any) -> None:
    """Write the report on a result in the format and to the place that were asked for.

    ``view`` and ``more`` are those of ``report.base.render``.

    Raises:
        ConfigError: the file cannot be written.
    """
    text = render(view, asked.output_format, result, look, **more)
    write_report(text, asked.output, force=asked.force)


def check_output(output: Path | None, *, force: bool, inputs: Sequence[str] = ()) -> None:
    """Refuse early what ``write_report`` would refuse once the work is done.

    Raises:
        ConfigError: the file exists without ``force``, is an input, or is a directory.
    """
    if output is None or is_printed(output):
        return
    force = force or is_step_summary(output)
    if output.is_dir():
        raise ConfigError(f"{output} is a directory.", hint="Give -o a file name.")
    for name in inputs:
        with contextlib.suppress(OSError):
            if Path(name).samefile(output):
                raise ConfigError(
                    f"{output} is an input; it is not overwritten.", hint="Choose another name."
                )
    # A file, or a link to a file that does not exist yet.
    if (output.is_file() or (output.is_symlink() and not output.exists())) and not force:
        raise _exists(output)
    if not output.parent.is_dir():
        raise ConfigError(f"The directory {output.parent} does not exist.", hint="Create it first.")


def _exists(output: Path) -> ConfigError:
    return ConfigError(f"{output} exists.", hint="Add --force to overwrite it.")


@contextlib.contextmanager
def binary_output(output: Path | None, *, force: bool) -> Iterator[BinaryIO]:
    """Open standard output, or a file that is written beside its destination and then moved.

    A failed run leaves no partial file.

    Raises:
        ConfigError: the file exists and ``force`` is not given, or it cannot be written.
    """
    if output is None or is_printed(output):
        sys.stdout.flush()
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    check_output(output, force=force)
    if output.exists() and not output.is_file():
        with BufferedWriter(open_writable(output)) as device:
            yield device
        return
    target = output.resolve() if output.is_symlink() else output
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
        if force:
            with contextlib.suppress(FileNotFoundError):
                temporary.chmod(stat.S_IMODE(target.stat().st_mode))
            temporary.replace(target)
        else:
            _link(temporary, target)
    except FileExistsError as e:
        raise _exists(output) from e
    finally:
        temporary.unlink(missing_ok=True)


def _link(temporary: Path, target: Path) -> None:
    """Move without overwriting: another run may have created the file in the meantime."""
    try:
        os.link(temporary, target)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        if target.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from None
        temporary.replace(target)


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except ValueError:  # closed
        return False


def _width(*, is_terminal: bool) -> int:
    columns = os.environ.get("COLUMNS", "")
    if columns.isascii() and columns.isdigit() and int(columns[:6]) > 0:
        return int(columns[:6])
    return shutil.get_terminal_size((PIPE_WIDTH, 24)).columns if is_terminal else PIPE_WIDTH


class Progress:
    """One line on standard error, only on a terminal and only for work that takes a while.

    Inside the ``with`` block it shows reported progress (``model.hooks``), and refreshes the
    line by itself, so that a long pass over a long trace does not look like a hang.
    """

    def __init__(self, label: str) -> None:
        self._what, self._done, self._total = label, 0, 0
        self._label, self._of_file = label, ""
        self._start = time.monotonic()
        self._last = 0.0
        self._shown = False
        self._is_on = _is_terminal(sys.stderr) and not os.environ.get("CI")
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._inside = contextlib.ExitStack()

    def __enter__(self) -> Self:
        if self._is_on:
            self._inside.enter_context(watched_by(self.show))
            beat = threading.Thread(target=self._renew, name="progress", daemon=True)
            beat.start()
            self._inside.callback(beat.join)
            self._inside.callback(self._is_over.set)
        return self

    def __exit__(self, *_: object) -> None:
        self._inside.close()
        self.clear()

    def show(self, what: str, done: int, total: int) -> None:
        """Show the current task and its progress; cheap enough to call often."""
        if not self._is_on:
            return
        is_new = what != self._what
        self._what, self._done, self._total = what, done, total
        self._write(_PROGRESS_EVERY_S if done < total and not is_new else 0.0)

    def update(self, done: int, total: int) -> None:
        """Show the progress of this task; cheap enough to call often."""
        self.show(self._label, done, total)

    def _renew(self) -> None:
        while not self._is_over.wait(_PROGRESS_AT_LEAST_EVERY_S / 2):
            self._write(_PROGRESS_AT_LEAST_EVERY_S)

    def _write(self, every_s: float) -> None:
        """Write the line, unless it was written within this many seconds."""
        with self._lock:
            now = time.monotonic()
            if now - self._start < _PROGRESS_AFTER_S or now - self._last < every_s:
                return
            self._last, self._shown = now, True
            line = f"{self._of_file}{self._what}{self._amount()} ({now - self._start:.0f} s)"
            # A line that wraps could not be erased.
            room = max(10, shutil.get_terminal_size((PIPE_WIDTH, 24)).columns - 1)
            sys.stderr.write(f"\r{line[:room]}\x1b[K")
            sys.stderr.flush()

    def _amount(self) -> str:
        done, total = self._done, self._total
        if total > _MAX_COUNTED:
            return f" {min(100, 100 * done // total)}%"
        return f" {done} of {total}" if total else ""

    def clear(self) -> None:
        """Remove the line, so that only the report remains."""
        with self._lock:
            if self._shown:
                sys.stderr.write("\r\x1b[K")
                sys.stderr.flush()
                self._shown = False

    def each(self, items: Sequence[str]) -> Iterator[str]:
        """Yield the items; progress reported in the meantime is shown with the item's number."""
        for i, item in enumerate(items):
            self._of_file = f"File {i + 1} of {len(items)}: " if len(items) > 1 else ""
            self.update(i, len(items))
            yield item
        self._of_file = ""
        self.update(len(items), len(items))
