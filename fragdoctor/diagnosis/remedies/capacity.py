"""Remedies if the device is too small: a smaller batch or model, or training with a lower peak."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from itertools import dropwhile
from typing import ClassVar, Final

from msgspec.structs import replace

from fragdoctor.analysis.step_scale import LARGER
from fragdoctor.diagnosis.bench import Attempt, Bench, Effect
from fragdoctor.diagnosis.decision import OUTSIDE, SLIM_MARGIN_SHARE
from fragdoctor.diagnosis.remedies.framework_words import words_in
from fragdoctor.diagnosis.remedies.leaks import is_evaluation
from fragdoctor.diagnosis.remedies.less_at_once import ANY_BATCH, fewer_bytes, less_of_batch
from fragdoctor.diagnosis.remedies.remedy import (
    Burden,
    JudgedCase,
    Proposal,
    Remedy,
    Weight,
    helps,
    proposes,
)
from fragdoctor.future.edits import Edit
from fragdoctor.future.steps import StepKind, Steps
from fragdoctor.future.training_edits import batch_scaled, passes_scaled, requests_limited
from fragdoctor.model.diagnosis import SHORT_OF_MEMORY, Cause
from fragdoctor.model.finding import Confidence, line_text
from fragdoctor.model.frameworks import Change
from fragdoctor.model.measures import OFFLOADING, SHARDED_WEIGHTS, SHARDING
from fragdoctor.model.phases import Category
from fragdoctor.model.simulation import OutlookState
from fragdoctor.rules.failed_request import OF_A_COPY
from fragdoctor.rules.told_weights import is_told_to_train_all, told_card_bytes, told_weights
from fragdoctor.rules.traceback_signs import INFERENCE, LOADING_WEIGHTS, is_seen_to_run
from fragdoctor.units import MIB, format_share, format_size

MIN_SAVING_SHARE: Final = 0.03
"""Smallest share of the peak worth saving; less is also within the error of the edits."""

CUT: Final = (
    "The recording ends before a step is complete: this figure does not include the rest of it."
)


class SavingRemedy(Remedy):
    """A change of a training program that lowers its peak.

    Attributes:
        doing: the change as part of a sentence: "with the layers checkpointed".
        effort: the order in which changes are combined, with the least work first.
        is_usual: whether most guides recommend it, so that it is mentioned if it does not help.
        acts_on: what the change makes smaller.
        combines: whether the change is tried together with others.
    """

    burden = Burden.CHANGE
    doing: ClassVar[str]
    effort: ClassVar[int]
    is_usual: ClassVar[bool] = False
    acts_on: ClassVar[str] = "that"
    combines: ClassVar[bool] = True

    @abstractmethod
    def edits(self, case: JudgedCase) -> Sequence[Edit]:
        """Return the change as edits of the recorded requests, the mildest first.

        The result is empty if the trace does not show what the change would act on.
        """

    def basis(self, case: JudgedCase) -> str:  # noqa: ARG002 - for those that override it
        """Return what the edits act on, if that has to be told."""
        return ""

    def propose(self, case: JudgedCase) -> Iterator[Proposal]:
        """Propose the change if memory is short, or if a healthy run could do with less."""
        if case.training is None:
            return
        if attempts := self.attempts(case):
            yield self.proposal(
                weight=Weight.MAY_HELP,
                why="It lowers the peak of live memory; by how much was not tried.",
                attempts=attempts,
            )

    def attempts(self, case: JudgedCase) -> list[Attempt]:
        """Return the run with this change."""
        return [Attempt.of_edit(edit, is_saving=True) for edit in self.edits(case)]

    def judged(
        self, case: JudgedCase, bench: Bench, proposal: Proposal, outcomes: Sequence[Effect]
    ) -> Proposal | None:
        """Return the change with what it saves, unless it saves next to nothing."""
        best = self.chosen(bench, outcomes)
        saved = saved_bytes(bench, best)
        if saved < MIN_SAVING_SHARE * bench.peak_bytes:
            return self.useless(case, bench, proposal, saved)
        # An edit only models the changed program, so nothing is proven.
        sure = max(bench.confidence(best.result), Confidence.LIKELY, key=list(Confidence).index)
        judged = proposal.saying(
            why=" ".join(filter(None, (saving_text(case, bench, best), self.basis(case)))),
            confidence=sure if best.result.outlook is not None else Confidence.LIKELY,
            saves_bytes=saved,
            predicted=bench.predicted(best.result),
        )
        if is_cut(case, bench):
            judged = judged.with_caveat(CUT)
        return replace(judged, weight=Weight.HELPS)

    def chosen(self, bench: Bench, outcomes: Sequence[Effect]) -> Effect:
        """Return the outcome that represents the change: its first edit that is enough."""
        enough = first_enough(bench, outcomes)
        return enough or bench.looked_on(min(outcomes, key=lambda o: o.peak_bytes or 0))

    def useless(
        self, case: JudgedCase, bench: Bench, proposal: Proposal, saved: int
    ) -> Proposal | None:
        """Return a change that saves next to nothing as rejected if it is the usual advice."""
        if not self.is_usual or case.cause not in SHORT_OF_MEMORY:
            return None
        less = f"falls by {format_size(saved)} only" if saved >= MIB else "does not fall"
        reason = self.basis(case) or f"It is made up of things other than {self.acts_on}."
        why = (
            f"Replayed with {self.doing}: the peak of {format_size(bench.peak_bytes)} live memory "
            f"{less}. {reason}"
        )
        told = proposal.saying(why=why, confidence=Confidence.LIKELY, saves_bytes=None)
        return replace(told, is_rejected=True)


def first_enough(bench: Bench, outcomes: Sequence[Effect]) -> Effect | None:
    """Return the first outcome with which the run is not expected to fail; None if all fail.

    If all are expected to fail, return the last one unless it is known to fail. The mildest comes
    first, so if the last is expected to fail, the others are too.
    """
    serving = [o for o in outcomes if helps(bench.recorded, o.result)]
    if not serving:
        return None
    strongest = bench.looked_on(serving[-1])
    outlook = strongest.result.outlook
    if outlook is not None and outlook.fails:
        return None if outlook.state is OutlookState.FAILS else strongest
    looked_on = map(bench.looked_on, serving)
    return next(o for o in looked_on if o.result.outlook is None or not o.result.outlook.fails)


def is_cut(case: JudgedCase, bench: Bench) -> bool:
    """Return whether the run failed before any step was complete, so its needs are unknown."""
    whole = 0 if case.training is None else case.training.n_whole_steps
    return not bench.recorded.fits and whole == 0


def saved_bytes(bench: Bench, outcome: Effect) -> int:
    """Return how much lower the peak of live memory is than the recorded one."""
    return bench.peak_bytes - (outcome.peak_bytes or bench.peak_bytes)


def saving_text(case: JudgedCase, bench: Bench, outcome: Effect) -> str:
    """Return what a change does to the peak; the prediction says how far the run gets."""
    peak = bench.peak_bytes - saved_bytes(bench, outcome)
    saved = format_size(saved_bytes(bench, outcome))
    text = (
        f"Replayed: peak live memory falls by {saved}, from "
        f"{format_size(bench.peak_bytes)} to {format_size(peak)}"
    )
    is_too_little = case.cause in SHORT_OF_MEMORY and not outcome.result.fits
    return f"{text}, which is not enough alone." if is_too_little else f"{text}."


def may_be_activations(case: JudgedCase) -> bool:
    """Return whether activations of a training step may be what fills the device."""
    r = case.failed_request
    if not case.is_allocator_case or r is None:
        return False
    if case.cause not in (Cause.CAPACITY, Cause.TRANSIENT_PEAK) or r.is_alone_too_large:
        return False
    # A load or an evaluation keeps no activations.
    is_other = case.sign is not None and (case.sign.is_of_model or not case.sign.is_training)
    return not (case.fails_in_optimizer_step or case.only_builds or is_other)


WITHOUT_COPY: Final = (
    "if nothing is trained, do not wrap the model in DistributedDataParallel, DeepSpeed or "
    "Accelerator.prepare(), which make buffers as large as it for its gradients; load it with "
    "torch_dtype=torch.float16, since mixed precision keeps weights of 32 bits; to train it, use a "
    "LoRA adapter, or FSDP or ZeRO 3 over several GPUs"
)


def _not_of_batch(case: JudgedCase) -> str:
    """Return why what failed does not shrink with the batch, or "" if it may."""
    if case.fails_in_optimizer_step:
        return (
            "The failure is in the optimizer's step, when the activations of the batch are "
            "already freed; weights, gradients and state do not shrink with the batch."
        )
    if case.is_of_model and case.sign is not None:
        return f"It failed {case.sign.doing}: that does not depend on the batch."
    r = case.failed_request
    is_copy = r is not None and r.asks_for_copy
    return f"{OF_A_COPY}, which no batch makes smaller." if is_copy else ""


class SmallerBatch(SavingRemedy):
    """A smaller batch or sequence, with how much smaller."""

    code = "smaller-batch"
    title = "Use a smaller batch or smaller inputs"
    burden = Burden.SLOWER
    is_usual = True
    acts_on = "what grows with the batch"
    doing = "an eighth of the batch"
    change = ANY_BATCH
    cost = "More steps for the same data."
    caveats = ("Weights, gradients and optimizer state do not shrink with the batch.",)
    effort = 8
    combines = False

    def propose(self, case: JudgedCase) -> Iterator[Proposal]:
        """Propose a smaller batch for capacity, peaks and limits if the batch is a usual one."""
        r = case.failed_request
        if r is not None and r.is_alone_too_large:
            return  # the tensor's own dimensions are wrong, or are what must shrink
        found = list(self._proposed(case))
        scale = case.step_scale
        if scale is None or not (scale.step >= LARGER or scale.is_of_line):
            yield from found

    def _proposed(self, case: JudgedCase) -> Iterator[Proposal]:
        r = case.failed_request
        if case.has_old_holes and case.sign is None:
            yield self._smaller(
                case, "Smaller requests fit into the holes, in any version of PyTorch."
            )
        is_beside = case.cause in OUTSIDE and case.supports(Cause.CAPACITY)
        if not case.is_allocator_case or not (case.cause in SHORT_OF_MEMORY or is_beside):
            return
        if r is None or r.is_bare:
            source = "message gives no numbers" if case.message else "statistics hold no request"
            if case.sign is None:
                why = f"The {source}; the batch is what a program can shrink first."
                yield self._smaller(case, why)
            return
        is_said = case.sign is not None and case.sign.name == INFERENCE and case.backend != "mps"
        if r.missing_bytes <= 0 or is_said:
            return
        if why := _not_of_batch(case):
            yield self.rejection(why, Confidence.LIKELY)
            return
        missing, of_needed = format_size(r.missing_bytes), ""
        if r.needed_bytes is not None:
            of_needed = (
                f": at least {format_share(r.missing_bytes, r.needed_bytes)} of the "
                f"{format_size(r.needed_bytes)} needed, more if part of them does not scale with "
                "the batch"
            )
        if r.requested_bytes * BATCH_SHARES[-1] > (r.available_bytes or r.requested_bytes):
            return  # even the smallest share to try would not fit: a shape is wrong
        yield self._smaller(case, f"{missing} is missing{of_needed}.")

    def _smaller(self, case: JudgedCase, why: str) -> Proposal:
        title, change = less_of_batch(case)
        attempts = self.attempts(case)
        return self.proposal(
            title=title, weight=Weight.HELPS, change=change, why=why, attempts=attempts
        )

    def edits(self, case: JudgedCase) -> Sequence[Edit]:
        """Return the run with shares of the present batch, as many as its length allows."""
        bench = case.bench
        if bench is None or case.only_builds:
            return ()
        shares: tuple[float, ...] = LONG_TRACE_SHARES if bench.is_long else BATCH_SHARES
        n = _batch_size(case)
        if n is not None:
            whole = sorted({round(n * share) for share in shares} - {0, n}, reverse=True)
            shares = tuple(k / n for k in whole)
        if case.training is None:
            return [batch_scaled(share) for share in shares]
        run = case.training
        last = int(run.forward[0].max()) if len(run.forward[0]) else int(run.steps[0][-1])
        return [passes_scaled(run.steps, last, share, run.forward) for share in shares]

    def chosen(self, bench: Bench, outcomes: Sequence[Effect]) -> Effect:
        """Return the largest share of the batch that is known to do, or that leaves some room."""
        best = super().chosen(bench, outcomes)
        if best.result.outlook is not None and best.result.outlook.state is OutlookState.HOLDS:
            return best
        smaller = map(bench.looked_on, dropwhile(lambda o: o.attempt != best.attempt, outcomes))
        least = SLIM_MARGIN_SHARE * (best.result.capacity_bytes or 0)
        return next((o for o in smaller if o.result.room_bytes >= least), best)

    def judged(
        self, case: JudgedCase, bench: Bench, proposal: Proposal, outcomes: Sequence[Effect]
    ) -> Proposal | None:
        """Return the proposal with the largest share of the batch that fits."""
        judged = super().judged(case, bench, proposal, outcomes)
        if judged is None or judged.is_rejected:
            return judged
        best, n = self.chosen(bench, outcomes), _batch_size(case)
        share = float(best.attempt.what_if.edit.removeprefix("batch x "))
        stacks = bench.reproduction.trace.stacks
        sample = "input size" if stacks.calls(_CONVOLVES).any() else "sequence length"
        if not helps(bench.recorded, best.result):
            least = f"an eighth of the current batch or {sample}"
            if n is not None:
                least = f"a batch of {round(n * share)}"
            judged = judged.saying(change=f"even {least} is not enough alone")
            return replace(judged, weight=Weight.MAY_HELP)
        if n is not None:
            return judged.saying(
                title=f"Use a batch of {round(n * share)} instead of {n}",
                change=f"set the batch size to {round(n * share)} instead of {n}; {KEPT_BATCH}",
            )
        eighths = round(share * 8)
        part = {1: "an eighth", 2: "a quarter", 4: "half", 6: "three quarters"}.get(
            eighths, f"{eighths}/8"
        )
        return judged.saying(
            title=f"Use {part} of the current batch or {sample}",
            change=f"lower the batch size or the {sample} until their product is "
            f"{100 * eighths / 8:g}% of what it is now; {KEPT_BATCH}",
        )


class LimitBatch(SmallerBatch):
    """A batch larger than all before it: that of an evaluation, or one of large samples."""

    code = "limit-batch"
    title = "Limit the size of a batch"
    burden = Burden.CHANGE
    cost = "None for the batches that fit."
    is_usual = False

    def propose(self, case: JudgedCase) -> Iterator[Proposal]:
        """Propose a limit if the failed step asks for more than any before, line by line."""
        found = list(self._proposed(case))
        scale = case.step_scale
        if not found or scale is None or scale.step < LARGER:
            return
        title = f"{self.title}: this one is {scale.step:.1f} times the largest before it"
        change = "sort samples by size, or cap the tokens, pixels, nodes or edges in a batch"
        if not _has_trained(case):
            change = "run it on one part of the batch after another, or cap the size of an input"
        elif is_evaluation(case.asking_stack):
            title = (
                "Evaluate with smaller batches: this one is "
                f"{scale.step:.1f} times the largest before"
            )
            change = "use a smaller batch, or smaller inputs, where the evaluation loads its data"
        for proposal in found:
            yield proposal.saying(title=title, change=change)

    def judged(
        self, case: JudgedCase, bench: Bench, proposal: Proposal, outcomes: Sequence[Effect]
    ) -> Proposal | None:
        """Return the proposal with the share of this batch that fits."""
        judged = super().judged(case, bench, proposal, outcomes)
        if judged is None or judged.is_rejected:
            return judged
        said, part = proposal.recommendation, judged.recommendation.change.split(";")[0]
        return judged.saying(title=said.title, change=f"{said.change}; {part}")


def _has_trained(case: JudgedCase) -> bool:
    """Return whether there are steps of training; results that are only computed can be split."""
    a = case.context.analysis
    return a is not None and len(Steps.of(a.trace).of_kind(StepKind.TRAIN)) > 0


class LimitRequest(SavingRemedy):
    """A request far larger than all before it at its line, in a step that is as large as others."""

    code = "limit-request"
    title = "Make less at once"
    doing = "no request larger than those before at its line"
    change = (
        "compute it in parts, or on the CPU where it is this large; or cap what its size comes "
        "from (boxes, candidates, points, nodes). The rest of the step is as large as before, so "
        "a smaller batch is not what it needs"
    )
    cost = "None for the samples that fit."
    effort = 0
    combines = False

    def propose(self, case: JudgedCase) -> Iterator[Proposal]:
        """Propose it if the line that asked has outgrown its earlier requests, the step has not."""
        scale, r = case.step_scale, case.failed_request
        if case.cause not in SHORT_OF_MEMORY or scale is None or not scale.is_of_line or r is None:
            return
        where = line_text(case.asking_stack[0] if case.asking_stack else None)
        yield self.proposal(
            title=f"{self.title} at {where}: {scale.line:.1f} times the largest before it",
            weight=Weight.FITS,
            why=f"{r.request_text[0].upper()}{r.request_text[1:]}.",
            locations=case.asking_stack,
            attempts=self.attempts(case),
        )

    def edits(self, case: JudgedCase) -> Sequence[Edit]:
        """Return the run without what outgrew its line's earlier requests in the failed step."""
        scale = case.step_scale
        return () if scale is None else (requests_limited(scale.rows, scale.usual_bytes),)


