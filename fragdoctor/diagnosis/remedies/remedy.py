"""What a remedy is, and the case that remedies look at."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Final

from fragdoctor.model.conf_keys import KEYS, key_is_known
from fragdoctor.model.diagnosis import Cause, Predicted, Recommendation, Verdict
from fragdoctor.model.finding import Confidence, Evidence, Location, RuleResults
from fragdoctor.model.oom import NO_FAILURE, OomMessage
from fragdoctor.model.settings import AllocatorSettings
from fragdoctor.model.simulation import ReplayResult
from fragdoctor.rules.context import Context
from fragdoctor.rules.failed_request import FailedRequest
from fragdoctor.trace.edits import Edit
from fragdoctor.trace.whatif import WhatIf

CURES: Final = 90
"""Weight of a remedy that removes the cause itself."""

HELPS: Final = 60
"""Weight of one that helps against the cause without removing it."""

MAY_HELP: Final = 35
"""Weight of one that helps in some programs of this kind."""

ASKS: Final = 15
"""Weight of one that only brings better evidence."""

VARIABLES: Final = {
    "cuda": "PYTORCH_CUDA_ALLOC_CONF",
    "rocm": "PYTORCH_HIP_ALLOC_CONF",
    "npu": "PYTORCH_NPU_ALLOC_CONF",
    "musa": "PYTORCH_MUSA_ALLOC_CONF",
    "xpu": "PYTORCH_ALLOC_CONF",
}
"""On CUDA always the old name: the new one is buggy in 2.9 and does not exist before."""


@dataclass(frozen=True, slots=True)
class JudgedCase:
    """One device of a case with its verdict and the results of the rules."""

    context: Context
    verdict: Verdict
    results: RuleResults = field(default_factory=RuleResults)

    @property
    def cause(self) -> Cause:
        """The cause of the verdict."""
        return self.verdict.cause

    def supports(self, *causes: Cause) -> bool:
        """Return whether the verdict names one of these causes, as the first or besides."""
        return self.cause in causes or any(cause in self.verdict.also for cause in causes)

    @property
    def failed_request(self) -> FailedRequest | None:
        """The figures of the failed request."""
        return self.context.failed_request

    @property
    def is_recorded_failure(self) -> bool:
        """Whether a request failed in the run itself, rather than one that the user asks about."""
        r = self.failed_request
        return r is not None and r.source != "user"

    @property
    def message(self) -> OomMessage | None:
        """The message, if one was given."""
        return self.context.message

    @property
    def kind(self) -> str:
        """Kind of the message, "" without one."""
        return self.message.kind if self.message is not None else ""

    @property
    def backend(self) -> str:
        """Backend of the message; CUDA without one."""
        return self.message.backend if self.message is not None else "cuda"

    @property
    def is_library_failure(self) -> bool:
        """Whether a library that allocates for itself failed: cuBLAS, cuDNN or NCCL."""
        return self.kind in ("cublas", "cudnn", "nccl")

    @property
    def settings(self) -> AllocatorSettings | None:
        """Recorded settings."""
        return self.context.settings

    @property
    def expandable_is_on(self) -> bool:
        """Whether expandable segments are known to be on."""
        r = self.failed_request
        by_file = self.settings is not None and self.settings.expandable_segments
        return by_file or (r is not None and r.expandable is True)

    @property
    def is_allocator_case(self) -> bool:
        """Whether PyTorch's caching allocator is what this is about."""
        if self.message is None:
            return True
        if self.message.sub_kind == NO_FAILURE:
            return self.cause is Cause.LEAK  # seen in what the program printed
        return self.message.is_of_caching_allocator

    def assignment(self, conf: str) -> str:
        """Return the environment variable of this backend set to a setting string."""
        return f"{VARIABLES.get(self.backend, VARIABLES['cuda'])}={conf}"

    def with_present(self, conf: str) -> str:
        """Return a setting string that keeps what is set already, so that nothing gets lost."""
        present = self.settings.conf if self.settings is not None else ""
        key = conf.split(":", 1)[0]
        kept = [part for part in _entries(present) if part.split(":", 1)[0].strip() != key]
        return ",".join([*kept, conf])

    def is_too_new(self, key: str) -> bool:
        """Return whether even the newest PyTorch that fits the inputs does not know a key.

        An unknown key stops PyTorch at its first use of the device.
        """
        _, high = self.context.torch_version
        return bool(high) and not key_is_known(key, high)

    def version_caveats(self, key: str) -> tuple[str, ...]:
        """Return the warning that a key may be too new, where the version is not certain."""
        low, _ = self.context.torch_version
        versions = KEYS.get(key)
        if versions is None or (low and key_is_known(key, low)):
            return ()
        since = ".".join(str(part) for part in versions.since[:2])
        return (
            f"{key} needs PyTorch {since} or later: an older one stops with an error at first use.",
        )


