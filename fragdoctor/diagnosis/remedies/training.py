"""Changes to a training program that lower its peak."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from fragdoctor.analysis.training_run import only_infers
from fragdoctor.diagnosis.bench import Attempt, Bench
from fragdoctor.diagnosis.remedies.capacity import (
    CUT,
    SavingRemedy,
    first_enough,
    is_cut,
    may_be_activations,
    saved_bytes,
    saving_text,
)
from fragdoctor.diagnosis.remedies.remedy import (
    Burden,
    JudgedCase,
    Proposal,
    Remedy,
    Weight,
    proposes,
)
from fragdoctor.future import training_edits
from fragdoctor.future.edits import Edit, combined
from fragdoctor.model.arrays import distinct
from fragdoctor.model.diagnosis import SHORT_OF_MEMORY, Cause
from fragdoctor.model.finding import Confidence, line_text
from fragdoctor.model.frameworks import HAVE_FOREACH, HAVE_FUSED
from fragdoctor.rules.growth.growing_line import idle_graph_text
from fragdoctor.units import format_share, listed, plural

N_CHUNKS: Final = 8
"""Number of chunks of a loss: fewer save less; more cost time and save little more."""


class FusedOptimizer(SavingRemedy):
    """By default all parameters are updated together, with temporaries for all of them."""

    code = "fused-optimizer"
    title = "Update the parameters in one fused kernel"
    burden = Burden.NONE
    doing = "the optimizer fused"
    change = "set fused=True where the optimizer is made"
    cost = "None; it is usually faster."
    caveats = (
        "Adam, AdamW, SGD and Adagrad have it; another optimizer may only offer foreach=False.",
    )
    effort = 1

    def edits(self, case: JudgedCase) -> Sequence[Edit]:
        """Return the edit that removes the optimizer's temporaries, if it can be fused."""
        run = case.training
        if run is None or not len(run.temporary_row) or not can_be_fused(case):
            return ()
        return (training_edits.requests_removed(run.temporary_row, "fused optimizer"),)


_OPTIMIZER: Final = re.compile(r"/torch/optim/(\w+)\.py$")


def can_be_fused(case: JudgedCase) -> bool:
    """Return whether the optimizer in the stacks has a fused kernel; True if none is seen."""
    return _is_one_of(HAVE_FUSED, case) is not False


def _is_one_of(names: Sequence[str], case: JudgedCase) -> bool | None:
    """Return whether one of these optimizers of torch.optim is in the stacks, None without any.

    An optimizer from elsewhere has no file of its own there, only that of its base class.
    """
    paths = (file[:1000].replace("\\", "/") for file in case.files)
    seen = {m[1] for path in paths if (m := _OPTIMIZER.search(path))}
    return not seen.isdisjoint(name.lower() for name in names) if seen else None


class ChunkedLoss(SavingRemedy):
    """Logits of all tokens at once, in several precisions, are often the peak of a step."""

    code = "chunked-loss"
    title = "Compute the loss in chunks"
    doing = f"the loss in {N_CHUNKS} chunks"
    change = (
        "compute the loss over parts of the tokens, each under torch.utils.checkpoint; or use a "
        "fused linear cross-entropy (Liger kernel, cut-cross-entropy), which never stores the "
        "logits"
    )
    cost = "The output layer runs twice with checkpointed chunks."
    caveats = (
        "The sum over chunks must be divided by the number of all tokens.",
        "A chunk's gradient of the output layer is held beside their sum, which is not included.",
    )
    effort = 2

    def edits(self, case: JudgedCase) -> Sequence[Edit]:
        """Return the edit that divides the loss's large requests."""
        run = case.training
        if run is None or not len(run.loss_row):
            return ()
        first, end = run.loss_span
        spans = (first, run.forward[1])
        return (training_edits.loss_in_chunks(spans, end, run.loss_row, N_CHUNKS),)


