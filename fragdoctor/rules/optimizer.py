"""Memory of optimizer state, told by the stacks that made it."""

from __future__ import annotations

import re
from typing import Final

from fragdoctor.analysis.result import DeviceAnalysis, Holder
from fragdoctor.rules.context import Context

_OPTIMIZER: Final = re.compile(
    r"(?:^|[/\\])optim(?:izers?)?(?:[/\\]|\.py$)|optimizer", re.IGNORECASE
)
_STEP: Final = re.compile(r"^(?:_init_group|_?(?:single|multi)_tensor_\w+|step)$")


def is_optimizer_stack(context: Context, stack: int) -> bool:
    """Tell whether an allocation was made inside an optimizer's step."""
    return any(
        _OPTIMIZER.search(frame.filename) and _STEP.match(frame.function)
        for frame in context.stack(stack)
    )


def optimizer_holders(context: Context, analysis: DeviceAnalysis) -> tuple[Holder, ...]:
    """Return the holders whose memory was made inside an optimizer's step."""
    return tuple(h for h in analysis.holders if is_optimizer_stack(context, h.stack))


def fails_in_optimizer(context: Context, analysis: DeviceAnalysis) -> bool:
    """Tell whether the failing request itself was made inside an optimizer's step."""
    return any(is_optimizer_stack(context, oom.stack) for oom in analysis.ooms[-1:])
