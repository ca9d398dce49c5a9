"""``fragdoctor oom``: a message or a log, pasted, piped or read from a file."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from fragdoctor.cli import console, options
from fragdoctor.cli.analyze import exit_code

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[TEXT|FILE|-]",
        help="The message itself, a file that holds it, or - for standard input",
        show_default=False,
    ),
]


def oom(
    text: Words = None,
    capacity: options.DeviceSize = None,
    device: options.Device = None,
    memory_fraction: options.MemoryFraction = None,
    torch_version: options.TorchVersion = None,
    output_format: options.Format = options.ReportFormat.TEXT,
    output: options.Output = None,
    force: options.Force = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    path_map: options.PathMap = None,
    no_color: options.NoColor = False,
    fail_on: options.FailOnOption = None,
    exit_zero: options.ExitZero = False,
) -> int:
    """Diagnose the first cause in the text and print the report."""
    look = console.render_options(
        quiet=quiet,
        verbose=verbose,
        no_color=no_color,
        to_file=output is not None,
        path_map=path_map,
    )
    words = text or []
    console.check_output(output, force=force, inputs=words)
    if not words and sys.stdin.isatty():
        sys.stderr.write("Paste the message, then end with Ctrl-D on a line of its own:\n")
        sys.stderr.flush()

    from fragdoctor.inputs.cases import read_messages
    from fragdoctor.model.case import Overrides
    from fragdoctor.report.base import render

    overrides = Overrides(
        capacity_bytes=capacity,
        device=device,
        memory_fraction=memory_fraction,
        torch_version=torch_version,
    )
    case = read_messages(words, overrides)

    from fragdoctor.diagnosis.pipeline import diagnose

    with console.Progress("Diagnosing"):
        diagnosis = diagnose(case)
    report = render("oom", output_format.value, diagnosis, look)
    console.write_report(report, output, force=force)
    return exit_code(diagnosis, fail_on, exit_zero=exit_zero)
