"""``fragdoctor export``: a snapshot for other tools, or for other people."""

from __future__ import annotations

import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from fragdoctor.cli import console, options
from fragdoctor.cli.exit import OK
from fragdoctor.errors import ConfigError

if TYPE_CHECKING:
    import pandas as pd

    from fragdoctor.model.snapshot import Snapshot


class ExportFormat(StrEnum):
    """What a snapshot can be written as."""

    CSV = "csv"
    TRACE = "trace"
    SPEEDSCOPE = "speedscope"
    SNAPSHOT = "snapshot"


class ExportTable(StrEnum):
    """Tables for CSV."""

    EVENTS = "events"
    BLOCKS = "blocks"
    SEGMENTS = "segments"
    ALLOCATIONS = "allocations"
    MODULES = "modules"


SnapshotPath = Annotated[
    str,  # not a Path, which would turn the // of a URL into /
    typer.Argument(metavar="SNAPSHOT", help="A memory snapshot or its URL; - is standard input"),
]
Format = Annotated[
    ExportFormat,
    typer.Option(
        "--format",
        help="Choose a table, a trace for Perfetto, stacks for speedscope, or a snapshot",
        show_default=True,
    ),
]
TableName = Annotated[
    ExportTable,
    typer.Option("--table", help="Choose the table of csv", show_default=True),
]
Redact = Annotated[
    bool, typer.Option("--redact", help="Replace private paths and names by pseudonyms")
]


def export(
    snapshot: SnapshotPath,
    output_format: Format = ExportFormat.CSV,
    table: TableName = ExportTable.EVENTS,
    device: options.Device = None,
    redact: Redact = False,
    output: options.Output = None,
    force: options.Force = False,
) -> int:
    """Write the snapshot in another form."""
    console.check_output(output, force=force, inputs=[snapshot])
    if output_format is ExportFormat.SNAPSHOT and output is None and sys.stdout.isatty():
        raise ConfigError(
            f"{output_format.value} is binary and does not go to a terminal.",
            hint="Give -o FILE.",
        )

    from fragdoctor.inputs.cases import read_snapshot

    with console.Progress("Reading"):
        source = read_snapshot(snapshot)
    if device is not None and device not in source.devices:
        raise ConfigError(
            f"The snapshot knows no device {device}.",
            hint=f"It has {', '.join(map(str, source.devices)) or 'none'}.",
        )
    if redact:
        from fragdoctor.export.redact import redacted

        source = redacted(source)
    with console.Progress("Writing"), console.binary_output(output, force=force) as sink:
        _write(source, output_format, table.value, device, sink)
    return OK


def _write(
    snapshot: Snapshot, output_format: ExportFormat, table: str, device: int | None, sink: BinaryIO
) -> None:
    def text(part: str) -> None:
        sink.write(part.encode("utf-8", "backslashreplace"))

    if output_format is ExportFormat.TRACE:
        from fragdoctor.export.trace_events import trace_parts

        for part in trace_parts(snapshot, device):
            text(part)
    elif output_format is ExportFormat.SPEEDSCOPE:
        from fragdoctor.export.speedscope import speedscope_text

        text(speedscope_text(snapshot, device))
    elif output_format is ExportFormat.SNAPSHOT:
        from fragdoctor.export.snapshot_writer import write_snapshot

        write_snapshot(snapshot, sink)
    else:
        from fragdoctor.export import snapshot_tables

        if table == ExportTable.MODULES:
            frame = _modules(snapshot, device)
        else:
            frame = snapshot_tables.table(snapshot, table, device)
        snapshot_tables.write_csv(frame, text)


def _modules(snapshot: Snapshot, device: int | None) -> pd.DataFrame:
    """Return what the modules of the model held at the peak of each device.

    Raises:
        ConfigError: no module is noted.
    """
    from fragdoctor.analysis.device import analyze_device
    from fragdoctor.diagnosis.modules import module_memory
    from fragdoctor.model.modules import modules_frame

    devices = [d for d in snapshot.devices if device in (None, d)]
    found = [m for d in devices for m in module_memory(analyze_device(snapshot, d))]
    if not found:
        raise ConfigError(
            "The snapshot does not say which module of the model its memory is for.",
            hint="Leave one that does: fragdoctor rehearse --snapshot FILE, or run --module-paths.",
        )
    return modules_frame(found)
