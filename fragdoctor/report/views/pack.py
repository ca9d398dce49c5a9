"""What ``fragdoctor pack`` says: how many processes fit on a GPU, and the cost of one fewer."""

from __future__ import annotations

from typing import Final

from fragdoctor.model.gpu_sharing import Sharing
from fragdoctor.report import document as doc
from fragdoctor.report.document import Span, Style, bad, dim, good
from fragdoctor.units import format_share, format_size, plural

_BUSY: Final = "Throughput assumes processes that are always busy and never slow each other down."


def document(sharing: Sharing) -> doc.ReportDocument:
    """Return the document on how many processes can share a GPU."""
    sentence = sharing_sentence(sharing)
    is_well = sharing.n_fit >= (sharing.n_asked or 1)
    tone = Style.GOOD if is_well else Style.BAD
    return doc.ReportDocument(
        title="Processes on one GPU",
        headline=Span(sentence, tone),
        brief=[sentence],
        sections=[_demand(sharing), _gpu(sharing), _rows(sharing), _notes(sharing)],
        tone=tone,
    )


def sharing_sentence(sharing: Sharing) -> str:
    """Return in one sentence how many fit, and whether a number that was asked about does."""
    each = format_size(sharing.demand.total_bytes)
    fits = "fits" if sharing.n_fit < 2 else "fit"
    count = plural(sharing.n_fit, "process", "processes") if sharing.n_fit else "No process"
    basis = f"each takes {each} of the {format_size(sharing.usable_bytes)} to share"
    asked = sharing.n_asked
    if asked is None:
        return f"{count} {fits} on {sharing.gpu}: {basis}."
    if asked <= sharing.n_fit:
        return f"{plural(asked, 'process', 'processes')} fit on {sharing.gpu}: {basis}."
    short = asked * sharing.demand.total_bytes - sharing.usable_bytes
    return (
        f"{plural(asked, 'process does', 'processes do')} not fit on {sharing.gpu}, "
        f"{format_size(short)} short; {sharing.n_fit or 'none'} "
        f"{'does' if sharing.n_fit == 1 else 'do'}: {basis}."
    )


def _demand(sharing: Sharing) -> doc.Section:
    demand = sharing.demand
    return _facts(
        "One process",
        ("PyTorch", demand.pytorch_bytes, demand.pytorch_source),
        ("CUDA context", demand.context_bytes, demand.context_source),
        ("together", demand.total_bytes, ""),
    )


def _gpu(sharing: Sharing) -> doc.Section:
    share = format_share(sharing.headroom_bytes, sharing.total_bytes)
    return _facts(
        "The GPU",
        ("total", sharing.total_bytes, sharing.gpu),
        ("headroom", sharing.headroom_bytes, f"{share} kept free for spikes"),
    )


def _facts(title: str, *rows: tuple[str, int, str]) -> doc.Section:
    table = doc.tabled(
        rows,
        doc.Column("", lambda row: row[0]),
        doc.Column("", lambda row: format_size(row[1]), "right"),
        doc.Column("", lambda row: row[2], "wrap", style=Style.DIM),
    )
    return doc.Section(title, [table])


def _rows(sharing: Sharing) -> doc.Section:
    whole = sharing.n_asked or sharing.n_fit or 1
    table = doc.tabled(
        sharing.rows,
        doc.Column("n", "n"),
        doc.Column("take", "used_bytes"),
        doc.Column("left", "left_bytes"),
        doc.Column("", lambda row: good("fits") if row.fits else bad("too many")),
        doc.Column("PyTorch could have", lambda row: f"{format_size(row.each_bytes)} each",
                   "right"),
        doc.Column("throughput", lambda row: f"{row.n}/{whole}", "right"),
    )  # fmt: skip
    blocks = (table, doc.Paragraph(dim(_BUSY if len(sharing.rows) > 1 else "")))
    return doc.Section("Processes side by side", blocks, id="processes")


def _notes(sharing: Sharing) -> doc.Section:
    tight = (
        f"Without headroom {sharing.n_fit_tight} would fit, but the first spike in any of them "
        "would end one."
    )
    typical = (
        "The context differs by GPU, driver and libraries: nvidia-smi's figure of one process "
        "less its memory_reserved() is the true one (--context)."
    )
    is_typical = sharing.demand.context_source.startswith("typical")
    notes = doc.bullets(
        *sharing.notes,
        tight if sharing.n_fit_tight > sharing.n_fit else "",
        typical if is_typical else "",
    )
    return doc.Section("Notes", [notes], id="notes")
