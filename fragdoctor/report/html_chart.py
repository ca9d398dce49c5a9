"""A chart as SVG, drawn from numbers alone."""

from __future__ import annotations

import math
from typing import Final

from markupsafe import Markup

from fragdoctor.report.document import Chart
from fragdoctor.report.markup import tag
from fragdoctor.units import GIB, KIB, MIB, TIB

WIDTH: Final = 1104
HEIGHT: Final = 340
LEFT: Final = 76
RIGHT: Final = 16
TOP: Final = 18
BOTTOM: Final = 34
_MAX_TICKS: Final = 12
_AIR: Final = 0.02
"""The share of the width that stays free beside the outermost points; labels need more."""


def chart(one: Chart) -> Markup:
    """Return a chart: points with their labels, a line that fits them, and two axes."""
    top = max(1, *one.y, *(y for _, y in one.fit)) * 1.06
    low, span = min(one.x), (max(one.x) - min(one.x)) or 1.0

    def across(x: float) -> str:
        return f"{LEFT + (_AIR + (1 - 3 * _AIR) * (x - low) / span) * (WIDTH - LEFT - RIGHT):.1f}"

    def up(y: float, below: int = 0) -> str:
        return f"{HEIGHT - BOTTOM - y / top * (HEIGHT - BOTTOM - TOP) + below:.1f}"

    sizes = [
        (
            tag("line", class_="grid", x1=LEFT, x2=WIDTH - RIGHT, y1=up(size), y2=up(size)),
            tag("text", label, class_="end", x=LEFT - 8, y=up(size, 4)),
        )
        for size, label in _size_ticks(top)
    ]
    named = one.x[:: math.ceil(len(one.x) / _MAX_TICKS)]
    axis = [tag("text", f"{x:g}", class_="mid", x=across(x), y=HEIGHT - 14) for x in named]
    fit = "M" + "L".join(f"{across(x)} {up(y)}" for x, y in one.fit)
    points = [
        tag("g", tag("circle", tag("title", label), cx=across(x), cy=up(y), r=4), class_="r0")
        for x, y, label in zip(one.x, one.y, one.labels, strict=True)
    ]
    picture = tag(
        "svg",
        sizes,
        axis,
        tag("path", class_="fit r1", d=fit) if one.fit else None,
        points,
        class_="chart",
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_label=one.label,
    )
    return tag("div", picture, class_="scroll", tabindex=0, role="region", aria_label=one.label)


def _size_ticks(top: float) -> list[tuple[float, str]]:
    units = ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"))
    unit, name = next((pair for pair in units if top >= 2 * pair[0]), (1, "B"))
    step = _round_step(top / unit / 5)
    return [
        (i * step * unit, f"{i * step:g} {name}" if i else "0")
        for i in range(int(top / unit / step) + 1)
    ]


def _round_step(rough: float) -> float:
    """Return the next number up that is 1, 2 or 5 times a power of ten."""
    power: float = 10.0 ** math.floor(math.log10(rough))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))
