"""``fragdoctor explain``: the rules and their documentation, offline."""

from __future__ import annotations

from typing import Annotated

import typer

from fragdoctor.cli import console, options
from fragdoctor.cli.exit import OK

Code = Annotated[
    str | None,
    typer.Argument(metavar="[CODE]", help="A rule such as FD101; without it, list all rules"),
]


def explain(code: Code = None, no_color: options.NoColor = False) -> int:
    """Print the list of rules, or the documentation of one."""
    look = console.render_options(no_color=no_color)

    from fragdoctor.report.text.explain import render_rule, render_rules
    from fragdoctor.rules.base import HEADINGS
    from fragdoctor.rules.registry import RULES

    if code is None:
        console.write_report(render_rules(RULES, look), None)
    else:
        console.write_report(render_rule(RULES, code, HEADINGS, look), None)
    return OK
