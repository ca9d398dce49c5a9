"""``--capacity`` where the inputs know better: a question about another card, never a fact."""

from __future__ import annotations

from fragdoctor.diagnosis.bench import Bench
from fragdoctor.errors import ConfigError, SimulationError
from fragdoctor.future.whatif import WhatIf
from fragdoctor.model.simulation import OutlookState
from fragdoctor.rules.failed_request import CONTEXT_ALLOWANCE_BYTES, rounding_bytes
from fragdoctor.rules.rule import Context
from fragdoctor.units import format_size


def capacity_note(context: Context, bench: Bench | None) -> str:
    """Return which size the report uses, and what the run would do on the one that was given.

    "" where none was given, or where the inputs do not know the size by themselves.
    """
    given = context.case.overrides.capacity_bytes
    if given is None or context.uses_given_capacity:
        return ""
    own, proven = context.total_bytes, context.proven_capacity_bytes
    if own is not None and abs(given - own) <= rounding_bytes(own):
        return ""
    size = format_size(given)
    if own is not None:
        used = f"the input says that the device has {format_size(own)}"
    elif proven is not None:
        used = f"the failed request proves that PyTorch could have {format_size(proven)}"
        if 0 <= given - proven <= CONTEXT_ALLOWANCE_BYTES:
            return (
                f"The capacity given, {size}, is not used: {used}, and the rest is not PyTorch's."
            )
    else:
        used = f"the run reserved {format_size(context.peak_reserved_bytes)}"
    answer = _answer(bench, given)
    return f"The capacity given, {size}, is not used: {used}.{f' {answer}' if answer else ''}"


def _answer(bench: Bench | None, given: int) -> str:
    """Return what a replay with so much for PyTorch says; "" where none can be made."""
    try:
        result = None
        if bench is not None and bench.is_usable:
            result = bench.fair_replay.replay(WhatIf(capacity_bytes=given))
    except (SimulationError, ConfigError):
        return ""
    if result is None or not result.is_conclusive:
        return ""
    outlook, room = result.outlook, format_size(max(0, given - result.peak_reserved_bytes))
    if not result.fits:
        would = "run out of memory"
    elif outlook is None or outlook.state is OutlookState.HOLDS:
        would = f"fit, {room} to spare"
    elif outlook.state is OutlookState.FAILS:
        would = "get further, and fail later"
    else:
        would = f"get past its recorded part, {room} to spare; the rest is not known"
    return f"With {format_size(given)} for PyTorch this run would {would}."