_CONVOLVES: Final = re.compile("_conv_forward$")
"""The function of torch/nn/modules/conv.py that calls the kernel, in PyTorch 1.5 to 2.13."""

KEPT_BATCH: Final = "in training, accumulate gradients to keep the effective batch"

BATCH_SHARES: Final = (7 / 8, 3 / 4, 5 / 8, 1 / 2, 3 / 8, 1 / 4, 1 / 8)
"""Shares of the present batch: eighths, since batches are powers of two or multiples of eight."""

LONG_TRACE_SHARES: Final = (3 / 4, 1 / 2, 1 / 4)


def _batch_size(case: JudgedCase) -> int | None:
    """Return the user's batch size, or None if there is none or nothing can make it smaller."""
    given = case.context.case.overrides.batch_size
    return None if given == 1 else given


def _model_bytes(case: JudgedCase) -> tuple[int, str]:
    """Return what the model, its gradients and the optimizer hold at the peak, also in words.

    It is (0, "") if that is not known.
    """
    analysis = case.context.analysis
    if analysis is None or analysis.phases is None:
        return 0, ""
    names = {
        Category.PARAMETERS: "parameters",
        Category.GRADIENTS: "gradients",
        Category.OPTIMIZER_STATE: "optimizer state",
    }
    sums = [s for s in analysis.phases.report.at_peak if s.category in names and s.n_bytes]
    parts = ", ".join(f"{names[s.category]} {format_size(s.n_bytes)}" for s in sums)
    return sum(s.n_bytes for s in sums), parts


