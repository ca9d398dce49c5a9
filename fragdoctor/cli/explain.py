"""``fragdoctor explain``: the rules and the words of the reports, offline."""

from __future__ import annotations

from typing import Annotated

import typer

from fragdoctor.cli import console, options
from fragdoctor.cli.exit import OK

Word = Annotated[
    str | None,
    typer.Argument(
        metavar="[CODE|TERM]",
        help="A rule such as FD101, or a word such as stranded; without it, list all of them",
    ),
]


def explain(
    word: Word = None,
    output_format: options.DocumentFormats = options.DocumentFormat.TEXT,
    no_color: options.NoColor = False,
) -> int:
    """Print the lists of rules and terms, or the text of one."""
    look = console.render_options(no_color=no_color)

    from fragdoctor.report.base import render
    from fragdoctor.report.views.explain import find

    console.write_report(render("explain", output_format.value, find(word), look), None)
    return OK
