"""An estimate as text: fits or not, where the memory goes, what would save some."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fragdoctor.model.estimate import Estimate, Fit, GpuModel, Item, Saving
from fragdoctor.model.workload import Workload
from fragdoctor.report import escape
from fragdoctor.report.base import RenderOptions, Verbosity
from fragdoctor.report.estimate.phrases import PHASES, batch_text, verdict, workload_text
from fragdoctor.report.text.page import Cell, Column, Page
from fragdoctor.units import format_count, format_share, format_size

WIDE: Final = 100
NARROW: Final = 80


def render_estimate(estimate: Estimate, options: RenderOptions, *, explain: bool = False) -> str:
    """Return the estimate as text; with ``Verbosity.QUIET`` its first sentence."""
    sentence = verdict(estimate)
    if options.verbosity is Verbosity.QUIET:
        return escape.terminal(sentence) + "\n"
    page = Page(options)
    style = "bold" if not estimate.fits else ("bold green" if estimate.fits[0].fits else "bold red")
    page.paragraph((sentence, style), indent=0)
    page.paragraph(workload_text(estimate), indent=0)
    _write_items(page, estimate)
    _write_lines(page, estimate)
    _write_phases(page, estimate)
    if estimate.fits:
        _write_fits(page, estimate)
    if estimate.savings:
        _write_savings(page, estimate)
    if explain:
        _write_formulas(page, estimate)
    _write_notes(page, estimate, explain=explain)
    return page.render()


def render_gpus(gpus: Sequence[GpuModel], options: RenderOptions) -> str:
    """Return the table of known GPUs."""
    page = Page(options)
    page.heading("Known GPUs", "memory as CUDA reports it")
    columns = [
        Column(title="--gpu"),
        Column(title="total", align="right"),
        Column(title="usable", align="right"),
        Column("wrap", title="what"),
    ]
    rows = [[g.name, _gib(g.total_bytes), _gib(g.usable_bytes), g.title] for g in gpus]
    page.table(columns, rows)
    legend = (
        "total: about what PyTorch's out-of-memory messages commonly print for this GPU; drivers "
        "differ by some 0.2 GiB, and none was measured here. usable: less the CUDA context of one "
        "process, estimated. Any size is accepted too: --gpu 24GiB."
    )
    page.paragraph((legend, "dim"))
    return page.render()


def _gib(n_bytes: int) -> str:
    return format_size(n_bytes)


def _write_items(page: Page, estimate: Estimate) -> None:
    footprint = estimate.footprint
    peak = footprint.peak
    titles = {item.id: item for item in footprint.items}
    page.heading("At the peak", f"{PHASES[peak.name]}: {peak.moment}" if peak.moment else "")
    columns = [
        Column(title="item", kind="wrap"),
        Column(title="bytes", align="right"),
        Column(title="share", align="right"),
    ]
    shares = sorted(peak.shares, key=lambda s: -s.n_bytes)
    rows: list[list[Cell]] = [
        [titles[s.item].title if s.item in titles else s.item, format_size(s.n_bytes),
         format_share(s.n_bytes, peak.n_bytes)]
        for s in shares
    ]  # fmt: skip
    rows.append([("Allocated", "bold"), (format_size(peak.n_bytes), "bold"), ""])
    overhead = footprint.reserved_bytes - peak.n_bytes
    rows.append(["Allocator: rounding, segments, cache", format_size(overhead), ""])
    rows.append([("Reserved", "bold"), (format_size(footprint.reserved_bytes), "bold"), ""])
    if estimate.fits:
        gpu = estimate.fits[0].gpu
        rows.append([f"CUDA context, about ({gpu.name})", format_size(gpu.context_bytes), ""])
        needed = footprint.reserved_bytes + gpu.context_bytes
        rows.append([("Needed on the GPU", "bold"), (format_size(needed), "bold"), ""])
    page.table(columns, rows)


def _write_lines(page: Page, estimate: Estimate) -> None:
    """Write which lines of the user's code hold most at the peak; known from a trace only."""
    footprint = estimate.footprint
    if not footprint.lines:
        return
    titles = {item.id: item.title for item in footprint.items}
    page.heading("Your lines that hold most at the peak")
    rows: list[list[Cell]] = [
        [
            format_size(line.n_bytes),
            f"{line.filename}:{line.line} {line.function}",
            titles.get(line.item, line.item),
        ]
        for line in footprint.lines
    ]
    page.table([Column(align="right"), Column("wrap"), Column()], rows)


def _write_phases(page: Page, estimate: Estimate) -> None:
    footprint = estimate.footprint
    if len(footprint.phases) < 2:
        return
    page.heading("Peak of each phase")
    top = footprint.peak
    rows: list[list[Cell]] = [
        [
            PHASES[phase.name],
            format_size(phase.n_bytes),
            [(phase.moment, ""), ("  the peak", "bold")] if phase is top else phase.moment,
        ]
        for phase in footprint.phases
    ]
    page.table([Column(), Column(align="right"), Column("wrap")], rows)