def _entries(conf: str) -> list[str]:
    """Split a setting string at commas outside brackets."""
    parts, depth, current = [], 0, ""
    for char in conf:
        depth += (char == "[") - (char == "]")
        if char == "," and depth <= 0:
            parts.append(current.strip())
            current = ""
        else:
            current += char
    parts.append(current.strip())
    return [p for p in parts if p]


@dataclass(frozen=True, slots=True)
class Attempt:
    """One way to try a remedy on the recorded trace.

    Attributes:
        what_if: settings and capacity to replay under.
        edit: change of the recorded requests; None where they stay as they are.
        caveat: what the user must know about the prediction, "" for nothing.
    """

    what_if: WhatIf
    edit: Edit | None = None
    caveat: str = ""

    @classmethod
    def of_edit(cls, edit: Edit) -> Attempt:
        """Return the attempt with a change of the code under the recorded settings."""
        return cls(WhatIf(edit=edit.name), edit)


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a remedy proposes for one case.

    Attributes:
        recommendation: as the user gets it, without its rank.
        weight: how much it promises before it is tried.
        is_rejected: a popular remedy that does not help here; it is listed with the reason.
        addresses: the live blocks that a change of the code would free or move.
    """

    remedy: Remedy
    recommendation: Recommendation
    weight: int = 0
    is_rejected: bool = False
    addresses: tuple[int, ...] = ()

    def with_prediction(self, predicted: Predicted) -> Proposal:
        """Return the proposal with the outcome of its replay.

        One that was rejected by reasoning alone comes back if the replay shows that it fits.
        """
        return replace(
            self,
            recommendation=replace(self.recommendation, predicted=predicted),
            is_rejected=self.is_rejected and not predicted.fits,
        )

    def with_caveat(self, caveat: str) -> Proposal:
        """Return the proposal with one more caveat."""
        r = self.recommendation
        return replace(self, recommendation=replace(r, caveats=(*r.caveats, caveat)))


class Remedy(ABC):
    """One thing that can be done about a lack of memory.

    Attributes:
        code: stable name, for example ``expandable-segments``.
        title: imperative, one line.
        computes_less: it makes each step compute less or longer, so it comes after what does not,
            however much it saves.
    """

    code: ClassVar[str]
    title: ClassVar[str]
    computes_less: ClassVar[bool] = False

    @abstractmethod
    def propose(self, case: JudgedCase) -> Iterator[Proposal]:
        """Yield what it proposes, or rejects with the reason; nothing where it does not apply."""

    def attempts(
        self, case: JudgedCase, proposal: Proposal, recorded: ReplayResult
    ) -> Sequence[Attempt]:
        """Return how a proposal is tried on the trace; the best outcome speaks for it.

        Empty where no replay says what the proposal does.
        """
        del case, proposal, recorded
        return ()

    def proposal(  # noqa: PLR0913 - the fields of a recommendation, all by keyword
        self,
        *,
        weight: int,
        confidence: Confidence,
        why: str,
        title: str = "",
        setting: str = "",
        change: str = "",
        cost: str = "",
        caveats: Sequence[str] = (),
        verify: str = "",
        locations: Sequence[Location] = (),
        predicted: Predicted | None = None,
        evidence: Sequence[Evidence] = (),
        saves_bytes: int | None = None,
    ) -> Proposal:
        """Return a proposal to do this."""
        return Proposal(
            self,
            Recommendation(
                rank=0,
                code=self.code,
                title=title or self.title,
                confidence=confidence,
                setting=setting,
                change=change,
                why=why,
                locations=tuple(locations),
                predicted=predicted or Predicted(),
                cost=cost,
                caveats=tuple(caveats),
                verify=verify,
                evidence=tuple(evidence),
                saves_bytes=saves_bytes,
            ),
            weight,
        )

    def rejection(
        self,
        why: str,
        confidence: Confidence,
        *,
        title: str = "",
        setting: str = "",
        predicted: Predicted | None = None,
    ) -> Proposal:
        """Return it as a popular remedy that does not help here."""
        rejected = self.proposal(
            weight=0,
            confidence=confidence,
            why=why,
            title=title,
            setting=setting,
            predicted=predicted,
        )
        return replace(rejected, is_rejected=True)


class SettingRemedy(Remedy):
    """An allocator setting: tried wherever there is a trace, proposed or not.

    Attributes:
        key: key of the setting string.
    """

    key: ClassVar[str]

    @abstractmethod
    def confs(self, case: JudgedCase) -> Sequence[str]:
        """Return the setting strings to try, what is set already included."""
