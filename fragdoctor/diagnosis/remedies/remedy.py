"""What a remedy is, and the case that remedies examine."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from functools import cached_property
from typing import Any, Final, TypeAlias

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from fragdoctor.analysis.attribution import most_kept
from fragdoctor.analysis.pairs import Pairs, find_pairs
from fragdoctor.analysis.step_scale import StepScale, step_scale
from fragdoctor.analysis.training_run import TrainingRun, training_run
from fragdoctor.diagnosis.bench import Attempt, Bench, Effect
from fragdoctor.diagnosis.verdict_message import LIBRARIES
from fragdoctor.future.search import rank_of
from fragdoctor.model.arrays import distinct, is_among
from fragdoctor.model.case import NO_FAILURE, OomMessage, ToldSettings
from fragdoctor.model.census import HoldingKind
from fragdoctor.model.conf_keys import KEYS, key_is_known
from fragdoctor.model.diagnosis import MAY_SAVE, Cause, Predicted, Recommendation, Verdict
from fragdoctor.model.engines import is_of_other_program
from fragdoctor.model.finding import Confidence, Location
from fragdoctor.model.frameworks import FRAMEWORKS, RUN_ONLY, Framework, frameworks_in
from fragdoctor.model.gpus import TYPICAL_CONTEXT_BYTES
from fragdoctor.model.ledger import Ledger
from fragdoctor.model.measures import CHECKPOINTING
from fragdoctor.model.settings import AllocatorSettings
from fragdoctor.model.simulation import ReplayResult
from fragdoctor.model.snapshot import I64, Action
from fragdoctor.rules.capacity.optimizer_state import fails_in_optimizer
from fragdoctor.rules.failed_request import FULL_SLACK_SHARE, FailedRequest
from fragdoctor.rules.growth.growing_line import holder_of
from fragdoctor.rules.rule import MAX_STACK, Context, from_user
from fragdoctor.rules.traceback_signs import (
    LARGE_SHARE,
    Place,
    TracebackSign,
    is_in_backward_pass,
    sign_of,
)
from fragdoctor.trace.stacks import NATIVE, classify_file
from fragdoctor.units import GIB, MIB, format_count, format_size, plural

CLOSED: Final = (Cause.NOT_MEMORY, Cause.HOST_MEMORY, Cause.SIZE_BUG, Cause.HEALTHY)
"""Causes about which neither a recording nor less on the device changes anything."""

VARIABLES: Final = {
    "cuda": "PYTORCH_CUDA_ALLOC_CONF",
    "rocm": "PYTORCH_HIP_ALLOC_CONF",
    "npu": "PYTORCH_NPU_ALLOC_CONF",
    "musa": "PYTORCH_MUSA_ALLOC_CONF",
    "xpu": "PYTORCH_ALLOC_CONF",
}
"""On CUDA the old name is always used: the new one does not exist before 2.9, and 2.9 has a bug."""


class JudgedCase(Struct, frozen=True, dict=True):
    """One device of a case with its verdict.

    ``bench`` is the bench to try remedies on, or None if no trace can be replayed.
    """

    context: Context
    verdict: Verdict
    bench: Bench | None = None

    @cached_property
    def training(self) -> TrainingRun | None:
        """Passes and layers of the run, or None if no trace shows them or nothing need be saved."""
        analysis = self.context.analysis
        if self.bench is None or analysis is None or self.cause not in MAY_SAVE:
            return None
        return training_run(analysis.trace, analysis.phases, self.bench.requests)

    @property
    def cause(self) -> Cause:
        """The cause of the verdict."""
        return self.verdict.cause

    def supports(self, *causes: Cause) -> bool:
        """Return whether the verdict names one of these causes, first or as another cause."""
        return self.cause in causes or any(cause in self.verdict.also for cause in causes)

    @property
    def failed_request(self) -> FailedRequest | None:
        """The figures of the failed request."""
        return self.context.failed_request

    @property
    def message(self) -> OomMessage | None:
        """The message, if one was given."""
        return self.context.message

    @cached_property
    def sign(self) -> TracebackSign | None:
        """The sign that the traceback of the message shows, or None."""
        return sign_of(self.message)

    @cached_property
    def pairs(self) -> Pairs | None:
        """The numbers that the failed request combines each with each, or None."""
        event, a = self.context.failed_event, self.context.analysis
        if event is None or a is None or a.timeline is None:
            return None
        return find_pairs(a.trace.lives, event.row, event.rounded_bytes, a.category)

    @cached_property
    def most_kept(self) -> tuple[int, I64] | None:
        """The line that makes most of what the steps only read, as a frame, and its events."""
        a = self.context.analysis
        found = None if a is None else most_kept(a.trace, a.category)
        if a is None or found is None or len(a.category):
            return found
        # Before a model has run, only a census tells what it is made of from what is put in lists.
        owner = holder_of(self.context, np.flatnonzero(is_among(a.trace.lives.start, found[1])))
        return found if owner is not None and owner.kind is HoldingKind.CONTAINER else None

    @property
    def has_only_begun(self) -> bool:
        """Whether this program held less than its own CUDA context takes when it failed.

        Its model was not there yet, so it would still need the GPU for that.
        """
        r = self.failed_request
        reserved = None if r is None else r.reserved_bytes
        return reserved is not None and reserved < TYPICAL_CONTEXT_BYTES

    @cached_property
    def files(self) -> tuple[str, ...]:
        """The files of all frames in the snapshot."""
        snapshot = self.context.snapshot
        if snapshot is None:
            return ()
        ids = distinct(snapshot.frames.filename).tolist()
        return tuple(snapshot.strings[i] for i in ids if i >= 0)

    @cached_property
    def asking_frames(self) -> tuple[Location, ...]:
        """The stack of the failed request, innermost first, without C++ frames.

        It comes from the trace, or else from the message's traceback.
        """
        event, message = self.context.failed_event, self.message
        recorded = () if event is None else self.context.stack(event.stack)
        told = () if message is None else [f.location for f in message.frames[::-1]]
        python = [f for f in recorded if classify_file(f.filename) != NATIVE]
        return tuple(python or (f for f in told if classify_file(f.filename) != NATIVE))

    @cached_property
    def asking_stack(self) -> tuple[Location, ...]:
        """The stack of the failed request, from the user's own line outward."""
        return from_user(self.asking_frames)[:MAX_STACK]

    @cached_property
    def fails_in_optimizer_step(self) -> bool:
        """Whether the request failed inside an optimizer's step, after the backward pass."""
        analysis = self.context.analysis
        return analysis is not None and fails_in_optimizer(analysis)

    @cached_property
    def only_builds(self) -> bool:
        """Whether nothing was freed before the failure, so that the model is still being built.

        Small blocks do not count: creating a weight frees a scalar or two.
        """
        analysis = self.context.analysis
        if analysis is None or not analysis.capture.has_trace:
            return False
        if analysis.capture.is_late_start or analysis.capture.missing_actions:
            return False
        if len(analysis.trace.module_rows):  # the model has been called
            return False
        events = analysis.trace.events
        freed = int(events.size_bytes[events.action == Action.FREE_REQUESTED].sum())
        return freed <= FULL_SLACK_SHARE * analysis.active_bytes

    @cached_property
    def step_scale(self) -> StepScale | None:
        """How much larger the failed step is than all before it, or None if unknown."""
        analysis, event = self.context.analysis, self.context.failed_event
        if analysis is None or event is None or analysis.timeline is None:
            return None
        return step_scale(analysis.trace, event.row)

    def has_marker(self, kind: str) -> bool:
        """Return whether a line of the log has a marker of this kind."""
        log = self.context.case.oom
        return log is not None and any(marker.kind == kind for marker in log.markers)

    @property
    def told(self) -> ToldSettings:
        """What the text says of the settings of its run."""
        log = self.context.case.oom
        return ToldSettings() if log is None else log.settings

    @property
    def ledger(self) -> Ledger:
        """Where memory is, as far as the text says."""
        return self.context.case.ledger

    @property
    def is_checkpointed(self) -> bool:
        """Whether the text or the traceback shows that layers are already checkpointed."""
        frames = () if self.message is None else self.message.frames
        return CHECKPOINTING in self.told.in_use or any(map(_CHECKPOINT.matches, frames))

    @cached_property
    def frameworks(self) -> tuple[Framework, ...]:
        """The frameworks of the stacks, of the failure's lines, and of the text, in this order."""
        message, log = self.message, self.context.case.oom
        if message is None:
            return frameworks_in(self.files)
        files = (frame.file for frame in message.frames)
        near = frameworks_in((*files, *self.files), message.said)
        named = () if log is None else log.frameworks
        found = (*near, *(f for f in FRAMEWORKS if f.name in named and f not in near))
        if not is_in_backward_pass(message):
            return found
        return tuple(f for f in found if f.name not in RUN_ONLY)  # beside what trains

    @property
    def trains(self) -> bool:
        """Whether the text around the failure or its traceback is about a training run."""
        return self.message is not None and self.message.is_of_training

    @property
    def runs_only(self) -> bool:
        """Whether all frameworks of the case only run models, so that nothing keeps activations."""
        return bool(self.frameworks) and all(f.name in RUN_ONLY for f in self.frameworks)

    @property
    def runs_on_windows(self) -> bool:
        """Whether paths, words or the driver's figures around the failure are those of Windows.

        Its display driver (WDDM, also under WSL 2) reports a card's nominal size, and 0 bytes free
        once the card is full; on Linux the driver's own share is missing from both figures.
        """
        m = self.message
        if m is None or m.backend != "cuda":
            return False
        is_nominal = m.total_bytes is not None and -m.total_bytes % GIB <= WDDM_SLACK_BYTES
        said = (m.said, *(frame.file for frame in m.frames))
        return (m.free_bytes == 0 and is_nominal) or any(map(_WINDOWS.search, said))

    @property
    def is_of_model(self) -> bool:
        """Whether the traceback shows that the model, not its batch, fills the device."""
        return self.sign is not None and self.sign.is_of_model

    @property
    def asks_for_large_share(self) -> bool:
        """Whether the one tensor that failed is large, which no change around it makes smaller."""
        r = self.failed_request
        return r is not None and r.requested_bytes > LARGE_SHARE * (r.total_bytes or float("inf"))

    @property
    def has_old_holes(self) -> bool:
        """Whether a message alone shows holes, less than is live, in an old PyTorch.

        It has no expandable segments yet; where most of the cache is holes, another PyTorch is
        worth it.
        """
        r = self.failed_request
        if r is None or self.message is None or self.cause is not Cause.FRAGMENTATION:
            return False
        is_less = (r.unallocated_bytes or 0) < (r.live_bytes or 0)
        return is_less and self.is_too_new("expandable_segments")

    @property
    def kind(self) -> str:
        """Kind of the message, or "" without one."""
        return self.message.kind if self.message is not None else ""

    @property
    def backend(self) -> str:
        """Backend of the message, or CUDA without one."""
        return self.context.backend

    @property
    def is_library_failure(self) -> bool:
        """Whether a library with its own allocations failed: cuBLAS, cuDNN or NCCL."""
        message = self.message
        return message is not None and not LIBRARIES.keys().isdisjoint(
            (self.kind, message.sub_kind)
        )

    @cached_property
    def is_of_other_program(self) -> bool:
        """Whether a program other than PyTorch asked the device, so PyTorch's terms do not fit."""
        return is_of_other_program(self.message)

    @property
    def settings(self) -> AllocatorSettings | None:
        """The recorded settings."""
        return self.context.settings

    @property
    def expandable_is_on(self) -> bool:
        """Whether expandable segments are known to be on."""
        r = self.failed_request
        by_file = self.settings is not None and self.settings.expandable_segments
        return by_file or (r is not None and r.expandable is True)

    @property
    def is_allocator_case(self) -> bool:
        """Whether the case is about PyTorch's caching allocator."""
        if self.message is None:
            return True
        if self.message.sub_kind == NO_FAILURE:
            return self.cause is Cause.LEAK  # the program's own prints show it
        is_of_torch = self.message.is_of_caching_allocator or self.message.is_of_early_allocator
        return is_of_torch and not self.is_of_other_program

    def assignment(self, conf: str) -> str:
        """Return the environment variable of this backend set to a setting string."""
        return f"{VARIABLES.get(self.backend, VARIABLES['cuda'])}={conf}"

    def with_present(self, conf: str) -> str:
        """Return a setting string that also keeps what is already set."""
        key = _key(conf)
        replaced = (key, EXCLUDES.get(key))
        return ",".join([*(e for e in self._present if _key(e) not in replaced), conf])

    def in_place_of_present(self, conf: str) -> str:
        """Return a setting string without the current settings that shape the cache."""
        kept = [e for e in self._present if _key(e) not in SHAPES_CACHE]
        return ",".join([*kept, *([conf] if conf else [])])

    def replaced_by(self, conf: str) -> list[str]:
        """Return the current settings whose keys are not in a setting string."""
        return [e for e in self._present if _key(e) not in {_key(n) for n in _entries(conf)}]

    @property
    def _present(self) -> list[str]:
        return _entries(self.settings.conf if self.settings is not None else "")

    def is_too_new(self, key: str) -> bool:
        """Return whether even the newest PyTorch that fits the inputs does not know a key.

        An unknown key stops PyTorch when it first uses the device.
        """
        _, high = self.context.torch_version
        return bool(high) and not key_is_known(key, high)

    def version_caveats(self, key: str) -> tuple[str, ...]:
        """Return the warning that a key may be too new, if the version is not certain."""
        low, _ = self.context.torch_version
        if key not in KEYS or (low and key_is_known(key, low)):
            return ()
        since = ".".join(map(str, KEYS[key].since[:2]))
        return (
            f"{key} needs PyTorch {since} or later: an older one stops with an error at first use.",
        )


