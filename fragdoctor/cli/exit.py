"""The only place where exceptions become sentences and exit codes.

0 done; 1 findings at or above ``--fail-on``; 2 usage, configuration or unreadable input; 3 input
refused as hostile or over a limit; 70 a bug in fragdoctor; 130 interrupted; 141 the reader of
the output is gone.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise, takewhile
from typing import Final, NoReturn

from fragdoctor.errors import FragdoctorError
from fragdoctor.lazy import regex
from fragdoctor.report import escape

OK: Final = 0
FINDINGS: Final = 1
USAGE: Final = 2
REFUSED: Final = 3
INTERNAL: Final = 70
INTERRUPTED: Final = 130
BROKEN_PIPE: Final = 141

_OS_SENTENCES: Final = (
    (FileNotFoundError, "{} does not exist.", "Check the path."),
    (PermissionError, "{} cannot be opened: permission denied.", "Check who owns it: ls -l"),
    (IsADirectoryError, "{} is a directory.", "Give a file."),
)

_NUMBERS: Final = (
    (regex("is not a valid int(?: range)?"), "is not a whole number"),
    (regex("is not a valid float(?: range)?"), "is not a number"),
)
_NO_VALUE: Final = regex(r"Invalid value for '(--[\w-]+)'.*?: '(--?[A-Za-z][\w-]*)' is not ")
"""The error if an option without its value takes the next option for the value."""

_SAID_SO: Final = {
    "--bf16": "Write --dtype bf16.",
    "--fp16": "Write --dtype fp16.",
    "--train": "Training is what is estimated without --inference.",
    "--vram": "A card of 24 GiB is --gpu 24GiB.",
    **dict.fromkeys(("--qlora", "--4bit", "--load-in-4bit"), "QLoRA is --lora 16 --dtype int4."),
}
"""What people write for an estimate -> the correct way to say it."""

HOW_TO_REPORT: Final = (
    "This is a bug in fragdoctor, not in your input. Report it with the lines above, the command, "
    "and the output of: fragdoctor --version"
)


def run(  # noqa: PLR0911 - one line for each way to end
    call: Callable[[Sequence[str]], int], argv: Sequence[str]
) -> int:
    """Return the exit code of ``call(argv)``; every failure becomes a sentence."""
    try:
        return _flushed(call(argv))
    except BrokenPipeError:
        return quiet_pipe()
    except KeyboardInterrupt:
        return _interrupted()
    except FragdoctorError as e:
        return _fail(argv, e.exit_code, e.code, e.sentence, e.hint, e.offset, plain=e.message)
    except OSError as e:
        if e.errno == errno.EPIPE:
            return quiet_pipe()
        code = _fail(argv, USAGE, "unreadable_input", *_os_sentence(e))
        _write_out("")
        return code
    except MemoryError:
        hint = "Analyze the file on a machine with more memory."
        return _fail(argv, USAGE, "out_of_host_memory", "This machine ran out of memory.", hint)
    except Exception as e:  # noqa: BLE001 - the one place; a bug is shown with its traceback
        import typer  # not before: a command line without options does not need it

        if isinstance(e, typer.Exit):
            return _flushed(e.exit_code)
        if isinstance(e, typer.Abort):
            return _interrupted()
        # typer has its own copy of click, older ones use the package: get the base through typer.
        is_usage = isinstance(e, typer.BadParameter.__mro__[2])
        return _usage(argv, e) if is_usage else _internal(argv, e)


def end(code: int) -> NoReturn:
    """End the process; Python would first take apart what it holds, for a fiftieth of the time."""
    atexit._run_exitfuncs()  # noqa: SLF001 - os._exit() leaves them out
    _write_out("")
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    os._exit(code)


def _interrupted() -> int:
    _say("Interrupted.")
    return INTERRUPTED


def wants_json(argv: Sequence[str]) -> bool:
    """Return whether the command line seems to ask for JSON, without parsing it."""
    own = list(takewhile(lambda word: word != "--", argv))
    return "--format=json" in own or ("--format", "json") in pairwise(own)


def _flushed(code: int) -> int:
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        return quiet_pipe()
    return code


def _fail(  # noqa: PLR0913, PLR0917 - the parts of one answer
    argv: Sequence[str],
    exit_code: int,
    code: str,
    message: str,
    hint: str = "",
    offset: int | None = None,
    *,
    plain: str = "",
) -> int:
    """Print one sentence and its hint on standard error, and on request JSON on standard output."""
    _say(f"Error: {message}", *filter(None, [hint]))
    if wants_json(argv):
        _print_error_document(code, plain or message, hint, offset)
    return exit_code


def _usage(argv: Sequence[str], error: Exception) -> int:
    """Print what is wrong with the command line, and how to get help."""
    message = getattr(error, "format_message", error.__str__)()
    for pattern, words in _NUMBERS:
        message = pattern.sub(words, message)
    if no_value := _NO_VALUE.match(message):
        message = f"{no_value[1]} needs a value: {no_value[2]} follows it."
    context = getattr(error, "ctx", None)
    kind = type(error).__name__
    if kind == "NoArgsIsHelpError" and context is not None:
        sys.stderr.write(f"{context.get_help()}\n")
        return USAGE
    command = "fragdoctor" if context is None else context.command_path
    hint = f"See: {command} --help"
    option = str(getattr(error, "option_name", None) or "")
    said = _SAID_SO.get(option, "") if argv[:1] == ["estimate"] else ""
    said = said or getattr(error, "said", "")
    if option and not said and argv[:1] == ["rehearse"] and "--" not in argv:
        hint = f"Options of the program come after two dashes: rehearse train.py -- {option}"
    return _fail(argv, USAGE, "bad_usage", message, f"{said} {hint}".strip())


def _os_sentence(error: OSError) -> tuple[str, str]:
    """Return (sentence, hint) for an error of the operating system."""
    name = str(error.filename) if error.filename is not None else ""
    reason = error.strerror or str(error)
    for kind, sentence, hint in _OS_SENTENCES:
        if isinstance(error, kind):
            return sentence.format(name), hint
    if error.errno == errno.ENOSPC:
        return "There is no space left on the device.", "Write elsewhere with -o."
    return (f"{name}: {reason}." if name else f"{reason}."), ""


def _internal(argv: Sequence[str], error: Exception) -> int:
    import traceback  # for bugs only

    # A traceback's messages can quote input, so escape each line; its line breaks are kept.
    _say(*"".join(traceback.format_exception(error)).splitlines(), HOW_TO_REPORT)
    if wants_json(argv):
        message = f"{type(error).__name__}: {error}"
        _print_error_document("internal_error", message, HOW_TO_REPORT, None)
    return INTERNAL


def _print_error_document(code: str, message: str, hint: str, offset: int | None) -> None:
    from fragdoctor.report.json import dumps, error_document

    _write_out(dumps(error_document(code, message, hint, offset)))


def _write_out(text: str) -> None:
    """Write as much as possible to standard output; the rest is not retried when Python exits."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except (OSError, ValueError):
        quiet_pipe()


def say(*lines: str) -> None:
    """Write lines to standard error, made safe for a terminal."""
    sys.stderr.write("".join(f"{escape.terminal(line)}\n" for line in lines))
    sys.stderr.flush()


def _say(*lines: str) -> None:
    with contextlib.suppress(OSError):
        say(*lines)


def quiet_pipe() -> int:
    """Return the exit code for a reader that is gone, and keep the interpreter quiet."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
    return BROKEN_PIPE
