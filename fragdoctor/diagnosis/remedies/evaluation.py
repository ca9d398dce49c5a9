"""Remedies for an evaluation that needs more than training does."""

from __future__ import annotations

from collections.abc import Iterator

from fragdoctor.analysis.result import KeptPattern
from fragdoctor.diagnosis.bench import Attempt, Bench, without
from fragdoctor.diagnosis.remedies.leaks import kept_stack
from fragdoctor.diagnosis.remedies.remedy import CURES, JudgedCase, Proposal, Remedy
from fragdoctor.future.edits import combined
from fragdoctor.future.training_edits import requests_removed
from fragdoctor.model.finding import Confidence, Evidence
from fragdoctor.rules.growth.growing_line import gathered_text


class GatherOnHost(Remedy):
    """Results of an evaluation that are gathered on the device."""

    code = "gather-on-host"
    title = "Gather the results of the evaluation on the host"

    def propose(self, case: JudgedCase) -> Iterator[Proposal]:
        """Propose it where the failure came while an evaluation gathered its results."""
        analysis = case.context.analysis
        kept = None if analysis is None else analysis.gathered
        if kept is None or not case.is_allocator_case:
            return
        yield self.proposal(
            weight=CURES,
            confidence=Confidence.LIKELY,
            change="keep outputs.append(out.cpu()), or only the figure that is wanted",
            why=f"{gathered_text(case.context, kept)}.",
            locations=kept_stack(case.context, kept),
            cost="A copy to the host for each batch; as much host memory.",
            verify="memory_allocated() stays level during evaluation.",
            evidence=(
                Evidence("gathered", kept.survivor_bytes, "bytes", "trace"),
                Evidence("growth per batch", kept.slope_bytes, "bytes", "trace"),
            ),
            saves_bytes=kept.survivor_bytes,
        )

    def attempts(self, case: JudgedCase, bench: Bench, proposal: Proposal | None) -> list[Attempt]:
        """Try the run with what was gathered freed at the end of each batch."""
        del proposal
        analysis = case.context.analysis
        if analysis is None or analysis.gathered is None:
            return []
        if analysis.gathered.pattern is KeptPattern.BUFFER:
            joined = [requests_removed(b.row) for b in bench.growing_buffers]
            return [Attempt.of_edit(combined(joined))] if joined else []
        attempt = without(analysis.gathered)
        return [] if attempt is None else [attempt]