_WINDOWS: Final = re.compile(r"(?<![A-Za-z])[A-Z]:[\\/]{1,2}\w|\bWin(?:dows[ -]?)?1[01]\b|\bWDDM\b")
WDDM_SLACK_BYTES: Final = 16 * MIB
"""How much below a whole number of GiB Windows' display driver reports a card's size."""

_CHECKPOINT: Final = Place(file=r"/torch/utils/checkpoint\.py$")

SHAPES_CACHE: Final = (
    "expandable_segments",
    "max_split_size_mb",
    "roundup_power2_divisions",
    "large_segment_size_mb",
)
"""Keys that decide how requests are laid out; the others (limits, streams) are kept."""

EXCLUDES: Final = {
    "expandable_segments": "max_split_size_mb",
    "max_split_size_mb": "expandable_segments",
}
"""Keys that together can make reserved memory grow without bound."""


def _key(entry: str) -> str:
    return entry.split(":", 1)[0].strip()


def _entries(conf: str) -> list[str]:
    """Split a setting string at commas outside brackets."""
    return [entry.strip() for entry in _COMMA.split(conf) if entry.strip()]


_COMMA: Final = re.compile(r",(?![^\[\]]{0,1000}\])")


class Weight(IntEnum):
    """How promising a remedy is before it is tried."""

    CURES = 4  # it removes the cause itself
    FITS = 3  # it is for what the evidence shows to hold or ask for the memory
    HELPS = 2  # it helps against the cause without removing it
    MAY_HELP = 1  # it helps some programs of this kind
    ASKS = 0  # it only brings better evidence


