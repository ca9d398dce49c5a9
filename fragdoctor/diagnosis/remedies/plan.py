"""What a remedy looks at, and what it proposes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from fragdoctor.model.diagnosis import Cause, Predicted, Recommendation, Verdict
from fragdoctor.model.finding import Confidence, Evidence, Finding, Location, RuleResults
from fragdoctor.model.oom import NO_FAILURE, OomMessage
from fragdoctor.model.settings import AllocatorSettings
from fragdoctor.rules.context import Context
from fragdoctor.rules.refusal import Refusal
from fragdoctor.rules.settings.idle_collection import has_fraction

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
class Plan:
    """The case as the remedies see it."""

    context: Context
    verdict: Verdict
    results: RuleResults = field(default_factory=RuleResults)

    @property
    def cause(self) -> Cause:
        """The cause of the verdict."""
        return self.verdict.cause

    def supports(self, *causes: Cause) -> bool:
        """Tell whether the verdict or one of its secondary readings is one of these causes."""
        return self.cause in causes or any(cause in self.verdict.also for cause in causes)

    @property
    def refusal(self) -> Refusal | None:
        """The figures of the refused request."""
        return self.context.refusal

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
    def settings(self) -> AllocatorSettings | None:
        """Recorded settings."""
        return self.context.settings

    @property
    def expandable_is_on(self) -> bool:
        """Whether expandable segments are known to be on."""
        by_file = self.settings is not None and self.settings.expandable_segments
        return by_file or (self.refusal is not None and self.refusal.expandable is True)

    @property
    def has_fraction(self) -> bool:
        """Whether a memory fraction is known to be set."""
        return has_fraction(self.context)

    @property
    def is_allocator_case(self) -> bool:
        """Whether the caching allocator of PyTorch is what this is about."""
        if self.message is not None and self.message.sub_kind == NO_FAILURE:
            return self.cause is Cause.LEAK  # seen in what the program printed
        if self.message is not None:
            return self.kind == "pytorch-caching-allocator" and self.backend != "mps"
        return True

    def variable(self, conf: str) -> str:
        """Return the assignment of a setting string for this backend."""
        return f"{VARIABLES.get(self.backend, VARIABLES['cuda'])}={conf}"

    def with_present(self, conf: str) -> str:
        """Return a setting string that keeps what is set already, so that nothing gets lost."""
        present = self.settings.conf if self.settings is not None else ""
        key = conf.split(":", 1)[0]
        kept = [part for part in _entries(present) if part.split(":", 1)[0].strip() != key]
        return ",".join([*kept, conf])

    def finding(self, code: str) -> Finding | None:
        """Return the first finding of a rule on the device of the verdict."""
        device = self.context.device
        matching = (f for f in self.results.findings if f.code == code and f.device == device)
        return next(matching, None)


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
class Proposal:
    """A remedy with its weight; ``is_rejected`` for popular ones that do not help here.

    ``addresses`` are the blocks that a change of the code would free or move, for the replay.
    """

    recommendation: Recommendation
    weight: int
    is_rejected: bool = False
    addresses: tuple[int, ...] = ()


def propose(  # noqa: PLR0913 - the fields of a recommendation, all by keyword
    code: str,
    title: str,
    *,
    weight: int,
    confidence: Confidence,
    why: str,
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
    """Return a proposal to do something."""
    recommendation = Recommendation(
        rank=0,
        code=code,
        title=title,
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
    )
    return Proposal(recommendation, weight)


def reject(  # noqa: PLR0913 - all by keyword
    code: str,
    title: str,
    *,
    confidence: Confidence,
    why: str,
    setting: str = "",
    predicted: Predicted | None = None,
) -> Proposal:
    """Return a popular remedy that does not help here, with the reason."""
    recommendation = Recommendation(
        rank=0,
        code=code,
        title=title,
        confidence=confidence,
        setting=setting,
        why=why,
        predicted=predicted or Predicted(),
    )
    return Proposal(recommendation, 0, is_rejected=True)
