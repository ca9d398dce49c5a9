"""The entry point: ``fragdoctor`` on the command line.

This module is light on purpose. The front page and the version are printed without loading typer,
rich or numpy; a command loads what it needs.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Collection, Sequence
from itertools import takewhile
from typing import Final

from fragdoctor.cli.front_page import COMMANDS, FRONT_PAGE

COMPLETION: Final = "_FRAGDOCTOR_COMPLETE"
"""The environment variable through which typer's shell completion makes its requests."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit."""
    words = sys.argv[1:] if argv is None else list(argv)
    _open_closed_streams()
    if words[:1] in (["--help"], ["-h"]):
        sys.exit(_print(FRONT_PAGE))
    if words[:1] in (["--version"], ["-V"], ["version"]):
        from fragdoctor import __version__

        sys.exit(_print(f"fragdoctor {__version__}\n"))
    if words[:1] != ["run"]:  # a program under ``run`` must see its environment unchanged
        # numpy would start a thread per core for linear algebra, which we do not use.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    gc.disable()  # nothing becomes garbage while modules load; collecting would cost a tenth
    try:
        from fragdoctor.cli import exit as exit_codes
        from fragdoctor.cli.console import prepare_streams
    except KeyboardInterrupt:  # exit_codes.run() says so from here on
        sys.stderr.write("Interrupted.\n")
        sys.exit(130)
    except ModuleNotFoundError as e:
        if (e.name or "fragdoctor").startswith("fragdoctor"):
            raise
        sys.exit(_missing(str(e.name)))

    prepare_streams()
    code = exit_codes.run(invoke, words)
    if argv is None:
        exit_codes.end(code)
    sys.exit(code)


def invoke(argv: Sequence[str]) -> int:
    """Parse a command line and run its command; return the exit code or raise an error."""
    # The command goes on loading data, and columns are not garbage: collect rarely.
    gc.set_threshold(100_000, 50, 50)
    gc.enable()
    names = [command.name for command in COMMANDS]
    words = with_command(argv, names)
    if _needs_no_parser(words):
        from fragdoctor.cli.analyze import AnalyzeOptions, analyze

        return analyze(AnalyzeOptions(paths=words[1:]))
    from fragdoctor.cli.commands import group_of
    from fragdoctor.cli.configuration import configure

    asks_what_follows = COMPLETION in os.environ
    wanted = words[:1] if {*words[:1]} & {*names} and not asks_what_follows else names
    command = configure(group_of(wanted))
    if asks_what_follows:  # the shell asks for completions
        command.main([], "fragdoctor")
    with command.make_context("fragdoctor", words) as context:
        code = command.invoke(context)
    return code if isinstance(code, int) else 0


def _needs_no_parser(words: Sequence[str]) -> bool:
    """Return whether files are to be analyzed with all options at their defaults.

    To load typer and build its commands takes an eighth of the time for a short recording.
    """
    if words[:1] != ["analyze"] or not words[1:] or COMPLETION in os.environ:
        return False
    from fragdoctor.cli.configuration import nothing_is_set

    return not any(word.startswith("-") for word in words) and nothing_is_set()


def with_command(  # noqa: PLR0911 - one return for each way to begin
    words: Sequence[str], commands: Collection[str]
) -> list[str]:
    """Return the command line, adding the command if it starts with an input or with text."""
    first = words[0] if words else ""
    if first in commands:
        return list(words)
    if first == "help":
        return [*words[1:], "--help"]
    spoken = " ".join(words)
    parts = list(takewhile(lambda word: not word.startswith("-"), words))
    whole = " ".join(parts)
    if len(parts) > 1 and os.path.lexists(whole) and not os.path.lexists(first):  # nobody quoted it
        return ["analyze", whole, *words[len(parts) :]]
    if len(words) > 1 and not any(w.startswith("-") or _may_be_file(w) for w in words):
        if _is_question(spoken):  # that nobody quoted
            return ["estimate", spoken]
    elif kind := _kind_of_text(first):
        return [kind, *words]
    is_option = first.startswith("-") and first != "-"
    names = words[1:] if is_option else words[:1]
    may_be_path = not is_option and (first == "-" or bool(set(first) & set("./*?")))
    if may_be_path or any(map(os.path.lexists, names)):
        return ["analyze", *words]
    return list(words)


def _kind_of_text(word: str) -> str:
    """Return the command for a word that is text: a pasted message, or a question about a model."""
    if len(word.split()) < 2 or os.path.exists(word):  # noqa: PTH110 - never raises
        return ""
    from fragdoctor.inputs.messages import find_messages
    from fragdoctor.opening import is_text

    told = [m for m in find_messages(word).messages if m.kind != "negative"]
    is_asked = word.rstrip().endswith("?") and all(m.requested_bytes is None for m in told)
    if told and not is_asked:
        return "oom"
    if _is_question(word):
        return "estimate"
    return "oom" if is_text(word) else ""


def _is_question(text: str) -> bool:
    """Return whether a text of several words asks something, rather than naming a file."""
    return len(text.split()) > 3 and (text.rstrip().endswith("?") or not _may_be_file(text))


def _may_be_file(word: str) -> bool:
    """Return whether a word is the name of a file, or looks like one: it ends as names do."""
    suffix = os.path.splitext(word)[1]  # noqa: PTH122 - pathlib is slow to load
    return suffix[1:2].isalpha() or os.path.lexists(word)


def _missing(name: str) -> int:
    """Name a package that is missing because fragdoctor runs from sources, not installed."""
    folder = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # noqa: PTH100, PTH120 - pathlib is slow to load
    sys.stderr.write(
        f"Error: {name}, which fragdoctor needs, is not installed for this Python.\n"
        f"Run: {sys.executable} -m pip install {folder}\n"
    )
    return 2


def _print(text: str) -> int:
    def write(_argv: Sequence[str]) -> int:
        sys.stdout.write(text)
        sys.stdout.flush()
        return 0

    try:
        return write(())
    except OSError:
        from fragdoctor.cli.exit import run

        return run(write, ())  # which fails again, and says why


def _open_closed_streams() -> None:
    """Replace streams that the caller closed (``>&-``), which Python sets to None."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: PTH123, SIM115 - lives as long as the process
