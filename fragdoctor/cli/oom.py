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
    look = console.look_of(asked)
    words = asked.text or []
    console.check_output(asked.output, force=asked.force, inputs=words)
    if not words and sys.stdin.isatty():
        sys.stderr.write("Paste the message, then end with Ctrl-D on a line of its own:\n")
        sys.stderr.flush()

    from fragdoctor.inputs.cases import read_messages
    from fragdoctor.report.base import render

    case = read_messages(words, asked.overrides())

    from fragdoctor.diagnosis.pipeline import diagnose

    with console.Progress("Diagnosing"):
        diagnosis = diagnose(case)
    report = render("oom", asked.output_format.value, diagnosis, look)
    console.write_report(report, asked.output, force=asked.force)
    return asked.exit_code(diagnosis.findings)
