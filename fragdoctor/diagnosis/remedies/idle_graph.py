"""The remedy for an evaluation that builds an autograd graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from fragdoctor.diagnosis.bench import Attempt, Bench
from fragdoctor.diagnosis.remedies.remedy import CURES, HELPS, JudgedCase, Proposal, Remedy
from fragdoctor.diagnosis.remedies.training import layers_checkpointed
from fragdoctor.model.diagnosis import Cause
from fragdoctor.model.finding import Confidence, line_text
from fragdoctor.rules.growth.growing_line import idle_graph_text


class DropIdleGraph(Remedy):
    """An evaluation that keeps what only a backward pass would need."""

    code: ClassVar[str] = "drop-idle-graph"
    title: ClassVar[str] = "Evaluate without building graphs"
    is_modelled: ClassVar[bool] = True

    def propose(self, case: JudgedCase) -> Iterator[Proposal]:
        """Propose it if the failed evaluation keeps as much as a training forward pass."""
        analysis, context = case.context.analysis, case.context
        graph = None if analysis is None else analysis.idle_graph
        if graph is None or not case.is_allocator_case:
            return
        line = context.frame(graph.frame)
        call = "the call of the model" if line is None else line_text(line)
        yield self.proposal(
            weight=CURES if case.cause is Cause.TRANSIENT_PEAK else HELPS,
            confidence=Confidence.LIKELY,
            change=f"wrap {call} in torch.no_grad() or torch.inference_mode()",
            why=f"{idle_graph_text(context, graph)}.",
            locations=() if line is None else (line,),
            cost="None: evaluation needs no gradients.",
            caveats=(
                "model.eval() alone does not stop graphs from being built.",
                "If a backward pass does follow that call, it needs the graph.",
            ),
            saves_bytes=graph.n_bytes,
        )

    def attempts(self, case: JudgedCase, bench: Bench, proposal: Proposal | None) -> list[Attempt]:
        """Try the run with checkpointed layers, which keep more than a run without a graph."""
        del bench
        return [] if proposal is None else list(map(Attempt.of_edit, layers_checkpointed(case)))