class Burden(IntEnum):
    """What a remedy costs the user, if it is enough."""

    NONE = 0  # a setting, or a change to a line or two
    CHANGE = 1  # a change to the program that may change its speed a little
    SLOWER = 2  # each step computes less or takes longer
    RESULTS = 3  # the program computes something else


class Proposal(Struct, frozen=True):
    """What a remedy proposes for one case.

    Attributes:
        recommendation: what the user gets, without its rank.
        is_rejected: whether it is a popular remedy that does not help here and is listed with
            the reason.
        attempts: how to try it on the trace; empty if no replay can show its effect.
    """

    remedy: Remedy
    recommendation: Recommendation
    weight: Weight = Weight.ASKS
    is_rejected: bool = False
    attempts: Sequence[Attempt] = ()

    @property
    def is_untold(self) -> bool:
        """Whether nothing speaks for or against it yet, so that only a replay can bring it in."""
        return self.is_rejected and not self.recommendation.why

    def saying(self, **changes: Any) -> Proposal:
        """Return the proposal with changes to what the user gets."""
        return replace(self, recommendation=replace(self.recommendation, **changes))

    def with_prediction(self, predicted: Predicted) -> Proposal:
        """Return the proposal with the outcome of its replay.

        A proposal that was rejected by reasoning alone comes back if the replay fits.
        """
        is_rejected = self.is_rejected and not predicted.fits
        return replace(self.saying(predicted=predicted), is_rejected=is_rejected)

    def with_caveat(self, caveat: str) -> Proposal:
        """Return the proposal with one more caveat."""
        return self.saying(caveats=(*self.recommendation.caveats, caveat))


