"""Formulas for people: what the operations of a layer keep, summed by unit and written out."""

from __future__ import annotations

from collections import defaultdict
from math import ceil

from fragdoctor.estimate.layers import layer_ops, term_bytes, units
from fragdoctor.estimate.precision import precision_of
from fragdoctor.estimate.step import segment_layers
from fragdoctor.model.estimate import KeptTensor
from fragdoctor.model.workload import Workload
from fragdoctor.units import format_count


def layer_terms(workload: Workload, *, crosses: bool = False) -> dict[str, float]:
    """Return bytes kept for each element of each unit, in one layer."""
    total: defaultdict[str, float] = defaultdict(float)
    precision = precision_of(workload.dtype)
    ops = layer_ops(workload, precision, crosses=crosses)
    for op in ops:
        for term in op.saved:
            total[term.unit] += term.bytes_per
    return {unit: total[unit] for unit in units(workload) if total.get(unit)}


def kept_tensors(workload: Workload) -> list[KeptTensor]:
    """Return what each operation of a layer keeps, for ``--explain``."""
    if not workload.shape.has_layers or workload.seq <= 0 or workload.inference:
        return []
    sizes = units(workload)
    return [
        KeptTensor(op.name, t.label, f"{t.unit} x {t.bytes_per:g} B", term_bytes(t, sizes))
        for op in layer_ops(
            workload, precision_of(workload.dtype), crosses=workload.shape.n_cross_layers > 0
        )
        for t in op.saved
    ]


def activation_formula(workload: Workload) -> tuple[str, str]:
    """Return the activations' formula in symbols and in numbers."""
    if not workload.shape.has_layers or workload.seq <= 0:
        return "", ""
    sizes, terms = units(workload), layer_terms(workload)
    symbols = " + ".join(f"{unit} x {each:g}" for unit, each in terms.items())
    numbers = " + ".join(f"{format_count(sizes[unit])} x {each:g}" for unit, each in terms.items())
    n_layers, segment = workload.shape.n_layers, segment_layers(workload)
    if not segment and (n_cross := workload.shape.n_cross_layers):
        whole = layer_terms(workload, crosses=True)
        more = {u: n - terms.get(u, 0) for u, n in whole.items() if n > terms.get(u, 0)}
        symbols_x = " + ".join(f"{unit} x {each:g}" for unit, each in more.items())
        numbers_x = " + ".join(f"{format_count(sizes[u])} x {each:g}" for u, each in more.items())
        return (
            f"L x ({symbols}) B + L_decoder x ({symbols_x}) B",
            f"{n_layers} x ({numbers}) B + {n_cross} x ({numbers_x}) B",
        )
    if not segment:
        return f"L x ({symbols}) B", f"{n_layers} x ({numbers}) B"
    residual = precision_of(workload.dtype).residual
    n_segments = ceil(n_layers / segment)
    inputs = f"{format_count(sizes['B*S*H'])} x {residual:g}"
    return (
        f"ceil(L / n) x B*S*H x {residual:g} B + n x ({symbols}) B",
        f"{n_segments} x {inputs} B + {segment} x ({numbers}) B",
    )


def logits_formula(workload: Workload, most_bytes: int) -> tuple[str, str]:
    """Return the logits' formula; the bytes an element follow from what the loss makes."""
    elements = units(workload)["B*S*V"]
    if not elements:
        return "", ""
    if workload.inference:
        return "B x V x 4 B", f"{workload.batch} x {format_count(workload.shape.vocab)} x 4 B"
    each = f"{round(most_bytes / elements, 1):g}"
    return f"B*S*V x {each} B", f"{format_count(elements)} x {each} B"
