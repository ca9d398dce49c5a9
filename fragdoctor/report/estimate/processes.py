"""How many processes fit on a GPU, as text and as JSON."""

from __future__ import annotations

from typing import Any

from fragdoctor.model.diagnosis import SCHEMA_VERSION
from fragdoctor.model.estimate import Sharing, SharingRow
from fragdoctor.report import escape
from fragdoctor.report.base import RenderOptions, Verbosity
from fragdoctor.report.text.page import Cell, Column, Page
from fragdoctor.units import format_share, format_size, plural

Json = dict[str, Any]


def render_sharing(sharing: Sharing, options: RenderOptions) -> str:
    """Return the answer as text; with ``Verbosity.QUIET`` its first sentence."""
    sentence = sharing_sentence(sharing)
    if options.verbosity is Verbosity.QUIET:
        return escape.terminal(sentence) + "\n"
    page = Page(options)
    is_well = sharing.n_fit >= (sharing.n_asked or 1)
    page.paragraph((sentence, "bold green" if is_well else "bold red"), indent=0)
    _write_demand(page, sharing)
    _write_rows(page, sharing)
    _write_notes(page, sharing)
    return page.render()


def sharing_sentence(sharing: Sharing) -> str:
    """Return how many fit in one sentence, and for a number that was asked for whether it does."""
    each = format_size(sharing.demand.total_bytes)
    room = format_size(max(0, sharing.total_bytes - sharing.headroom_bytes - sharing.others_bytes))
    fits = "fits" if sharing.n_fit < 2 else "fit"
    count = plural(sharing.n_fit, "process", "processes") if sharing.n_fit else "No process"
    basis = f"each takes {each} of the {room} to share"
    asked = sharing.n_asked
    if asked is None:
        return f"{count} {fits} on {sharing.gpu}: {basis}."
    if asked <= sharing.n_fit:
        return f"{plural(asked, 'process', 'processes')} fit on {sharing.gpu}: {basis}."
    short = asked * sharing.demand.total_bytes - (
        sharing.total_bytes - sharing.headroom_bytes - sharing.others_bytes
    )
    return (
        f"{plural(asked, 'process does', 'processes do')} not fit on {sharing.gpu}, "
        f"{format_size(short)} short; {sharing.n_fit or 'none'} "
        f"{'does' if sharing.n_fit == 1 else 'do'}: {basis}."
    )


def _write_demand(page: Page, sharing: Sharing) -> None:
    demand = sharing.demand
    page.heading("One process")
    rows: list[list[Cell]] = [
        ["PyTorch", format_size(demand.pytorch_bytes), (demand.pytorch_source, "dim")],
        ["CUDA context", format_size(demand.context_bytes), (demand.context_source, "dim")],
        ["together", format_size(demand.total_bytes), ""],
    ]
    if demand.lowest_bytes is not None:
        how = demand.lowest_conf or "recorded settings"
        rows.append(
            [
                "PyTorch, lowest",
                format_size(demand.lowest_bytes),
                (f"smallest at which the replay fits, {how}; flushes cost time", "dim"),
            ]
        )
    page.table([Column(), Column(align="right"), Column("wrap")], rows)
    page.heading("The GPU")
    share = format_share(sharing.headroom_bytes, sharing.total_bytes)
    kept = f"{share} kept free; --headroom changes it"
    gpu: list[list[Cell]] = [
        ["total", format_size(sharing.total_bytes), (sharing.gpu, "dim")],
        ["headroom", format_size(sharing.headroom_bytes), (kept, "dim")],
    ]
    if sharing.others_bytes:
        gpu.append(["others", format_size(sharing.others_bytes), ("other processes", "dim")])
    page.table([Column(), Column(align="right"), Column("wrap")], gpu)


def _write_rows(page: Page, sharing: Sharing) -> None:
    page.heading("Processes side by side")
    columns = [
        Column(title="n", align="right"),
        Column(title="take", align="right"),
        Column(title="left", align="right"),
        Column(title=""),
        Column(title="PyTorch could have", align="right"),
        Column(title="throughput", align="right"),
    ]
    page.table(columns, [_row(row, sharing) for row in sharing.rows])
    if len(sharing.rows) > 1:
        whole = sharing.n_asked or sharing.n_fit
        page.paragraph((fewer_sentence(sharing, whole), "dim"))


def fewer_sentence(sharing: Sharing, n: int) -> str:
    """Return what one process fewer than ``n`` costs at most and gives the others."""
    row = {r.n: r for r in sharing.rows}
    if n < 2 or n not in row or n - 1 not in row:
        return "Throughput is of processes that are always busy and never slow each other down."
    gain = row[n - 1].each_bytes - row[n].each_bytes
    return (
        f"{n - 1} instead of {n}: at most 1/{n} of the throughput is lost, if all are always busy "
        "and none slows another down; less where they already share the GPU's cores. Each of the "
        f"others could have {format_size(gain)} more."
    )


def _row(row: SharingRow, sharing: Sharing) -> list[Cell]:
    whole = sharing.n_asked or sharing.n_fit or 1
    return [
        str(row.n),
        format_size(row.used_bytes),
        format_size(row.left_bytes),
        ("fits", "green") if row.fits else ("too many", "red"),
        f"{format_size(row.each_bytes)} each",
        f"{row.n}/{whole}",
    ]


def _write_notes(page: Page, sharing: Sharing) -> None:
    notes = list(sharing.notes)
    lowest = sharing.n_fit_lowest
    if lowest is not None and lowest > sharing.n_fit:
        by = sharing.demand.lowest_conf or "a per-process memory fraction"
        notes.append(f"At the lowest that the replay allows {lowest} would fit, with {by}.")
    if sharing.n_fit_tight > sharing.n_fit:
        notes.append(
            f"Without headroom {sharing.n_fit_tight} would fit: the first spike of any of them "
            "ends one."
        )
    if sharing.demand.context_source.startswith("typical"):
        notes.append(
            "The context differs by GPU, driver and libraries: nvidia-smi's figure of one process "
            "less its memory_reserved() is the true one (--context)."
        )
    if notes:
        page.heading("Mind")
        for note in notes:
            page.labelled("-", note, indent=2, label_width=2)


def sharing_document(sharing: Sharing) -> Json:
    """Return the document of processes: schema/processes-1.0.schema.json."""
    demand = sharing.demand
    return {
        "schema_version": SCHEMA_VERSION,
        "gpu": sharing.gpu,
        "total_bytes": sharing.total_bytes,
        "headroom_bytes": sharing.headroom_bytes,
        "others_bytes": sharing.others_bytes,
        "per_process": {
            "pytorch_bytes": demand.pytorch_bytes,
            "context_bytes": demand.context_bytes,
            "total_bytes": demand.total_bytes,
            "pytorch_source": demand.pytorch_source,
            "context_source": demand.context_source,
            "lowest_bytes": demand.lowest_bytes,
            "lowest_conf": demand.lowest_conf or None,
        },
        "n_asked": sharing.n_asked,
        "n_fit": sharing.n_fit,
        "n_fit_tight": sharing.n_fit_tight,
        "n_fit_lowest": sharing.n_fit_lowest,
        "rows": [
            {
                "n": row.n,
                "used_bytes": row.used_bytes,
                "left_bytes": row.left_bytes,
                "fits": row.fits,
                "each_bytes": row.each_bytes,
                "throughput_share": row.throughput_share,
            }
            for row in sharing.rows
        ],
        "notes": list(sharing.notes),
    }