class GradientCheckpointing(SavingRemedy):
    """Gradient checkpointing: less memory for activations, more compute."""

    code = "gradient-checkpointing"
    title = "Checkpoint the layers of the model"
    burden = Burden.SLOWER
    is_usual = True
    acts_on = "activations"
    doing = "the layers checkpointed"
    change = (
        "call each repeated block through torch.utils.checkpoint.checkpoint(block, x, "
        "use_reentrant=False)"
    )
    cost = "About 33% more compute: the forward pass runs once more."
    caveats = ("Training only: it does nothing for weights, optimizer state or inference.",)
    effort = 3

    def propose(self, case: JudgedCase) -> Iterator[Proposal]:
        """Propose it if activations fill the device or, without a trace, for capacity."""
        if case.training is not None or not may_be_activations(case):
            yield from super().propose(case)
            return
        a = case.context.analysis
        is_inference = a is not None and a.phases is not None and only_infers(a.trace, a.phases)
        if is_inference or case.is_checkpointed:
            return
        yield self.proposal(
            title=""
            if a is not None or case.trains
            else f"If this is training: {self.title.lower()}",
            weight=Weight.MAY_HELP,
            why="In training, activations are often the largest part. Checkpointed layers keep "
            "their inputs only, and compute the rest again in the backward pass.",
        )

    def edits(self, case: JudgedCase) -> Sequence[Edit]:
        """Return the edit that checkpoints equal layers, unless they already are."""
        return layers_checkpointed(case)

    def basis(self, case: JudgedCase) -> str:
        """Return which calls the replay runs again, and how much of the activations is in them."""
        calls = None if case.training is None else case.training.layers
        if calls is None:
            return ""
        n = round(len(calls.first_row) / len(distinct(calls.forward_end_row)))
        lines: dict[tuple[str, str], list[int]] = {}
        for frame in filter(None, map(case.context.frame, calls.functions.tolist())):
            lines.setdefault((frame.function, frame.basename), []).append(frame.line)
        where = [
            f"{name} ({file}:{'-'.join(map(str, distinct(np.array([min(own), max(own)]))))})"
            for (name, file), own in lines.items()
        ]
        named = f" of {listed(where)}" if where else ""
        return (
            f"In each pass, {plural(n, 'repeated call')}{named} run again. They hold "
            f"{format_share(calls.kept_share, 1.0)} of what the pass keeps; the rest stays."
        )


def layers_checkpointed(case: JudgedCase) -> tuple[Edit, ...]:
    """Return the edit that checkpoints equal layers; nothing if none are seen or all are done."""
    run = case.training
    if run is None or run.layers is None or run.is_checkpointed:
        return ()
    calls = run.layers
    return (training_edits.checkpointed(calls.first_row, calls.end_row, calls.forward_end_row),)


class SmallerOptimizerState(SavingRemedy):
    """Optimizer state: created in the first step, as large as the weights or twice that."""

    code = "smaller-optimizer-state"
    title = "Keep the optimizer's state in 8 bits"
    burden = Burden.RESULTS
    is_usual = True
    acts_on = "optimizer state"
    doing = "8-bit optimizer states"
    change = (
        "use an 8-bit optimizer from bitsandbytes.optim (AdamW8bit, SGD8bit) or torchao.optim; "
        "Adafactor, or SGD without momentum, keeps even less"
    )
    cost = "Slightly noisier updates; another optimizer needs its own tuning."
    caveats = ("The prediction assumes float32 states, which are the default.",)
    effort = 4

    def edits(self, case: JudgedCase) -> Sequence[Edit]:
        """Return the edit that quantizes the states."""
        run = case.training
        if run is None or not len(run.state_row):
            return ()
        return (training_edits.states_quantized(run.state_row, run.temporary_row),)


class OffloadOptimizer(SavingRemedy):
    """Optimizer state on the host."""

    code = "offload-optimizer"
    title = "Keep the optimizer's state on the host"
    burden = Burden.SLOWER
    doing = "the optimizer offloaded"
    change = "use torchao's CPUOffloadOptimizer, FSDP's CPUOffload or DeepSpeed ZeRO-Offload"
    cost = "Gradients and weights cross the bus in every step."
    effort = 6

    def edits(self, case: JudgedCase) -> Sequence[Edit]:
        """Return the edit that removes the states from the device."""
        run = case.training
        if run is None or not len(run.state_row):
            return ()
        rows = distinct(np.append(run.state_row, run.temporary_row))
        return (training_edits.requests_removed(rows, "optimizer states on the host"),)


class KeptOnHost(SavingRemedy):
    """What a program keeps beside its model: a data set, a replay buffer, a bank of features."""

    code = "keep-on-host"
    title = "Keep on the host what every step only reads"
    burden = Burden.SLOWER
    doing = "it on the host"
    cost = "A copy to the GPU for each batch; as much host memory."
    effort = 5

    def propose(self, case: JudgedCase) -> Iterator[Proposal]:
        """Propose it if one line made most of what outlives the steps and is no part of a model."""
        kept = case.most_kept if case.cause in SHORT_OF_MEMORY else None
        place = None if kept is None else case.context.frame(kept[0])
        if place is None:
            return
        where = line_text(place)
        yield self.proposal(
            title=f"Keep what {where} makes on the host",
            weight=Weight.MAY_HELP,
            change=f"leave out .cuda() or .to(device) at {where} and move each batch instead: "
            "batch.to(device, non_blocking=True), from pinned memory; what a step needs whole "
            "takes less as a sparse tensor or in 16 bits",
            why="It lowers the peak of live memory; by how much was not tried.",
            locations=(place,),
            attempts=self.attempts(case),
        )

    def edits(self, case: JudgedCase) -> Sequence[Edit]:
        """Return the edit that never makes it."""
        kept = case.most_kept
        return (
            [] if kept is None else [training_edits.requests_removed(kept[1], "kept on the host")]
        )