def _write_fits(page: Page, estimate: Estimate) -> None:
    page.heading("Will it fit")
    lengths = [seq for seq, _ in estimate.fits[0].other_lengths]
    if page.width < WIDE:
        lengths = lengths[:2] if page.width >= NARROW else []
    seq = estimate.workload.seq
    columns = [
        Column(title="gpu"),
        Column(title="usable", align="right"),
        Column(title="fits"),
        Column(title="to spare", align="right"),
        Column(title=f"batch at {format_count(seq)}" if seq else "batch", align="right"),
        *(Column(title=f"at {format_count(n)}", align="right") for n in lengths),
    ]
    page.table(columns, [_fit_row(fit, lengths) for fit in estimate.fits])
    page.paragraph(
        ("batch: the largest that fits, in sequences a pass on one GPU, to within 2 %.", "dim")
    )


def _fit_row(fit: Fit, lengths: Sequence[int]) -> list[Cell]:
    others = dict(fit.other_lengths)
    return [
        fit.gpu.name,
        format_size(fit.gpu.usable_bytes),
        ("yes", "bold green") if fit.fits else ("NO", "bold red"),
        format_size(fit.margin_bytes),
        batch_text(fit.largest_batch),
        *(batch_text(others.get(n)) for n in lengths),
    ]


def _write_savings(page: Page, estimate: Estimate) -> None:
    useful = [s for s in estimate.savings if s.saved_bytes > 0]
    idle = [s for s in estimate.savings if s.saved_bytes <= 0]
    if useful:
        page.heading("What would save memory", "each alone")
        with_fit = bool(estimate.fits)
        columns = [
            Column(title="saves", align="right"),
            Column(title="peak", align="right"),
            *([Column(title="fits")] if with_fit else []),
            Column("wrap", title="measure"),
        ]
        rows = [_saving_row(s, with_fit=with_fit) for s in useful]
        below: list[Sequence[Cell]] = [[(f"{s.option}: {s.cost}", "dim")] for s in useful]
        page.table(columns, rows, below=below)
    if idle:
        names = ", ".join(s.title for s in idle)
        page.paragraph((f"No lower peak from: {names}.", "dim"))


def _saving_row(saving: Saving, *, with_fit: bool) -> list[Cell]:
    fits: Cell = ("yes", "bold green") if saving.fits else ("NO", "bold red")
    return [
        format_size(saving.saved_bytes),
        format_size(saving.peak_bytes),
        *([fits] if with_fit else []),
        saving.title,
    ]


def _write_formulas(page: Page, estimate: Estimate) -> None:
    page.heading("How it was counted")
    for item in estimate.footprint.items:
        _write_formula(page, item)
    _write_layer(page, estimate)
    page.paragraph((_symbols(estimate.workload), "dim"))


def _write_layer(page: Page, estimate: Estimate) -> None:
    """Write what each operation of a layer keeps."""
    if not estimate.footprint.layer:
        return
    page.heading("What one layer keeps for its backward", "by operation")
    columns = [
        Column("wrap", title="operation"),
        Column("wrap", title="keeps"),
        Column("fit", title="formula"),
        Column(title="bytes", align="right"),
    ]
    rows: list[list[Cell]] = [
        [kept.operation, kept.what, kept.formula, format_size(kept.n_bytes)]
        for kept in estimate.footprint.layer
    ]
    total = sum(kept.n_bytes for kept in estimate.footprint.layer)
    rows.append([("One layer", "bold"), "", "", (format_size(total), "bold")])
    page.table(columns, rows)


def _write_formula(page: Page, item: Item) -> None:
    page.paragraph([(item.title, "bold"), f"  at most {format_size(item.n_bytes)}"])
    for text in (item.formula, f"= {item.numbers}" if item.numbers else "", item.note):
        if text:
            page.paragraph(text, indent=4, hang=2)
    page.paragraph((f"{item.sureness.value}; {item.source}", "dim"), indent=4, hang=2)


def _symbols(workload: Workload) -> str:
    shape = workload.shape
    return (
        f"P parameters; B batch {workload.batch}; S tokens {workload.seq}; L layers "
        f"{shape.n_layers}; H hidden size {shape.hidden}; Q and K width of all query and of all "
        f"key heads {shape.n_heads * shape.head_dim} and {shape.n_kv_heads * shape.head_dim}; "
        f"F feed-forward width {shape.ffn}; a heads {shape.n_heads}; V vocabulary {shape.vocab}; "
        f"n layers in a checkpointed segment; N GPUs {workload.world_size}."
    )


def _write_notes(page: Page, estimate: Estimate, *, explain: bool) -> None:
    notes = [*estimate.footprint.notes]
    if estimate.error:
        notes.append(estimate.error)
    if not explain:
        notes.append("Formulas and sources: --explain.")
    page.heading("Notes")
    for note in notes:
        page.paragraph(note, hang=2)
