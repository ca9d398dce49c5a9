"""FD203: one step needs far more than the steps before it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from fragdoctor.model.finding import Confidence, Evidence, Finding, Severity
from fragdoctor.rules.base import Need, Rule
from fragdoctor.rules.context import Context
from fragdoctor.rules.growth.significance import leading_growth
from fragdoctor.rules.transients import find_transient
from fragdoctor.units import format_size


class TransientPeak(Rule):
    """The last step needs far more memory than the steps before it.

    What it finds. A last ascent of live memory that is half as high again as any peak before it.

    Why it costs memory. The device must be large enough for the highest moment, not for the usual
    one: an evaluation with another batch size, a long sample, logits of a large vocabulary.

    Evidence used. Live memory after each event of the trace.

    What to do. Bound the largest sample, evaluate in smaller batches, compute the loss in chunks.

    What it can get wrong. A program that starts small and grows in stages looks the same.

    Example. Steps peak at 3 GiB, and an evaluation with eight times the batch at 7 GiB.

    References. Understanding CUDA Memory Usage.
    """

    code: ClassVar[str] = "FD203"
    name: ClassVar[str] = "transient-peak"
    summary: ClassVar[str] = "One step needs far more memory than the steps before it"
    severity: ClassVar[Severity] = Severity.WARNING
    needs: ClassVar[frozenset[Need]] = frozenset({Need.TRACE})

    def check(self, context: Context) -> Iterator[Finding]:
        """Yield one finding for the last ascent."""
        analysis = context.analysis
        assert analysis is not None  # noqa: S101 - needs
        spike = find_transient(context, analysis)
        if spike is None or leading_growth(context, analysis) is not None:
            return
        yield self.finding(
            context,
            f"Live memory rises to {format_size(spike.peak_bytes)}, against "
            f"{format_size(spike.usual_bytes)} at the peaks before.",
            severity=Severity.WARNING if analysis.ooms else Severity.INFO,
            confidence=Confidence.LIKELY,
            n_bytes=spike.peak_bytes - spike.usual_bytes,
            evidence=(
                Evidence("peak", spike.peak_bytes, "bytes", "trace"),
                Evidence("usual peak", spike.usual_bytes, "bytes", "trace"),
            ),
        )
