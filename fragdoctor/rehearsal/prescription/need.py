"""The memory that PyTorch must have for the requests of a rehearsed program, by replay.

With that much or more it fits: what fits by luck with less, and not with somewhat more, would not
survive the small differences that a rehearsal does not know of.
"""

from __future__ import annotations

from collections.abc import Sequence

from fragdoctor._native import _ext
from fragdoctor.future.edits import Edit, without_noted
from fragdoctor.future.search import is_served, with_smallest_capacity
from fragdoctor.future.whatif import FairReplay, WhatIf, replay_what_if
from fragdoctor.model.marks import WORKSPACE
from fragdoctor.trace.reproduction import reproduce
from fragdoctor.trace.trace import Trace


class Need:
    """Replays a rehearsed program, unchanged or with other requests.

    Args:
        trace: the trace of its rehearsal.
        goes_on: whether more steps follow; nothing follows the end of a program.

    Attributes:
        trace: as above.
        requests: the program's requests; and the same without the workspaces of convolutions, which
            are known exactly for most of them only. Without them a run may need more, because later
            requests end up in other holes.
    """

    def __init__(self, trace: Trace, *, goes_on: bool) -> None:
        self.trace, self._goes_on = trace, goes_on
        self._reproduction = reproduce(trace)
        self._replay = FairReplay(self._reproduction)
        self.requests: list[_ext.NativeOps] = [self._reproduction.operations]
        if WORKSPACE in trace.snapshot.strings:
            self.requests.append(without_noted(WORKSPACE).apply(self._reproduction))

    def changed(self, edit: Edit) -> list[_ext.NativeOps]:
        """Return the program's requests after an edit."""
        return [edit.apply(self._reproduction)]

    def bytes(
        self, requests: Sequence[_ext.NativeOps] | None = None, conf: str | None = None
    ) -> int:
        """Return the least memory that PyTorch must have, or 0 if that is not known.

        ``conf`` are settings of the allocator; None = those of the rehearsal.
        """
        what_if = WhatIf(conf=conf)
        return max(self._bytes(one, what_if) for one in requests or self.requests)

    def _bytes(self, requests: _ext.NativeOps, what_if: WhatIf) -> int:
        is_own = requests is self._reproduction.operations
        operations = None if is_own else requests
        result = self._replay.replay(what_if, operations, looks_on=self._goes_on)
        look = self._replay.look_of(operations) if self._goes_on else None
        found = with_smallest_capacity(
            self._reproduction, what_if, result, operations, look, is_steady=True
        )
        return found.smallest_capacity_bytes or 0

    def fits(
        self, requests: Sequence[_ext.NativeOps], capacity_bytes: int, *, is_steady: bool
    ) -> bool:
        """Return whether requests are served with a capacity, and with every larger one."""
        return all(
            is_served(self._reproduction, one, capacity_bytes, is_steady=is_steady)
            for one in requests
        )

    def peak_bytes(
        self, requests: Sequence[_ext.NativeOps] | None = None, conf: str | None = None
    ) -> int:
        """Return the most memory that is live at once, in the blocks that the settings produce."""
        what_if, all_of_them = WhatIf(conf=conf), requests or self.requests
        results = (replay_what_if(self._reproduction, what_if, one) for one in all_of_them)
        return max(one.peak_allocated_bytes for one in results)
