"""Remedies for an evaluation that needs more than training does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from fragdoctor.analysis.result import KeptPattern
from fragdoctor.diagnosis.bench import Attempt, Bench, without
from fragdoctor.diagnosis.remedies.leaks import kept_stack
from fragdoctor.diagnosis.remedies.remedy import CURES, JudgedCase, Proposal, Remedy
from fragdoctor.diagnosis.remedies.training import layers_checkpointed
from fragdoctor.future.edits import combined
from fragdoctor.future.training_edits import requests_removed
from fragdoctor.model.diagnosis import Cause
from fragdoctor.model.finding import Confidence, Evidence
from fragdoctor.rules.growth.growing_line import gathered_text, idle_graph_text
from fragdoctor.rules.rule import line_text


class GatherOnHost(Remedy):
    """Results of an evaluation that are gathered on the device."""

    code: ClassVar[str] = "gather-on-host"
    title: ClassVar[str] = "Gather the results of the evaluation on the host"

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


class DropIdleGraph(Remedy):
    """An evaluation that keeps what only a backward pass would need."""

    code: ClassVar[str] = "drop-idle-graph"
    title: ClassVar[str] = "Evaluate without building graphs"
    is_modelled: ClassVar[bool] = True

    def propose(self, case: JudgedCase) -> Iterator[Proposal]:
        """Propose it where the failed evaluation keeps as much as a forward pass of training."""
        analysis, context = case.context.analysis, case.context
        graph = None if analysis is None else analysis.idle_graph
        if graph is None or not case.is_allocator_case:
            return
        line = context.frame(graph.frame)
        call = "the call of the model" if line is None else line_text(line)
        yield self.proposal(
            weight=CURES + 8 if case.cause is Cause.TRANSIENT_PEAK else CURES - 25,
            confidence=Confidence.LIKELY,
            change=f"wrap {call} in torch.no_grad() or torch.inference_mode()",
            why=f"{idle_graph_text(context, graph)}.",
            locations=() if line is None else (line,),
            cost="None: evaluation needs no gradients.",
            caveats=(
                "model.eval() alone does not stop graphs from being built.",
                "If a backward pass does follow that call, it needs the graph.",
            ),
            verify="torch.is_grad_enabled() is False there, and the peak is far lower.",
            saves_bytes=graph.n_bytes,
        )

    def attempts(self, case: JudgedCase, bench: Bench, proposal: Proposal | None) -> list[Attempt]:
        """Try it as a run of checkpointed layers, which keep more than a run without a graph."""
        del bench
        return [] if proposal is None else list(map(Attempt.of_edit, layers_checkpointed(case)))
