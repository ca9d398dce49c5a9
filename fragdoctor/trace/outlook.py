"""Outlooks: whether a run survives under a what-if, looked at beyond the recorded failure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

from fragdoctor.model.simulation import ReplayResult
from fragdoctor.trace.continuation import Continuation, continuation_of, look_on
from fragdoctor.trace.fidelity import Reproduction
from fragdoctor.trace.replay import result_of
from fragdoctor.trace.whatif import WhatIf, _remakes_start, conditions_of

MAX_STEPS: Final = 100
FORESEEN_STEPS: Final = 10_000


@dataclass(frozen=True, slots=True)
class Outlook:
    state: str
    steps: int | None = None
    fails_after_steps: int | None = None
    needs_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    growth_bytes_per_step: int | None = None
    basis: str = "none"
    reason: str = ""


class Outlooks:
    """The outlooks of one reproduction: its continuation is worked out once."""

    def __init__(self, reproduction: Reproduction) -> None:
        self.reproduction = reproduction
        self.continuation = continuation_of(reproduction)

    def describe(self) -> str:
        c = self.continuation
        if c is None:
            return "no continuation"
        return f"complete {c.n_complete} exact {c.is_exact} varies {c.varies} grows {c.grows} period {c.period}"

    def of(self, what_if: WhatIf) -> tuple[ReplayResult, Outlook]:
        conditions = conditions_of(self.reproduction, what_if)
        remade = _remakes_start(self.reproduction, conditions)
        c = self.continuation
        if c is None:
            raw = self.reproduction.operations.replay(conditions.native(), False, remade)
            return result_of(raw, conditions), Outlook("open", reason="no complete step")
        ops, config = self.reproduction.operations, conditions.native()
        raw, look = look_on(ops, c.native, c.n_past, config, remakes_start=remade)
        result = result_of(raw, conditions)
        outlook = outlook_of(result, c, look)
        other = {"holds": c.higher, "fails": c.lower}.get(outlook.state)
        if other is not None and result.fits:
            raw, look = look_on(ops, other, c.n_past, config, remakes_start=remade)
            second = outlook_of(result, c, look)
            if second.state != outlook.state:
                return result, replace(outlook, state="open", fails_after_steps=None, reason="near: "+outlook.state)
        return result, outlook


def outlook_of(result: ReplayResult, c: Continuation, look: dict[str, Any]) -> Outlook:
    basis = "repeated" if c.is_exact else "scaled"
    if not result.fits:
        return Outlook("fails", fails_after_steps=0, basis="complete", reason="a recorded request fails")
    n_done = look["n_done"]
    n_after = max(n_done - int(c.counts_first), 0)
    growth = growth_of(c, look)
    peak = int(max(look["peak_reserved"].max(initial=0), result.peak_reserved_bytes))
    if look["has_failed"]:
        return Outlook("fails", steps=n_after, fails_after_steps=n_done, basis=basis,
                       peak_reserved_bytes=peak, growth_bytes_per_step=growth, reason="played")
    if growth > 0 and not look["repeats"] and result.capacity_bytes is not None:
        room = result.capacity_bytes - int(look["peak_allocated"].max(initial=0))
        left = room // growth
        if n_done + left <= FORESEEN_STEPS:
            return Outlook("fails", steps=n_after, fails_after_steps=int(n_done + left), basis=basis,
                       peak_reserved_bytes=peak, growth_bytes_per_step=growth, reason="grows")
    return Outlook("holds", steps=n_after, basis=basis, peak_reserved_bytes=peak,
                   growth_bytes_per_step=growth, reason="repeats" if look["repeats"] else "played")


def growth_of(c: Continuation, look: dict[str, Any]) -> int:
    allocated = look["allocated"].astype("int64")
    period = c.period
    if len(allocated) <= period + 1:
        return 0
    return int(allocated[-1] - allocated[-1 - period]) // max(period, 1)
