"""Run the command line inside the test's process, with a stand-in for the diagnosis."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass

import diagnoses
from msgspec.structs import replace

from fragdoctor.model.case import Case
from fragdoctor.model.diagnosis import Diagnosis
from fragdoctor.model.hooks import report_progress


@dataclass(frozen=True)
class Outcome:
    """The exit code and the output of one run of the command line."""

    code: int
    out: str
    err: str


class Stdin(io.TextIOWrapper):
    """Standard input with given bytes that may pose as a terminal."""

    def __init__(self, data: bytes, *, is_terminal: bool = False) -> None:
        super().__init__(io.BufferedReader(io.BytesIO(data)), encoding="utf-8")  # type: ignore[arg-type]
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


Run = Callable[..., Outcome]


@dataclass
class FakePipeline:
    """Stand-in for ``diagnosis.pipeline`` that stores the case and returns a fixed diagnosis."""

    answer: Callable[[], Diagnosis] = diagnoses.fragmentation
    case: Case | None = None
    error: BaseException | None = None
    continue_with: object = None

    def diagnose(
        self,
        case: Case,
        *,
        continue_with: object = None,
        at: str | None = None,
    ) -> Diagnosis:
        del at
        self.case, self.continue_with = case, continue_with
        report_progress("Replaying", 0, 1)
        if self.error is not None:
            raise self.error
        return replace(self.answer(), case=case)
