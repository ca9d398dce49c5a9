"""What ``fragdoctor estimate`` says: whether it fits, where memory goes, what would save some."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from msgspec.structs import replace

from fragdoctor.model.gpus import GpuModel
from fragdoctor.model.memory_estimate import (
    MOST_GPUS,
    Combination,
    Doubt,
    Estimate,
    Fit,
    FitState,
    Item,
    KnownModel,
    PhaseName,
    Plan,
    state_on,
)
from fragdoctor.model.recipe import Bearing, Recipe, RecipeUse, UsedEntry
from fragdoctor.model.workload import Workload
from fragdoctor.report import document as doc
from fragdoctor.report.document import Detail, Span, Style, dim, strong
from fragdoctor.units import format_count, format_share, format_size, plural

PHASES: Final = {phase: phase.value.replace("_", " ") for phase in PhaseName}
_GPU_LEGEND: Final = (
    "total: about what PyTorch's out-of-memory messages commonly print for this GPU; drivers "
    "differ by some 0.2 GiB, and none was measured here. usable: less the CUDA context of one "
    "process, estimated. Any size is accepted too: --gpu 24GiB."
)


def document(estimate: Estimate, *, explain: bool = False) -> doc.ReportDocument:
    """Return the document of an estimate; ``explain`` adds the formulas to the short report."""
    tone = TONES[estimate.fits[0].state] if estimate.fits else Style.STRONG
    if estimate.serving is not None and not estimate.serving.sequences:
        tone = Style.BAD
    answer = summary(estimate)
    said, counted, assumed = answer.partition(" Counted: ")
    return doc.ReportDocument(
        title="Will it fit",
        headline=[Span(said, tone), dim(f"{counted}{assumed}")],
        brief=[answer],
        lead=[doc.Paragraph(_workload_text(estimate)), *recipe_lead(estimate.recipe)],
        sections=[
            plans_section(estimate),
            server_section(estimate),
            *_on_one_gpu(estimate),
            *recipe_sections(estimate.recipe),
            *_formulas(estimate, Detail.USUAL if explain else Detail.FULL),
            _notes(estimate, explain=explain),
        ],
        tone=tone,
    )


def gpus_document(gpus: Sequence[GpuModel]) -> doc.ReportDocument:
    """Return the table of known GPUs."""
    table = doc.tabled(
        gpus,
        doc.Column("--gpu", "name"),
        doc.Column("total", "total_bytes"),
        doc.Column("usable", "usable_bytes"),
        doc.Column("what", "title", "wrap"),
    )
    names = [gpu.name for gpu in gpus]
    return _known("Known GPUs", "memory as CUDA reports it", names, table, _GPU_LEGEND)


def _known(
    title: str, note: str, names: Sequence[str], table: doc.Table, legend: str
) -> doc.ReportDocument:
    return doc.ReportDocument(
        title=title,
        headline=[strong(title), dim(f"  {note}")],
        brief=names,
        sections=[],
        lead=[table, doc.Paragraph(dim(legend))],
    )


def models_document(models: Sequence[KnownModel]) -> doc.ReportDocument:
    """Return the table of models that can be given by name."""
    table = doc.tabled(
        models,
        doc.Column("name", "name"),
        doc.Column("parameters", "n_parameters"),
        doc.Column("or by its repository", "hub", "wrap"),
    )
    note, example = "shapes only; nothing is downloaded", "fragdoctor estimate llama-3.1-8b"
    return _known("Known models", note, [m.name for m in models], table, f"For example: {example}")


def summary(estimate: Estimate) -> str:
    """Return the answer, and the assumptions that decide it."""
    footprint = estimate.footprint
    if estimate.plans is not None:
        said = [_planned(estimate)]
    elif estimate.fits:
        said = [_one(estimate, fit) for fit in estimate.fits]
    else:
        where = f"; the peak is in the {PHASES[footprint.peak.name]}"
        where = "" if estimate.workload.inference else where
        said = [f"Needs {bounds_text(estimate)} on a GPU, CUDA context not counted{where}."]
    assumed = _assumed(estimate.workload, is_planned=estimate.plans is not None)
    if served := _served(estimate):
        said = [*served, "One batch alone:", said[0][0].lower() + said[0][1:], *said[1:]]
    return " ".join([*said, *assumed])


def _planned(estimate: Estimate) -> str:
    """Return the smallest number of GPUs that works, and the fastest way to use them."""
    gpu, plans = estimate.fits[0].gpu, estimate.plans
    if not plans:
        return f"No layout on up to {MOST_GPUS} x {gpu.name} surely fits."
    best = plans[0]
    each = f"{format_size(best.needs_high_bytes)} of {format_size(gpu.usable_bytes)} usable"
    cost = "" if best.price_per_hour is None else f", ${best.price_per_hour:,.2f} an hour"
    holds = f", {format_count(best.sequences)} sequences at once" if best.sequences else ""
    return f"Fits on {best.n_gpus} x {gpu.name}: {best.layout}; {each} each{holds}{cost}."


_UNLESS_WHOLE: Final = (
    ", but none if a step reads a whole prompt, as before vLLM 0.8; --max-num-batched-tokens says"
)


def _served(estimate: Estimate) -> list[str]:
    """Return how many sequences a server holds, if a server was asked about."""
    found = estimate.serving
    if found is None:
        return []
    server = f"A server with {found.utilization:.2g} of {found.gpu}"
    length = format_count(found.length)
    if not found.sequences:
        return [f"{server} has no room for one sequence of {length} tokens."]
    held = f"{plural(found.sequences, 'sequence')} of {length} tokens at once"
    whole = "" if found.sequences_read_whole else _UNLESS_WHOLE
    return [f"{server} holds {held}: {format_size(found.cache_bytes)} of cache{whole}."]


def _one(estimate: Estimate, fit: Fit) -> str:
    usable = f"{format_size(fit.gpu.usable_bytes)} usable"
    needs = f"needs {bounds_text(estimate)} of {usable}"
    if fit.state is FitState.FITS:
        return f"Fits on {fit.gpu.name} with {format_size(fit.margin_bytes)} to spare: {needs}."
    if fit.state is FitState.TOO_CLOSE:
        said = f"Too close to call on {fit.gpu.name}: {needs}."
        return f"{said}{_decisive(estimate, fit)}{_way_out(estimate, fit)}"
    short = format_size(-_to_spare(estimate, fit))
    return (
        f"Does not fit on {fit.gpu.name}: at least {short} short, {needs}.{_way_out(estimate, fit)}"
    )


def _decisive(estimate: Estimate, fit: Fit) -> str:
    """Return the doubts without which the run would fit, if an option settles them."""
    room = fit.gpu.usable_bytes - estimate.footprint.needs_high_bytes
    found = [d for d in estimate.footprint.doubts if d.option and room + d.n_bytes >= 0]
    return "".join(f" What decides: {reason_of(doubt)}." for doubt in found)


def _to_spare(estimate: Estimate, fit: Fit) -> int:
    """Return the room that is surely left, or if it does not fit, less what is surely missing."""
    if fit.state is FitState.DOES_NOT_FIT:
        return fit.gpu.usable_bytes - estimate.footprint.needs_low_bytes
    return fit.margin_bytes


def _way_out(estimate: Estimate, fit: Fit) -> str:
    """Return what would certainly fit: a smaller batch, or the cheapest measures.

    Next to a batch, a measure is named only if it alone is enough, and the training stays as it is.
    """
    word = "Surely fits" if fit.state is FitState.TOO_CLOSE else "What would fit"
    ways = [f"batch {format_count(fit.largest_batch)}"] if fit.largest_batch else []
    for found in estimate.combinations[: fit is estimate.fits[0]]:
        is_more = found.changes_training or found.measures[1:] or found.measures == ("half_batch",)
        if not (ways and is_more):
            ways.append(found.title)
    if not ways and fit is estimate.fits[0]:
        return " None of the measures below is enough, alone or together."
    return f" {word}: {' or '.join(ways)}." if ways else ""


_PRECISIONS: Final = MappingProxyType(
    {
        "": "{} weights, gradients and states",
        "amp": "fp32 weights, gradients and states with {} operations (amp-{})",
        "deepspeed": "{} weights and gradients with fp32 master weights and states",
        "fsdp": "fp32 shards, {} operations (FSDP mixed precision)",
    }
)
"""Prefix of a training dtype, such as ``amp`` in ``amp-bf16`` -> the words for its precision."""


def _assumed(w: Workload, *, is_planned: bool) -> list[str]:
    """Return the decisive assumptions in one sentence; plans choose checkpointing themselves."""
    if w.inference:
        cache = f" and {w.kv_dtype} KV cache" if w.kv_dtype else ""
        stored = w.dtype.removesuffix("-weights")
        return [f"Counted: weights in {stored}{cache}, batch {format_count(w.batch)}."]
    precision = f"{w.dtype} base, fp32 adapters"
    if not w.lora_rank:
        kind, _, dtype = w.dtype.rpartition("-")
        precision = _PRECISIONS[kind].format(dtype, dtype)
        if dtype == "fp8":
            precision = "bf16 weights and states with fp8 operations"
        if w.master_weights and not w.dtype.startswith("deepspeed"):
            precision = f"{w.dtype} weights with fp32 master weights and states"
        if w.grad_dtype:
            precision += f", gradients in {w.grad_dtype}"
    parts = [precision, *["a classifier"] * w.shape.may_have_head, w.optimizer]
    kind, is_off = w.attention_in_code.value, w.checkpointing == "none"
    parts.append(f"{'fused (sdpa)' if kind == 'sdpa' else kind} attention")
    if not (is_off and is_planned):
        parts.append("no checkpointing" if is_off else f"checkpointing {w.checkpointing}")
    if w.offload:
        parts.append(f"{' and '.join(w.offload)} on the host")
    if w.expandable_segments:
        parts.append("expandable segments")
    return [f"Counted: {', '.join(parts)}."]


def _workload_text(estimate: Estimate) -> str:
    """Return what the question was, as far as the headline does not say it."""
    w, footprint = estimate.workload, estimate.footprint
    parts = [f"{w.shape.name}, {_parameters(footprint.n_parameters)} parameters"]
    if w.inference:
        parts.append(f"inference of {w.batch} x {format_count(w.seq + w.new_tokens)} tokens")
    else:
        most = "up to " * w.varying_lengths + format_count(w.seq)
        parts.append(f"batch {w.batch} x {most} tokens")
    if w.lora_rank:
        trained = _parameters(footprint.n_trainable)
        parts.append(f"LoRA rank {w.lora_rank} ({trained} trained)")
    if w.zero_stage:
        parts.append(f"ZeRO-{w.zero_stage} on {w.world_size} GPU{'s' * (w.world_size > 1)}")
    parts += [f"{kind} parallel {degree}" for kind, degree in w.degrees.items()]
    if w.grad_accumulation > 1:
        parts.append(f"{w.grad_accumulation} passes a step")
    return ", ".join(parts) + "."


def _parameters(n: int) -> str:
    """Return a parameter count in short form: ``6.74B``."""
    for factor, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K")):
        if n >= factor:
            return f"{n / factor:.3g}{unit}" if n < 100 * factor else f"{n / factor:.0f}{unit}"
    return str(n)


def _batch(batch: int | None) -> str:
    """Return the largest batch as the text of a table cell."""
    return "-" if batch is None else "none" if batch == 0 else format_count(batch)


def _on_one_gpu(estimate: Estimate) -> list[doc.Section]:
    """Return where the memory goes for the question as asked; with plans, only in full reports."""
    sections = [
        _at_the_peak(estimate),
        _phases(estimate),
        _fits(estimate),
        doubts_section(estimate),
        measures_section(estimate),
    ]
    if estimate.plans:
        return [replace(one, detail=Detail.FULL, note="without a plan") for one in sections]
    return sections


def _at_the_peak(estimate: Estimate) -> doc.Section:
    footprint = estimate.footprint
    peak = footprint.peak
    titles = {item.id: item.title for item in footprint.items}
    rows: list[tuple[doc.Content, int, str]] = [
        (titles.get(s.item, s.item), s.n_bytes, format_share(s.n_bytes, peak.n_bytes))
        for s in sorted(peak.shares, key=lambda s: -s.n_bytes)
    ]
    overhead = footprint.reserved_bytes - peak.n_bytes
    rows += [
        (strong("Allocated"), peak.n_bytes, ""),
        ("Cache and rounding where memory is plentiful", overhead, ""),
        (strong("Reserved then"), footprint.reserved_bytes, ""),
    ]
    if estimate.fits:
        gpu = estimate.fits[0].gpu
        rows.append((f"CUDA context, about ({gpu.name})", gpu.context_bytes, ""))
    table = doc.tabled(
        rows,
        doc.Column("item", lambda row: row[0], "wrap"),
        doc.Column("bytes", lambda row: format_size(row[1]), "right"),
        doc.Column("share", lambda row: row[2], "right"),
    )
    phase = PHASES[peak.name]
    note = phase if peak.moment in {"", phase} else f"{phase}: {peak.moment}"
    return doc.Section("At the peak", [table], note, "peak")


def _phases(estimate: Estimate) -> doc.Section:
    phases = estimate.footprint.phases
    table = doc.tabled(
        phases if len(phases) > 1 else (),
        doc.Column("", lambda phase: PHASES[phase.name]),
        doc.Column("", "n_bytes"),
        doc.Column("", lambda p: "" if p.moment == PHASES[p.name] else p.moment, "wrap"),
    )
    return doc.Section("Peak of each phase", [table], id="phases")


def _fits(estimate: Estimate) -> doc.Section:
    if not estimate.fits:
        return doc.Section("Will it fit", ())
    table = doc.tabled(
        estimate.fits,
        doc.Column("gpu", "gpu.name"),
        doc.Column("usable", "gpu.usable_bytes"),
        doc.Column("fits", lambda fit: STATES[fit.state]),
        doc.Column("to spare", lambda fit: format_size(_to_spare(estimate, fit)), "right"),
        doc.Column("largest batch", lambda fit: _batch(fit.largest_batch), "right"),
    )
    legend = (
        "to spare: beyond the most that it may need; where it does not fit, short of the least. "
        "largest batch: that surely fits, in sequences a pass on one GPU, to within 2%."
    )
    return doc.Section("Will it fit", [table, doc.Paragraph(dim(legend))], id="fits")


def _formulas(estimate: Estimate, detail: Detail) -> list[doc.Section]:
    entries = [_formula(item) for item in estimate.footprint.items]
    layer = estimate.footprint.layer
    table = doc.tabled(
        layer,
        doc.Column("operation", "operation", "wrap"),
        doc.Column("keeps", "what", "wrap"),
        doc.Column("formula", "formula"),
        doc.Column("bytes", "n_bytes"),
    )
    total = f"One layer: {format_size(sum(kept.n_bytes for kept in layer))}." if layer else ""
    symbols = doc.Paragraph(dim(_symbols(estimate)))
    title = "What one layer keeps for its backward"
    kept = [table, doc.Paragraph(strong(total))]
    counted = [doc.Listing(entries), symbols]
    return [
        doc.Section("How it was counted", counted, id="formulas", detail=detail),
        doc.Section(title, kept, "by operation", "layer", detail=detail),
    ]


def _formula(item: Item) -> doc.ListItem:
    blocks = [doc.Paragraph(text) for text in (item.formula, item.note) if text]
    blocks.append(doc.Paragraph(dim(item.source)))
    return doc.ListItem([strong(item.title), f"  at most {format_size(item.n_bytes)}"], blocks)


def _symbols(estimate: Estimate) -> str:
    workload, shape = estimate.workload, estimate.workload.shape
    of_queries, of_keys = shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
    return (
        f"P parameters {format_count(estimate.footprint.n_parameters)}, P_adapters those of "
        f"adapters, P_largest those of the largest matrix; B batch {workload.batch}; S tokens "
        f"{workload.seq}; L layers {shape.n_layers}; H hidden size {shape.hidden}; Q and K width "
        f"of all query and of all key heads {of_queries} and {of_keys}; F feed-forward width "
        f"{shape.ffn}; a heads {shape.n_heads}; V vocabulary {shape.vocab}; n layers in a "
        f"checkpointed segment; N GPUs {workload.world_size}."
    )


def _notes(estimate: Estimate, *, explain: bool) -> doc.Section:
    notes = estimate.footprint.notes
    more = "" if explain else "Formulas and sources: --explain."
    return doc.Section(
        "Notes", [doc.Bullets(notes), doc.Paragraph(dim(more), detail=Detail.SHORT)], id="notes"
    )


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


_MOST_NAMED: Final = 4


def recipe_lead(use: RecipeUse | None) -> list[doc.DocumentBlock]:
    """Return what even a reader of just the answer must know: parts of the files that it omits."""
    if use is None:
        return []
    said = map(_counted, use.files) if use.files else [f"Read as: {use.command}."]
    return [doc.Paragraph(" ".join([*said, *use.notes]))]


def _counted(recipe: Recipe) -> str:
    n_used = sum(not entry.is_default for entry in recipe.used)
    said = f"From {recipe.source} ({recipe.format}): {plural(n_used, 'entry', 'entries')} used"
    left = [entry.key for entry in recipe.unused_that(Bearing.MATTERS)]
    if not left:
        return f"{said}."
    named = ", ".join(left[:_MOST_NAMED])
    more = ", ..." if len(left) > _MOST_NAMED else ""
    return f"{said}; not counted, though memory depends on it: {named}{more}."


def recipe_sections(use: RecipeUse | None) -> list[doc.Section]:
    """Return a section for each file: what its entries became, and which ones were not used."""
    if use is None or not use.files:
        return []
    sections = [_section(i, recipe) for i, recipe in enumerate(use.files)]
    same = [doc.Paragraph(use.command)]
    return [*sections, doc.Section("The same by options", same, id="command")]


def _section(number: int, recipe: Recipe) -> doc.Section:
    used = doc.tabled(
        recipe.used,
        doc.Column("entry", "key", "wrap"),
        doc.Column("value", _value, "wrap"),
        doc.Column("counted as", _became, "wrap"),
    )
    open_ = [*recipe.unused_that(Bearing.MATTERS), *recipe.unused_that(Bearing.UNKNOWN)]
    left = doc.tabled(
        open_,
        doc.Column("not counted", "key", "wrap"),
        doc.Column("value", "value", "wrap"),
        doc.Column("why", lambda entry: entry.reason or "is not known here", "wrap"),
    )
    rest = ", ".join(entry.key for entry in recipe.unused_that(Bearing.NONE))
    idle = doc.Paragraph(dim(f"Not used: {rest}." if rest else ""))
    return doc.Section(
        f"Read from {recipe.source}", [used, left, idle], recipe.format, f"recipe-{number}"
    )


def _value(entry: UsedEntry) -> doc.Content:
    return [entry.value, dim("  not in the file")] if entry.is_default else entry.value


def _became(entry: UsedEntry) -> doc.Content:
    if not entry.overridden_by:
        return entry.option
    won = strong(f"{entry.overridden_by} of the command line")
    return [f"{entry.option}, ", won] if entry.option else won
