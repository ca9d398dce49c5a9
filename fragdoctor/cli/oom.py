"""``fragdoctor oom``: diagnose a message or a log, pasted, piped or read from a file."""

from __future__ import annotations

import sys

from fragdoctor.cli import console, options


@options.taken
class OomOptions(options.DiagnosisOptions):
    """Options of the command."""

    text: list[str] | None = options.argument(
        "[TEXT|FILE|-]",
        "The message itself, a file that holds it, or - for standard input",
        default=None,
        show_default=False,
    )


def oom(asked: OomOptions) -> int:
    """Diagnose the first cause in the text, and print the report."""
    words = asked.text or []
    look = console.prepared(asked, words)
    if not words and sys.stdin.isatty():
        sys.stderr.write("Paste the message, then end with Ctrl-D on a line of its own:\n")
        sys.stderr.flush()

    from fragdoctor.inputs.cases import read_messages

    case = read_messages(words, asked.overrides())

    from fragdoctor.diagnosis.pipeline import diagnose

    with console.Progress("Diagnosing"):
        diagnosis = diagnose(case)
    console.give(asked, "oom", diagnosis, look)
    return asked.exit_code(diagnosis.findings)
