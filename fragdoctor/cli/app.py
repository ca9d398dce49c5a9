"""The way in: ``fragdoctor`` on the command line.

This module is light on purpose. The front page and the version are printed before typer, rich or
numpy are loaded; a command loads what it needs.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence

from fragdoctor.cli.front_page import FRONT_PAGE


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit."""
    words = sys.argv[1:] if argv is None else list(argv)
    if words[:1] in (["--help"], ["-h"]):
        sys.exit(_print(FRONT_PAGE))
    if words[:1] == ["--version"]:
        from fragdoctor import __version__

        sys.exit(_print(f"fragdoctor {__version__}\n"))
    gc.disable()  # nothing dies while modules are loaded; collecting then costs a tenth
    from fragdoctor.cli import exit as exit_codes
    from fragdoctor.cli.console import prepare_streams

    prepare_streams()
    sys.exit(exit_codes.run(invoke, words))


def invoke(argv: Sequence[str]) -> int:
    """Parse a command line and run its command; return the exit code or raise."""
    import typer

    from fragdoctor.cli.commands import app

    gc.enable()
    gc.freeze()
    command = typer.main.get_command(app)
    with command.make_context("fragdoctor", list(argv)) as context:
        code = command.invoke(context)
    return code if isinstance(code, int) else 0


def _print(text: str) -> int:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        from fragdoctor.cli.exit import quiet_pipe

        return quiet_pipe()
    return 0