LESS_TRAINED: Final = "train a LoRA adapter, with the base model in 16 or 4 bits"
ALL_TRAINED: Final = "Weights, gradients and optimizer state take the same, whatever the batch."
OFFLOADED_STATE: Final = "the optimizer and the parameters (offload_param) offloaded to the CPU"
SPREAD: Final = "ZeRO 3 or FSDP over more GPUs, with the optimizer offloaded to the CPU"


@proposes("Keep fewer weights, gradients and optimizer states on each GPU")
def less_to_train_all(remedy: Remedy, case: JudgedCase) -> Iterator[Proposal]:
    """Propose it if all of a model is trained whose state alone exceeds the GPUs of the text."""
    told, message = told_weights(case.message), case.message
    if message is None or case.cause is not Cause.CAPACITY or not case.is_allocator_case:
        return
    training = "" if told is None else told.trained_text(message, case.told)
    # Where the sum is open, or shards of it should fit, the batch is asked first.
    is_open = told is None or case.told.batch_cannot_shrink
    is_open &= is_told_to_train_all(message) and OFFLOADING not in case.told.in_use
    if not (training or is_open):
        return
    spread = words_in(case, Change.OFFLOAD_STATE)
    own = OFFLOADED_STATE if SHARDED_WEIGHTS in case.told.in_use else SPREAD
    spread = f"{spread[5:]}, under ZeRO 3 or over more GPUs" if spread else own
    yield remedy.proposal(
        weight=Weight.CURES if training else Weight.FITS,
        change=f"train all of it with {spread}; or {LESS_TRAINED}"
        if SHARDING in case.told.in_use and not training
        else f"{training and f'{training}: '}{LESS_TRAINED}; or all of it with {spread}",
        why=f"{training[0].upper()}{training[1:]}." if training else ALL_TRAINED,
        cost="Fewer trained parameters, or a slower step.",
    )


