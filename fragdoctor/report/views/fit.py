"""What ``fragdoctor fit`` says: peak memory against batch size, the largest batch, why it bends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fragdoctor.model.batch_fit import (
    BatchFit,
    BatchPoint,
    BatchSource,
    Curve,
    LineScaling,
    Prediction,
    Scaling,
)
from fragdoctor.report import document as doc
from fragdoctor.report.document import Detail, Span, Style, bad, code, dim
from fragdoctor.units import format_share, format_size

_SHORT_LINES: Final = 8
_WORDS: Final = {
    Scaling.FIXED: "fixed",
    Scaling.LINEAR: "with the batch",
    Scaling.FASTER: "faster than the batch",
    Scaling.SLOWER: "slower than the batch",
    Scaling.STEPS: "in steps",
    Scaling.IRREGULAR: "up and down",
    Scaling.UNTESTED: "grows",
}


def document(fit: BatchFit, *, explain: bool = False) -> doc.ReportDocument:
    """Return a fit; ``explain`` puts the method into the short report as well."""
    is_none = fit.prediction is not None and _fits_none(fit.prediction)
    sentence = batch_sentence(fit)
    tone = Style.BAD if is_none else Style.STRONG
    return doc.ReportDocument(
        title="The largest batch",
        headline=Span(sentence, tone),
        brief=[sentence],
        lead=[doc.Paragraph(linearity_sentence(fit))],
        sections=[
            _points(fit),
            _prediction(fit, fit.prediction),
            _model(fit),
            _list("What departs from a straight line", fit.why),
            _lines(fit),
            _list("How it was found", _method(fit), Detail.USUAL if explain else Detail.FULL),
            _list("Mind", _notes(fit)),
        ],
        tone=tone,
        kicker="peak memory against batch size",
    )


def batch_sentence(fit: BatchFit) -> str:
    """Return the largest batch in one sentence, or the trend where no GPU was named."""
    prediction = fit.prediction
    if prediction is None:
        return f"Peak memory {_trend(fit)}; name a GPU (--gpu 24GiB) for the largest batch."
    room = f"{prediction.gpu} ({format_size(prediction.capacity_bytes)} for PyTorch)"
    if prediction.gpu == "the capacity given":
        room = f"{format_size(prediction.capacity_bytes)} for PyTorch"
    if prediction.is_unbounded:
        return f"No largest batch follows for {room}: peak memory does not grow with the batch."
    if prediction.largest is None:
        least = "a batch of 1" if _is_whole(fit) else "a twentieth of the smallest recorded batch"
        return f"Not even {least} fits in {room}."
    if prediction.is_upper_bound:
        return (
            f"The largest batch that fits in {room} is at most "
            f"{_batch(fit, prediction.largest)}, perhaps far less. Confidence: low."
        )
    low, high = prediction.low, prediction.high
    between = ""
    if (low, high) != (prediction.largest, prediction.largest):
        between = f" (between {_batch_short(fit, low)} and {_batch_short(fit, high)})"
    far = ", an extrapolation" if prediction.is_extrapolated else ""
    return (
        f"The largest batch that fits in {room} is {_batch(fit, prediction.largest)}{between}"
        f"{far}. Confidence: {prediction.confidence}."
    )


def linearity_sentence(fit: BatchFit) -> str:
    """Return how straight peak memory follows the batch."""
    curve = fit.allocated
    top = max(p.peak_allocated_bytes for p in fit.points)
    if curve.r_squared is None:
        return (
            "Two batch sizes make a line whatever the program does: how straight memory follows "
            "the batch cannot be judged. Record a third."
        )
    if curve.scaling is Scaling.FIXED:
        return "In this range peak memory hardly depends on the batch: something else holds it."
    off = format_share(curve.worst_residual_bytes, top)
    figures = f"(at most {off} off a straight line, R-squared {_r_squared(curve.r_squared)})"
    if curve.scaling is Scaling.LINEAR:
        return f"Peak memory follows the batch in a straight line {figures}."
    return f"Peak memory does not follow the batch in a straight line {figures}: see why below."


def _r_squared(value: float) -> str:
    return f"{min(value, 0.9999):.4f}"


def _trend(fit: BatchFit) -> str:
    curve = fit.moments[-1].curve
    if curve.scaling is Scaling.FIXED:
        return f"stays at {format_size(curve.fixed_bytes)}"
    if curve.bend_bytes:
        return "grows faster than the batch"
    unit = "a sample" if _is_whole(fit) else "with each further smallest recorded batch,"
    return (
        f"grows by {format_size(curve.per_sample_bytes)} {unit} over a fixed "
        f"{format_size(max(0.0, curve.fixed_bytes))}"
    )


def _fits_none(prediction: Prediction) -> bool:
    return prediction.largest is None and not prediction.is_unbounded


def _is_whole(fit: BatchFit) -> bool:
    return fit.batch_source is not BatchSource.TRACE


def _batch(fit: BatchFit, batch: float | None) -> str:
    if batch is None:
        return "none"
    return f"{batch:,.0f}" if _is_whole(fit) else f"{batch:.4g} times the smallest recorded"


def _points(fit: BatchFit) -> doc.Section:
    def bound(point: BatchPoint, n_bytes: int) -> str:
        return f"{'>= ' if point.is_lower_bound else ''}{format_size(n_bytes)}"

    def source(point: BatchPoint) -> doc.Content:
        return [code(point.source), bad("  OOM")] if point.is_lower_bound else code(point.source)

    table = doc.tabled(
        fit.points,
        doc.Column("batch", lambda p: _batch_short(fit, p.batch), "right"),
        doc.Column("peak allocated", lambda p: bound(p, p.peak_allocated_bytes), "right"),
        doc.Column("fit", "fitted_bytes"),
        doc.Column("off", _off, "right"),
        doc.Column("peak reserved", lambda p: bound(p, p.peak_reserved_bytes), "right"),
        doc.Column("recording", source, "path"),
        label="Recordings",
    )
    return doc.Section("Recordings", [table], id="recordings")


def _off(point: BatchPoint) -> str:
    if point.fitted_bytes is None or point.is_lower_bound:
        return "-"
    return f"{100 * (point.fitted_bytes / max(1, point.peak_allocated_bytes) - 1):+.1f} %"


def _prediction(fit: BatchFit, found: Prediction | None) -> doc.Section:
    if found is None:
        return doc.Section("The largest batch", ())
    rows: list[tuple[str, int | None, str]] = [
        ("GPU", found.total_bytes, found.gpu),
        ("CUDA context", found.context_bytes or None, "--context changes it"),
        ("headroom", found.headroom_bytes or None, "kept free"),
        ("for PyTorch", found.capacity_bytes, ""),
    ]
    if found.largest is not None and not found.is_unbounded:
        how = "replay of the requests" if found.method == "replay" else "the fit"
        note = f"allocated, by {how}; reserved was {found.overhead:.2f} x allocated"
        rows.append((f"peak at {_batch(fit, found.largest)}", found.bytes_at_largest, note))
    table = doc.tabled(
        [row for row in rows if row[1] is not None],
        doc.Column("", lambda row: row[0]),
        doc.Column("", lambda row: format_size(row[1]), "right"),
        doc.Column("", lambda row: row[2], "wrap"),
        label="The largest batch",
    )
    why = f"Confidence is {found.confidence}: {'; '.join(found.reasons)}."
    blocks = (table, doc.Bullets(_ends(fit, found)), doc.Paragraph(why if found.reasons else ""))
    return doc.Section("The largest batch", blocks, id="prediction")


def _ends(fit: BatchFit, prediction: Prediction) -> list[str]:
    low, high, largest = prediction.low, prediction.high, prediction.largest
    if largest is None or prediction.is_unbounded or prediction.is_upper_bound:
        return []
    if prediction.method == "replay":
        said = []
        if low is not None and low < largest:
            said.append(
                f"Up to {_batch(fit, low)} it runs without trouble; above, the allocator must "
                "empty its cache to go on, which costs time."
            )
        if high is not None and high > largest:
            said.append(
                f"{_batch(fit, high)} is the most that any allocator settings could reach: there "
                "live memory alone fills what PyTorch can have."
            )
        return said
    return [
        (
            f"{_batch(fit, low)} fits even with the largest overhead of the allocator and the "
            "largest error of the fit that were seen."
        ),
        f"{_batch(fit, high)} is where live memory alone fills what PyTorch can have.",
    ]


def _model(fit: BatchFit) -> doc.Section:
    unit = "per sample" if _is_whole(fit) else "per smallest batch"
    curves = (("allocated", fit.allocated), ("active", fit.active), ("reserved", fit.reserved))
    table = doc.tabled(
        curves,
        doc.Column("peak", lambda c: c[0]),
        doc.Column("fixed", lambda c: "-" if c[1].bend_bytes else format_size(c[1].fixed_bytes),
                   "right"),
        doc.Column(unit, lambda c: _slope(c[1]), "right"),
        doc.Column("worst off", lambda c: format_size(c[1].worst_residual_bytes), "right"),
        doc.Column("grows", lambda c: _WORDS[c[1].scaling], "wrap"),
        label="What grows",
    )  # fmt: skip
    rest = _rest_sentence(fit)
    blocks = (table, doc.Paragraph(dim(rest) if rest else ""))
    return doc.Section("What grows", blocks, "peak = fixed + batch x per sample", "growth")


def _slope(curve: Curve) -> str:
    if curve.bend_bytes:
        return f"{format_size(curve.last_slope_bytes)} at last"
    return format_size(curve.per_sample_bytes)


def _rest_sentence(fit: BatchFit) -> str:
    """Return how the fixed part agrees with what the traces hold when they end."""
    rest, curve = fit.rest_bytes, fit.moments[-1].curve
    if rest is None or curve.bend_bytes or curve.scaling is Scaling.FIXED:
        return ""
    fixed = curve.fixed_bytes
    held = f"The traces end with {format_size(rest)} allocated (parameters, optimizer state, data)"
    if fixed >= 0.9 * rest:
        more = format_size(max(0.0, fixed - rest))
        return (
            f"{held}; the fixed part of the peak at large batches is {format_size(fixed)}, "
            f"{more} more (gradients, workspaces, rounding): the two agree."
        )
    return (
        f"{held}, more than the fixed part of {format_size(fixed)}: the line does not pass through "
        "what is there at all times, so do not trust it for batches smaller than recorded."
    )


def _lines(fit: BatchFit) -> doc.Section:
    if not fit.lines:
        return doc.Section("By line of the program", ())
    first, last = fit.line_batches[0], fit.line_batches[-1]
    table = doc.tabled(
        fit.lines,
        doc.Column(f"at {_batch_short(fit, first)}", lambda row: format_size(row.n_bytes[0]),
                   "right"),
        doc.Column(f"at {_batch_short(fit, last)}", lambda row: format_size(row.n_bytes[-1]),
                   "right"),
        doc.Column("grows", lambda row: _WORDS[row.curve.scaling]),
        doc.Column("line", _line, "path"),
        shown=_SHORT_LINES,
        label="By line",
    )  # fmt: skip
    note = "what each holds at the peak of large batches"
    return doc.Section("By line of the program", [table], note, "lines")


def _batch_short(fit: BatchFit, batch: float | None) -> str:
    if batch is None:
        return "none"
    return f"{batch:,.0f}" if _is_whole(fit) else f"x {batch:.4g}"


def _line(row: LineScaling) -> doc.Content:
    place = row.line
    if place is None:
        return "(no stack: mostly the backward pass)"
    return code(place.short)


def _method(fit: BatchFit) -> list[str]:
    said = [
        (
            "The line is the median of the slopes between all pairs of recordings (Theil and Sen), "
            "through the median of what is left; one odd recording does not move it."
        ),
        (
            "The fit of the peak is the highest of such lines, one for each line of the program "
            "while which memory comes near the peak; a parabola where the points bend up."
        ),
    ]
    replay = fit.replay
    if replay is not None and replay.method == "fitted":
        said.append(
            "Each request of the largest recording is matched with its counterparts in the others, "
            "its size is fitted against the batch, and the requests are replayed through a model "
            f"of the allocator. {format_share(1 - replay.unmatched_share, 1.0)} of the requested "
            f"bytes have counterparts; at the recorded batch sizes the replayed peak is off by at "
            f"most {100 * replay.worst_error:.2f} %."
        )
        if replay.left_out_error is not None:
            said.append(
                "Without the largest recording the replay of the others foretells its peak to "
                f"within {100 * abs(replay.left_out_error):.2f} %."
            )
    elif replay is not None:
        said.append(
            f"{format_share(replay.unmatched_share, 1.0)} of the requested bytes have no "
            "counterpart in the other recordings, so a replay at other batch sizes is not trusted."
        )
    if fit.left_out_error is not None:
        said.append(
            "Without the largest recording the fit of the others misses its peak by "
            f"{100 * fit.left_out_error:+.1f} %."
        )
    return said


def _notes(fit: BatchFit) -> list[str]:
    notes = list(fit.warnings)
    if fit.batch_source is BatchSource.TRACE:
        notes.append(
            "The batch sizes are not given: the sizes of the requests show only how many times "
            "the smallest recording's batch each one is. Give them with --batches."
        )
    if fit.batch_source is BatchSource.NAME:
        found = ", ".join(f"{p.batch:,.0f}" for p in fit.points)
        notes.append(f"The batch sizes {found} were read from the file names; --batches sets them.")
    return notes


def _list(title: str, sentences: Sequence[str], detail: Detail = Detail.USUAL) -> doc.Section:
    return doc.Section(title, [doc.Bullets(list(sentences), detail=detail)])