class StepInBackward(SavingRemedy):
    """A gradient that is used as soon as it is computed need not wait for the others."""

    code = "step-in-backward"
    title = "Update each parameter during the backward pass"
    doing = "the optimizer's step in the backward pass"
    change = (
        "make one fused optimizer per parameter and call it from "
        "parameter.register_post_accumulate_grad_hook(...), then set the gradient to None"
    )
    cost = "None in speed; no gradient is left to clip, scale or accumulate."
    caveats = ("It excludes gradient accumulation, clipping by the global norm and GradScaler.",)
    effort = 7

    def edits(self, case: JudgedCase) -> Sequence[Edit]:
        """Return the edit that drops each gradient as soon as it is computed."""
        run = case.training
        if run is None or not len(run.optimizer[0]) or not len(run.gradient_row):
            return ()
        if not run.n_whole_steps:  # nothing shows a forward pass beside the optimizer's state
            return ()
        return (training_edits.step_in_backward(run.gradient_row, run.temporary_row),)


class OptimizerWithoutForeach(SavingRemedy):
    """Without fusing, updating one parameter at a time needs temporaries for only one."""

    code = "optimizer-without-foreach"
    title = "Let the optimizer update one parameter at a time"
    doing = "foreach=False in the optimizer"
    change = "set foreach=False where the optimizer is made"
    cost = "The step becomes slower: one kernel launch per parameter."
    effort = 9

    def edits(self, case: JudgedCase) -> Sequence[Edit]:
        """Return the edit that keeps only the temporaries of the largest parameter."""
        run = case.training
        has_foreach = _is_one_of(HAVE_FOREACH, case) and not can_be_fused(case)
        if run is None or not len(run.temporary_row) or not has_foreach:
            return ()
        return (training_edits.optimizer_one_by_one(run.temporary_row, run.optimizer[0]),)


@proposes("Evaluate without building graphs", is_modelled=True)
def drop_idle_graph(remedy: Remedy, case: JudgedCase) -> Iterator[Proposal]:
    """Propose it if the failed evaluation keeps as much as a training forward pass.

    An evaluation that keeps what only a backward pass would need.
    """
    analysis, context = case.context.analysis, case.context
    graph = None if analysis is None else analysis.idle_graph
    if graph is None or not case.is_allocator_case:
        return
    line = context.frame(graph.frame)
    call = "the call of the model" if line is None else line_text(line)
    yield remedy.proposal(
        weight=Weight.CURES if case.cause is Cause.TRANSIENT_PEAK else Weight.HELPS,
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
        # Checkpointed layers keep more than a run without a graph.
        attempts=list(map(Attempt.of_edit, layers_checkpointed(case))),
    )


class CombinedSavings(Remedy):
    """Several changes together, if none is enough alone."""

    code = "combined-savings"
    title = "Combine several savings"
    burden = Burden.SLOWER

    def together(
        self, case: JudgedCase, bench: Bench, tested: Sequence[Proposal]
    ) -> Iterator[Proposal]:
        """Yield the smallest combination of savings that is enough, or all of them together."""
        saving = [
            (p.recommendation, p.remedy)
            for p in tested
            if isinstance(p.remedy, SavingRemedy) and not p.is_rejected
        ]
        saving = [(said, part) for said, part in saving if said.saves_bytes]
        parts = sorted((part for _, part in saving if part.combines), key=lambda part: part.effort)
        if any(isinstance(part, SmallerOptimizerState) for part in parts):
            others = (OffloadOptimizer, OptimizerWithoutForeach)
            parts = [part for part in parts if not isinstance(part, others)]
        alone = [said.predicted for said, _ in saving if said.predicted.fits]
        is_enough = any(p.outlook is None or not p.outlook.fails for p in alone)
        if len(parts) < MIN_COMBINED or (is_enough and not bench.recorded.fits):
            return
        edits = [part.edits(case)[0] for part in parts]
        attempts = [
            Attempt.of_edit(combined(edits[:n]), is_saving=True)
            for n in range(MIN_COMBINED, len(edits) + 1)
        ]
        outcomes = [outcome for outcome in bench.run(attempts) if outcome is not None]
        if not outcomes:
            return
        enough = None if bench.recorded.fits else first_enough(bench, outcomes)
        best = enough or bench.looked_on(outcomes[-1])
        saved = saved_bytes(bench, best)
        most_alone = max(said.saves_bytes or 0 for said, _ in saving)
        if enough is None and saved < WORTH_COMBINING * most_alone:
            return
        parts = parts[: best.attempt.what_if.edit.count(" + ") + 1]
        yield self.proposal(
            title=f"Combine: {', '.join(part.doing for part in parts)}",
            weight=Weight.HELPS,
            confidence=Confidence.LIKELY,
            change="; ".join(part.change for part in parts),
            why=saving_text(case, bench, best),
            cost=" ".join(part.cost for part in parts),
            caveats=(CUT,) if is_cut(case, bench) else (),
            saves_bytes=saved,
        ).with_prediction(bench.predicted(best.result))


MIN_COMBINED: Final = 2
WORTH_COMBINING: Final = 1.2
"""A combination is worth mentioning if it saves this many times what its best part saves alone."""
