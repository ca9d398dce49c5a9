"""Peak memory against batch size as text: the largest batch, the fit, and why it bends."""

from __future__ import annotations

import posixpath
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
from fragdoctor.model.finding import Location
from fragdoctor.report import escape
from fragdoctor.report.base import RenderOptions, Verbosity
from fragdoctor.report.text.page import Cell, Column, Page
from fragdoctor.units import format_share, format_size

MAX_LINES: Final = 8
WORDS: Final = {
    Scaling.FIXED: "fixed",
    Scaling.LINEAR: "with the batch",
    Scaling.FASTER: "faster than the batch",
    Scaling.SLOWER: "slower than the batch",
    Scaling.STEPS: "in steps",
    Scaling.IRREGULAR: "up and down",
    Scaling.UNTESTED: "grows",
}


def render_batch_fit(fit: BatchFit, options: RenderOptions, *, explain: bool = False) -> str:
    """Return the fit as text; with ``Verbosity.QUIET`` its first sentence."""
    sentence = batch_sentence(fit)
    if options.verbosity is Verbosity.QUIET:
        return escape.terminal(sentence) + "\n"
    page = Page(options)
    is_none = fit.prediction is not None and _fits_none(fit.prediction)
    page.paragraph((sentence, "bold red" if is_none else "bold"), indent=0)
    page.paragraph(linearity_sentence(fit), indent=0)
    _write_points(page, fit)
    if fit.prediction is not None:
        _write_prediction(page, fit, fit.prediction)
    _write_model(page, fit)
    _write_list(page, "What departs from a straight line", fit.why)
    _write_lines(page, fit)
    if explain:
        _write_method(page, fit)
    _write_list(page, "Mind", _notes(fit))
    return page.render()


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


def _write_points(page: Page, fit: BatchFit) -> None:
    page.heading("Recordings")
    columns = [
        Column(title="batch", align="right"),
        Column(title="peak allocated", align="right"),
        Column(title="fit", align="right"),
        Column(title="off", align="right"),
        Column(title="peak reserved", align="right"),
        Column("path", title="recording"),
    ]
    page.table(columns, [_point(fit, p) for p in fit.points])


def _point(fit: BatchFit, point: BatchPoint) -> list[Cell]:
    fitted = point.fitted_bytes
    bound = ">= " if point.is_lower_bound else ""
    off = "-"
    if fitted is not None and not point.is_lower_bound:
        share = fitted / max(1, point.peak_allocated_bytes) - 1
        off = f"{100 * share:+.1f} %"
    batch = f"{point.batch:,.0f}" if _is_whole(fit) else f"x {point.batch:.4g}"
    return [
        batch,
        bound + format_size(point.peak_allocated_bytes),
        format_size(fitted),
        off,
        bound + format_size(point.peak_reserved_bytes),
        [(point.source, "dim"), *([("  OOM", "red")] if point.is_lower_bound else [])],
    ]


def _write_prediction(page: Page, fit: BatchFit, prediction: Prediction) -> None:
    page.heading("The largest batch")
    rows: list[list[Cell]] = [["GPU", format_size(prediction.total_bytes), prediction.gpu]]
    if prediction.context_bytes:
        rows.append(["CUDA context", format_size(prediction.context_bytes), "--context changes it"])
    if prediction.headroom_bytes:
        rows.append(["headroom", format_size(prediction.headroom_bytes), "kept free"])
    rows.append(["for PyTorch", format_size(prediction.capacity_bytes), ""])
    if prediction.largest is not None and not prediction.is_unbounded:
        how = "replay of the requests" if prediction.method == "replay" else "the fit"
        rows.append(
            [
                f"peak at {_batch(fit, prediction.largest)}",
                format_size(prediction.bytes_at_largest),
                f"allocated, by {how}; reserved was {prediction.overhead:.2f} x allocated",
            ]
        )
    page.table([Column(), Column(align="right"), Column("wrap")], rows)
    for sentence in _ends(fit, prediction):
        page.labelled("-", sentence, indent=2, label_width=2)
    if prediction.reasons:
        page.paragraph(f"Confidence is {prediction.confidence}: {'; '.join(prediction.reasons)}.")


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


def _write_model(page: Page, fit: BatchFit) -> None:
    page.heading("What grows", "peak = fixed + batch x per sample")
    unit = "per sample" if _is_whole(fit) else "per smallest batch"
    columns = [
        Column(title="peak"),
        Column(title="fixed", align="right"),
        Column(title=unit, align="right"),
        Column(title="worst off", align="right"),
        Column("wrap", title="grows"),
    ]
    page.table(
        columns,
        [
            _curve("allocated", fit.allocated),
            _curve("active", fit.active),
            _curve("reserved", fit.reserved),
        ],
    )
    rest = _rest_sentence(fit)
    if rest:
        page.paragraph((rest, "dim"))


def _curve(name: str, curve: Curve) -> list[Cell]:
    if curve.bend_bytes:
        growth = f"{format_size(curve.last_slope_bytes)} at last"
        return [name, "-", growth, format_size(curve.worst_residual_bytes), WORDS[curve.scaling]]
    return [
        name,
        format_size(curve.fixed_bytes),
        format_size(curve.per_sample_bytes),
        format_size(curve.worst_residual_bytes),
        WORDS[curve.scaling],
    ]


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


def _write_lines(page: Page, fit: BatchFit) -> None:
    if not fit.lines:
        return
    page.heading("By line of the program", "what each holds at the peak of large batches")
    shown = fit.lines[:MAX_LINES]
    first, last = fit.line_batches[0], fit.line_batches[-1]
    columns = [
        Column(title=f"at {_batch_short(fit, first)}", align="right"),
        Column(title=f"at {_batch_short(fit, last)}", align="right"),
        Column(title="grows"),
        Column("path", title="line"),
    ]
    page.table(columns, [_line_row(row) for row in shown])
    if len(fit.lines) > len(shown):
        page.paragraph((f"and {len(fit.lines) - len(shown)} lines that hold less", "dim"))


def _batch_short(fit: BatchFit, batch: float | None) -> str:
    if batch is None:
        return "none"
    return f"{batch:,.0f}" if _is_whole(fit) else f"x {batch:.4g}"


def _line_row(row: LineScaling) -> list[Cell]:
    return [
        format_size(row.n_bytes[0]),
        format_size(row.n_bytes[-1]),
        WORDS[row.curve.scaling],
        _line_text(row.line),
    ]


def _line_text(line: Location | None) -> str:
    if line is None:
        return "(no stack: mostly the backward pass)"
    return f"{posixpath.basename(line.filename)}:{line.line} {line.function}"


def _write_method(page: Page, fit: BatchFit) -> None:
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
    _write_list(page, "How it was found", said)


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


def _write_list(page: Page, title: str, sentences: Sequence[str]) -> None:
    if not sentences:
        return
    page.heading(title)
    for sentence in sentences:
        page.labelled("-", sentence, indent=2, label_width=2)