FEWER_BITS: Final = (
    "use a checkpoint with fewer parameters, or with fewer bits for each (GPTQ, AWQ, GGUF or "
    "bitsandbytes with 4); or put some of the layers on the CPU or on another GPU"
)


@proposes("Shrink the weights and the optimizer state")
def less_model_memory(remedy: Remedy, case: JudgedCase) -> Iterator[Proposal]:
    """Propose it for capacity, ranked first if there is only the model so far."""
    r, message = case.failed_request, case.message
    if not case.is_allocator_case or case.cause is not Cause.CAPACITY:
        return
    if r is not None and r.is_alone_too_large:
        return
    told = told_weights(message)
    if told is not None and message is not None:
        if told.trained_text(message, case.told):
            return
        can_leave = case.sign is not None and case.sign.can_leave_gpu
        if told.fill(message, case.told) and not can_leave:
            yield remedy.proposal(
                title="Use a smaller model, or store its weights in fewer bits",
                weight=Weight.CURES,
                change=told.smaller or FEWER_BITS,
                why=f"{told.text}: the device has {format_size(told_card_bytes(message))}.",
                cost="A coarser model, or slower layers.",
            )
            return
    runs = case.runs_only or (message is not None and is_seen_to_run(message))
    held, parts = _model_bytes(case)
    if r is None or 0 < held < r.missing_bytes or _is_said_by_sign(case, runs=runs):
        return
    is_building = case.only_builds and not case.fails_in_optimizer_step
    why = "Lower precision halves weights, gradients and activations alike."
    if is_building:
        why = (
            f"Nothing was freed before the failure: {format_size(r.live_bytes)} is the model "
            "itself."
        )
    elif held:
        why = (
            f"At the peak the device holds {parts}. Half the precision halves them; sharded "
            "over n GPUs (ZeRO, FSDP), each holds one nth."
        )
    if r.asks_for_copy:
        yield remedy.proposal(
            title="Do without a second copy of the model",
            weight=Weight.CURES,
            change=WITHOUT_COPY,
            why=f"{OF_A_COPY}.",
        )
        return
    yield remedy.proposal(
        title="Shrink the weights" if runs else "",
        weight=Weight.FITS
        if is_building or (case.told.batch_size == 1 and case.is_checkpointed)
        else Weight.MAY_HELP,
        confidence=Confidence.LIKELY if is_building else Confidence.POSSIBLE,
        change=fewer_bytes(case)
        if runs
        else "use bf16 weights or autocast; an 8-bit optimizer; a LoRA adapter instead of all the "
        "weights; quantized weights for inference; FSDP or ZeRO over several GPUs; or offload to "
        "the host",
        why=why,
        cost="Lower precision may need care with the loss; sharding and offloading need bandwidth.",
    )


@proposes("Compute in 16 bits")
def compute_in_16_bits(remedy: Remedy, case: JudgedCase) -> Iterator[Proposal]:
    """Propose it where the results of the layers must shrink: the model is less than is missing."""
    r, (held, parts) = case.failed_request, _model_bytes(case)
    if r is None or not case.is_allocator_case or case.cause is not Cause.CAPACITY:
        return
    if 0 < held < r.missing_bytes and not r.is_alone_too_large:
        yield remedy.proposal(
            weight=Weight.MAY_HELP,
            change="put torch.autocast('cuda', torch.bfloat16) around the forward pass and the "
            "loss, unless it is there already",
            why=f"{format_size(r.missing_bytes)} is missing, more than the model takes ({parts}), "
            "so the results of its layers must shrink.",
            cost="Lower precision may need care with the loss.",
        )


def _is_said_by_sign(case: JudgedCase, *, runs: bool) -> bool:
    """Return whether the advice of the sign speaks of the weights; what only runs has no state."""
    if case.sign is None:
        return False
    is_loading = runs and case.sign.name == LOADING_WEIGHTS
    return is_loading or not (case.sign.is_training or case.trains)
