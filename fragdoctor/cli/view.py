"""``fragdoctor view``: the interactive page, served to this machine, with replay behind it."""

from __future__ import annotations

from typing import Annotated

import typer

from fragdoctor.cli import console, options
from fragdoctor.cli.exit import OK

Paths = Annotated[
    list[str],
    typer.Argument(metavar="PATH...", help="A snapshot, with its messages, statistics and logs"),
]
Port = Annotated[
    int, typer.Option("--port", min=0, max=65535, metavar="N", help="Set the port; 0 is any free")
]
NoBrowser = Annotated[bool, typer.Option("--no-browser", help="Print the address only")]


def view(
    paths: Paths,
    capacity: options.DeviceSize = None,
    device: options.Device = None,
    port: Port = 0,
    no_browser: NoBrowser = False,
) -> int:
    """Diagnose the inputs and serve the page until Ctrl-C."""
    import webbrowser

    from fragdoctor.cli.page_server import Replays, Viewer
    from fragdoctor.diagnosis.pipeline import diagnose
    from fragdoctor.inputs.cases import read_case
    from fragdoctor.model.case import Overrides
    from fragdoctor.report.base import RenderOptions
    from fragdoctor.report.page.page import render_page
    from fragdoctor.report.views.analyze import document

    with console.Progress("Reading"):
        case = read_case(paths, Overrides(capacity_bytes=capacity, device=device))
        diagnosis = diagnose(case)
        page = render_page(diagnosis, document(diagnosis, RenderOptions()), is_live=True)
    server = Viewer(page, Replays(diagnosis), port)
    typer.echo(f"{server.address}\nOnly this machine can open it. Ctrl-C ends it.")
    if not no_browser:
        webbrowser.open(server.address)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        typer.echo("")
    finally:
        server.server_close()
    return OK
