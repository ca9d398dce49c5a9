"""What fits and what does not: servers, doubts, plans, ways out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from fragdoctor.model.memory_estimate import Combination, Doubt, Estimate, FitState, Plan, state_on
from fragdoctor.report import document as doc
from fragdoctor.report.document import Span, Style, dim
from fragdoctor.units import format_count, format_size

STATES: Final[Mapping[FitState, doc.Span]] = {
    FitState.FITS: Span("yes", Style.GOOD),
    FitState.TOO_CLOSE: Span("too close", Style.WARN),
    FitState.DOES_NOT_FIT: Span("NO", Style.BAD),
}
TONES: Final = {state: word.style for state, word in STATES.items()}


def bounds_text(estimate: Estimate) -> str:
    """Return the least and the most memory that a run needs."""
    footprint = estimate.footprint
    low, high = footprint.needs_low_bytes, footprint.needs_high_bytes
    return f"{format_size(low)} to {format_size(high)}"


def server_section(estimate: Estimate) -> doc.Section:
    """Return how a server's memory is divided."""
    found = estimate.serving
    if found is None:
        return doc.Section("Server", ())
    rows = [
        (f"PyTorch's part of {found.utilization:.2g} of {found.gpu}", found.budget_bytes),
        ("Weights", found.weights_bytes),
        (f"A step of {format_count(found.max_batched_tokens)} tokens, about",
         found.activations_bytes),
        ("Pool of cache blocks", found.cache_bytes),
        (f"One sequence of {format_count(found.length)} tokens", found.bytes_per_sequence),
    ]  # fmt: skip
    table = doc.tabled(
        rows,
        doc.Column("", lambda row: row[0], "wrap"),
        doc.Column("", lambda row: format_size(row[1]), "right"),
    )
    text = (
        f"Sequences at once: {format_count(found.sequences)} of at most "
        f"{format_count(found.max_sequences)}; {format_count(found.cached_tokens)} tokens. CUDA "
        "graphs are not counted."
    )
    return doc.Section("Server", [table, doc.Paragraph(text)], id="server")


def reason_of(doubt: Doubt) -> str:
    """Return where a doubt comes from, and the option that settles it."""
    return f"{doubt.reason} ({doubt.option} says)" if doubt.option else doubt.reason


def doubts_section(estimate: Estimate) -> doc.Section:
    """Return the reasons for the gap between the bounds."""
    footprint = estimate.footprint
    table = doc.tabled(
        [doubt for doubt in footprint.doubts if doubt.n_bytes],
        doc.Column("", "n_bytes"),
        doc.Column("", reason_of, "wrap"),
    )
    title = f"Between {bounds_text(estimate)}".replace(" to ", " and ")
    others = dim(
        "That is for a program that does what was counted. Measured in other people's "
        "programs, nine in ten such figures are between "
        f"{format_size(footprint.published_low_bytes)} and "
        f"{format_size(footprint.published_high_bytes)}."
    )
    return doc.Section(title, [table, doc.Paragraph(others)], id="doubts")


def plans_section(estimate: Estimate) -> doc.Section:
    """Return the layouts on the fewest GPUs possible, and on twice as many."""
    plans = estimate.plans or ()

    def dollars(plan: Plan) -> str:
        price = plan.price_per_million_tokens
        return "" if price is None else f"${price:,.2f}"

    table = doc.tabled(
        plans,
        doc.Column("GPUs", "n_gpus"),
        doc.Column("each", "needs_high_bytes"),
        doc.Column("tokens/s", lambda p: format_count(round(1 / p.seconds_per_token)), "right"),
        doc.Column("waits", lambda p: f"{p.communication_share:.0%}", "right"),
        *([doc.Column("1M tokens", dollars, "right")] if any(map(dollars, plans)) else []),
        *([doc.Column("sequences", "sequences")] if any(p.sequences for p in plans) else []),
        doc.Column("layout", "layout", "wrap"),
        notes=lambda p: [*([dim(text)] if (text := p.option + _ranks(p)) else []), *_rehearsed(p)],
    )  # fmt: skip
    legend = (
        "tokens/s: at the card's peak, an upper bound that compares layouts. waits: for other GPUs "
        "or the host. Up to 8 GPUs over the card's links, more over 400 Gbit/s a GPU."
    )
    return doc.Section("Plans", [table, doc.Paragraph(dim(legend) if plans else "")], id="plans")


def _ranks(plan: Plan) -> str:
    """Return what the stages of a pipeline need, if they differ."""
    each = [f"{stage} {format_size(n_bytes)}" for stage, n_bytes in plan.ranks.items()]
    return f"  stages: {', '.join(each)}" if each else ""


def _rehearsed(plan: Plan) -> list[str]:
    """Return what the rehearsal of a plan found, in at most one sentence."""
    found = plan.rehearsal
    if found is None:
        return []
    if found.fits is None:
        return [f"not rehearsed: {found.reason}"]
    if not found.fits:
        return ["rehearsed: one rank runs out of memory"]
    return [f"rehearsed: one rank fits, peak {format_size(found.peak_allocated_bytes)} allocated"]


def measures_section(estimate: Estimate) -> doc.Section:
    """Return the cheapest measures that make it fit, or else what each alone would save."""
    gpu = estimate.fits[0].gpu if estimate.fits else None

    def slowdown(found: Combination) -> str:
        if found.slowdown is None:
            return "longer"
        return "-" if found.slowdown == 1 else f"x {found.slowdown:.2f}"

    def fits(found: Combination) -> doc.Content:
        usable = gpu.usable_bytes if gpu else 0
        return STATES[state_on(found.needs_low_bytes, found.needs_high_bytes, usable)]

    table = doc.tabled(
        estimate.combinations or estimate.savings,
        doc.Column("needs", "needs_high_bytes"),
        *([doc.Column("fits", fits)] if gpu and not estimate.combinations else []),
        doc.Column("time", slowdown, "right"),
        doc.Column("GPUs", "n_gpus"),
        doc.Column("measures", "title", "wrap"),
        notes=lambda c: [dim(f"{c.option}: {c.cost}")],
    )
    if gpu and estimate.combinations:
        title, note = f"What would surely fit on {gpu.name}", "cheapest first"
        return doc.Section(title, [table], note, "combinations")
    return doc.Section("What would save memory", [table], "each alone", "savings")
