"""``fragdoctor export``: a snapshot for other tools, or for other people."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal

from fragdoctor.cli import console, options
from fragdoctor.cli.exit import OK
from fragdoctor.errors import ConfigError

if TYPE_CHECKING:
    import pandas as pd

    from fragdoctor.model.snapshot import Snapshot


ExportFormat = Literal["csv", "trace", "speedscope", "snapshot"]
ExportTable = Literal["events", "blocks", "segments", "allocations", "modules"]


@options.taken
class ExportOptions:
    """Which part of a snapshot to write, and in what format."""

    # A str, since a Path would turn the // of a URL into /.
    snapshot: str = options.argument(
        "SNAPSHOT", "A memory snapshot or its URL; - is standard input"
    )
    output_format: ExportFormat = options.option(
        None,
        "Choose a table, a trace for Perfetto, stacks for speedscope, or a snapshot",
        "--format",
        default="csv",
        group=options.OUTPUT,
        show_default=True,
    )
    table: ExportTable = options.option(
        None,
        "Choose the table of csv",
        default="events",
        group=options.OUTPUT,
        show_default=True,
    )
    device: int | None = options.DEVICE
    redact: bool = options.flag("Replace private paths and names by pseudonyms")
    output: Path | None = options.OUTPUT_FILE
    force: bool = options.FORCE


def export(asked: ExportOptions) -> int:
    """Write the snapshot in another format."""
    output_format, output, device = asked.output_format, asked.output, asked.device
    console.check_output(output, force=asked.force, inputs=[asked.snapshot])
    if output_format == "snapshot" and output is None and sys.stdout.isatty():
        raise ConfigError(
            "A snapshot is binary and is not written to a terminal.", hint="Give -o FILE."
        )

    from fragdoctor.inputs.cases import read_snapshot

    with console.Progress("Reading"):
        source = read_snapshot(asked.snapshot)
    if device is not None and device not in source.devices:
        raise ConfigError(
            f"The snapshot has no device {device}.",
            hint=f"It has {', '.join(map(str, source.devices)) or 'none'}.",
        )
    if asked.redact:
        from fragdoctor.export.redact import redacted

        source = redacted(source)
    with console.Progress("Writing"), console.binary_output(output, force=asked.force) as sink:
        _write(source, output_format, asked.table, device, sink)
    return OK


def _write(
    snapshot: Snapshot, output_format: ExportFormat, table: str, device: int | None, sink: BinaryIO
) -> None:
    def text(part: str) -> None:
        sink.write(part.encode("utf-8", "backslashreplace"))

    if output_format == "trace":
        from fragdoctor.export.trace_events import trace_parts

        for part in trace_parts(snapshot, device):
            text(part)
    elif output_format == "speedscope":
        from fragdoctor.export.speedscope import speedscope_text

        text(speedscope_text(snapshot, device))
    elif output_format == "snapshot":
        from fragdoctor.export.snapshot_writer import write_snapshot

        write_snapshot(snapshot, sink)
    else:
        from fragdoctor.export import snapshot_tables

        if table == "modules":
            frame = _modules(snapshot, device)
        else:
            frame = snapshot_tables.table(snapshot, table, device)
        snapshot_tables.write_csv(frame, text)


def _modules(snapshot: Snapshot, device: int | None) -> pd.DataFrame:
    """Return what the model's modules held at the peak of each device.

    Raises:
        ConfigError: no modules were recorded.
    """
    from fragdoctor.analysis.device import analyze_device
    from fragdoctor.analysis.owners import module_memory
    from fragdoctor.model.modules import modules_frame

    devices = [d for d in snapshot.devices if device in (None, d)]
    found = [m for d in devices for m in module_memory(analyze_device(snapshot, d))]
    if not found:
        raise ConfigError(
            "The snapshot does not say which module of the model its memory is for.",
            hint="Make one that does: fragdoctor rehearse --snapshot FILE, or run --module-paths.",
        )
    return modules_frame(found)
