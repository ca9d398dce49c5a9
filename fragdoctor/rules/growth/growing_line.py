"""FD401: a line whose memory grows step by step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Final

from fragdoctor.analysis.result import DeviceAnalysis, Growth
from fragdoctor.model.finding import Confidence, Evidence, Finding, Severity
from fragdoctor.rules.base import Need, Rule
from fragdoctor.rules.context import Context, line_text
from fragdoctor.units import format_size, plural

MAX_LINES: Final = 5
"""Lines named; a leak of a whole graph shows as many lines of the model."""


class GrowingLine(Rule):
    """Memory from one line grows step by step and is not freed.

    What it finds. Lines whose blocks of many different steps are all still live at the end.

    Why it costs memory. It grows until nothing is left, however large the device is.

    Evidence used. Allocation and free events with their stacks, cut into steps of the program.

    What to do. Keep loss.item() or tensor.detach().cpu() in place of tensors that carry a graph,
    clear lists and caches, evaluate under torch.no_grad(), release kept exceptions.

    What it can get wrong. A cache that fills on purpose grows too, until it is full. Short traces
    show too few steps to tell.

    Example. features.append(output) keeps 16 MiB a step.

    References. FAQ: My model reports "cuda runtime error(2)": don't accumulate history across your
    training loop.
    """

    code: ClassVar[str] = "FD401"
    name: ClassVar[str] = "growing-line"
    summary: ClassVar[str] = "Memory from one line grows step by step and is not freed"
    severity: ClassVar[Severity] = Severity.ERROR
    needs: ClassVar[frozenset[Need]] = frozenset({Need.TRACE})

    def check(self, context: Context) -> Iterator[Finding]:
        """Yield the growing lines, the largest first."""
        analysis = context.analysis
        assert analysis is not None  # noqa: S101 - needs
        for growth in analysis.growth[:MAX_LINES]:
            stack = context.python_stack(growth.stack)
            line = context.frame(growth.frame) or (stack[0] if stack else None)
            leads = is_significant(growth, analysis)
            yield self.finding(
                context,
                f"{line_text(line)} keeps {format_size(growth.slope_bytes)} more in each of "
                f"{plural(growth.n_steps, 'step')}: {plural(growth.n_survivors, 'block')} "
                f"of {format_size(growth.survivor_bytes)} "
                f"{'is' if growth.n_survivors == 1 else 'are'} live.",
                severity=Severity.ERROR if leads else Severity.INFO,
                confidence=Confidence.LIKELY if leads else Confidence.POSSIBLE,
                n_bytes=growth.survivor_bytes,
                evidence=(
                    Evidence("growth per step", growth.slope_bytes, "bytes", "trace"),
                    Evidence("survivors", growth.survivor_bytes, "bytes", "trace"),
                    Evidence("steadiness", growth.steadiness, "share", "trace"),
                ),
                locations=stack or (() if line is None else (line,)),
            )


STEADY_SHARE: Final = 0.8
"""A leak grows in nearly every step; caches and warm-up stop after the first ones."""

MIN_STEPS: Final = 4
"""Fewer steps cannot distinguish growth from the filling of buffers and optimizer state."""

MANY_STEPS: Final = 8
"""Something kept every tenth step is a leak too, once it was seen often enough."""

LARGE_SHARE: Final = 0.05
"""Survivors of at least a twentieth of live memory: less is no reason for a verdict."""


def leading_growth(analysis: DeviceAnalysis) -> Growth | None:
    """Return the growth that a verdict should be about, the largest significant one."""
    significant = [g for g in analysis.growth if is_significant(g, analysis)]
    return max(significant, key=lambda g: g.survivor_bytes, default=None)


def total_growth(analysis: DeviceAnalysis) -> int:
    """Return the bytes of all survivors of significant growth: a graph leaks by many lines."""
    return sum(g.survivor_bytes for g in analysis.growth if is_significant(g, analysis))


def is_significant(growth: Growth, analysis: DeviceAnalysis) -> bool:
    """Return whether a growth is steady, long and large enough to be called a leak."""
    is_regular = growth.steadiness >= STEADY_SHARE or growth.n_steps >= MANY_STEPS
    return (
        is_regular
        and growth.n_steps >= MIN_STEPS
        and growth.survivor_bytes >= LARGE_SHARE * max(1, analysis.active_bytes)
    )