class Remedy:
    """One thing that can be done about a lack of memory.

    Attributes:
        code: stable name, for example ``expandable-segments``.
        title: one line in the imperative.
        is_modelled: whether its edit only models the changed program, so a replay proves nothing.
        burden: what it costs the user; lighter burdens rank first, whatever the others save.
        change, cost, caveats: as in ``Recommendation``, unless a proposal says something else.
    """

    code: str
    title: str
    change: str = ""
    cost: str = "None."
    caveats: tuple[str, ...] = ()
    burden: Burden = Burden.NONE
    is_modelled: bool = False

    def propose(self, case: JudgedCase) -> Iterator[Proposal]:
        """Yield proposals, or rejections with the reason; nothing if it does not apply.

        By default nothing is proposed by reasoning alone.
        """
        del case
        yield from ()

    def judged(
        self, case: JudgedCase, bench: Bench, proposal: Proposal, outcomes: Sequence[Effect]
    ) -> Proposal | None:
        """Return the proposal in the light of its best attempt, or None to drop it.

        A proposal that does not help is rejected, with the numbers, if the replay is exact.
        """
        del case
        best = best_of(bench, outcomes)
        predicted, r = bench.predicted(best.result), proposal.recommendation
        if helps(bench.recorded, best.result):
            confidence = bench.confidence(best.result)
            if self.is_modelled and confidence is Confidence.PROVEN:
                confidence = r.confidence
            return proposal.saying(confidence=confidence).with_prediction(predicted)
        said = outcome_text(bench.recorded, best.result)
        if not bench.is_exact and not proposal.is_rejected:
            return proposal.with_caveat(f"An estimate says that it may not be enough: {said}.")
        why = f"{r.why} Replayed: {said}." if proposal.is_rejected else f"Replayed: {said}."
        # Not with_prediction: a run that fits no better than without the change is no success.
        is_rejected = proposal.is_rejected or bench.is_exact
        return replace(proposal.saying(why=why, predicted=predicted), is_rejected=is_rejected)

    def proposal(  # noqa: PLR0913 - the fields of a proposal, all by keyword
        self,
        *,
        weight: Weight,
        why: str = "",
        confidence: Confidence | None = None,
        title: str = "",
        setting: str = "",
        change: str = "",
        cost: str = "",
        caveats: Sequence[str] = (),
        locations: Sequence[Location] = (),
        predicted: Predicted | None = None,
        saves_bytes: int | None = None,
        attempts: Sequence[Attempt] = (),
    ) -> Proposal:
        """Return a proposal of this remedy, in its own words where nothing else is said.

        Without a reason of its own, its reason is the verdict. What removes the cause, or fits
        what the evidence shows, is likely; the rest is possible.
        """
        usual = Confidence.LIKELY if weight >= Weight.FITS else Confidence.POSSIBLE
        recommendation = Recommendation(
            rank=0,
            code=self.code,
            title=title or self.title,
            confidence=confidence or usual,
            setting=setting,
            change=change or self.change,
            why=why,
            locations=tuple(locations),
            predicted=predicted or Predicted(),
            cost=cost or self.cost,
            caveats=tuple(caveats or self.caveats),
            saves_bytes=saves_bytes,
        )
        return Proposal(self, recommendation, weight, attempts=attempts)

    def rejection(
        self,
        why: str,
        confidence: Confidence,
        setting: str = "",
        predicted: Predicted | None = None,
    ) -> Proposal:
        """Return this remedy as a popular one that does not help here."""
        rejected = Recommendation(0, self.code, self.title, confidence, setting, why=why)
        return Proposal(self, rejected, is_rejected=True).saying(predicted=predicted or Predicted())


