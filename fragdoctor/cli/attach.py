"""``fragdoctor attach``: what a running program holds now."""

from __future__ import annotations

from fragdoctor.cli import console, options
from fragdoctor.cli.exit import say


@options.taken
class AttachOptions(options.DiagnosisOptions):
    """The program to ask, and how long it may take."""

    pid: int = options.argument(
        "PID", "The program, or what started it; nvidia-smi shows it", min=1
    )
    wait: float = options.option("SECONDS", "Wait this long for its answer", default=60.0, min=1.0)


def attach(asked: AttachOptions) -> int:
    """Have the program write a bundle, diagnose it, print the report; the program keeps running."""
    look = console.prepared(asked)

    from fragdoctor.capture.attach import bundle_of
    from fragdoctor.diagnosis.pipeline import diagnose
    from fragdoctor.inputs.cases import read_bundle

    with console.Progress("Waiting for its snapshot"), bundle_of(asked.pid, asked.wait) as bundle:
        diagnosis = diagnose(read_bundle(bundle, asked.overrides()))
    console.give(asked, "analyze", diagnosis, look)
    if bundle.exists() and not asked.quiet:
        say(f"Recorded in {bundle}")
    return asked.exit_code(diagnosis.findings)
