"""``fragdoctor explain``: the rules and terms of the reports, offline."""

from __future__ import annotations

from fragdoctor.cli import console, options
from fragdoctor.cli.exit import OK
from fragdoctor.report.base import DocumentFormat, render


@options.taken
class ExplainOptions:
    """What to explain."""

    words: list[str] | None = options.argument(
        "[CODE|TERM]",
        "A rule such as FD101, or a word such as stranded; without it, list all of them",
        default=None,
    )
    output_format: DocumentFormat = options.FORMAT
    no_color: bool = options.NO_COLOR


def explain(asked: ExplainOptions) -> int:
    """Print the lists of rules and terms, or the text of one of them."""
    from fragdoctor.report.views.explain import find

    found, look = find(" ".join(asked.words or ()) or None), console.look_of(asked)
    console.write_report(render("explain", asked.output_format, found, look), None)
    return OK