Propose: TypeAlias = Callable[[Remedy, JudgedCase], Iterator[Proposal]]


class _Proposed(Remedy):
    """A remedy that consists of what it proposes; see ``proposes``."""

    def __init__(self, propose: Propose, **attributes: Any) -> None:
        self._propose = propose
        self.code = propose.__name__.replace("_", "-")
        for name, value in attributes.items():
            setattr(self, name, value)

    def propose(self, case: JudgedCase) -> Iterator[Proposal]:
        """Yield what the function proposes."""
        return self._propose(self, case)


def proposes(title: str, **attributes: Any) -> Callable[[Propose], Remedy]:
    """Make a function that yields proposals for a case a remedy; its name is the code."""
    return lambda propose: _Proposed(propose, title=title, **attributes)


# ---- what a replay says ----------------------------------------------------------------------


FEWER_RETRIES_SHARE: Final = 0.5


def helps(recorded: ReplayResult, result: ReplayResult) -> bool:
    """Return whether a what-if is better than the recorded run in what went wrong.

    After a failure, every request must be served, and the failed step must not be known to fail
    later. Without a failure, every request must still be served, with at most half the retries:
    one retry fewer out of many is no cure.
    """
    if not (result.fits and result.is_conclusive):
        return False
    if result.outlook is not None and result.outlook.ends_step:
        return False
    return not recorded.fits or result.retries <= FEWER_RETRIES_SHARE * recorded.retries


def best_of(bench: Bench, outcomes: Sequence[Effect]) -> Effect:
    """Return the outcome that helps and ranks first."""
    return min(
        outcomes, key=lambda one: (not helps(bench.recorded, one.result), rank_of(one.result))
    )


def outcome_text(recorded: ReplayResult, result: ReplayResult) -> str:
    """Return how a replay compares with the recorded run, as a clause."""
    reserved = f"peak reserved {format_size(result.peak_reserved_bytes)}"
    retries = plural(result.retries, "retry", "retries")
    if not result.fits:
        size = f" of {format_size(result.oom_bytes)}" if result.oom_bytes else ""
        where = "" if result.oom_event is None else f" at event {format_count(result.oom_event)}"
        still = "still fails" if not recorded.fits else "fails, unlike in the recording"
        return f"the request{size}{where} {still}, {reserved}"
    if result.outlook is not None and result.outlook.ends_step:
        return (
            f"the recorded requests are served, but the step that failed is not: "
            f"{result.outlook.reason}, {reserved}"
        )
    if not recorded.fits:
        return f"every request is served, {reserved}, {retries}"
    if result.retries == recorded.retries:
        return f"{retries} as before, {reserved}"
    return f"{retries} against {format_count(recorded.retries)} as recorded, {reserved}"
