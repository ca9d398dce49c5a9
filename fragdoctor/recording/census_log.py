"""The censuses of a program: an early one, one at the peak, and one for each bundle."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from .census import FORMAT, VERSION, take_census
from .module_names import ModuleNames

_FIRST_STEP = 2
_RISE = 1.01
_PAUSE = 50
"""A further census at the end of a step has to wait this many times as long as a census took."""


def can_take(torch: Any) -> bool:
    """Return whether this PyTorch (2.1 or later) can be asked for what a census needs."""
    needed = ("DisableTorchFunction", "_current_autograd_node")
    return all(hasattr(getattr(torch, "_C", None), name) for name in needed)


class CensusLog:
    """Takes censuses at ends of optimizer steps, rarely, and keeps two of them.

    The first is from the second step, which has gradients and optimizer state: growth since then is
    a leak. The other is from a step at whose end the peak had risen; it is taken again while the
    peak rises, for at most a fiftieth of the time.

    Args:
        torch: the program's own.
        modules: names the modules, if allocations are noted with them.

    Attributes:
        problem: why a census could not be taken, or "".
    """

    def __init__(self, torch: Any, modules: ModuleNames | None = None) -> None:
        self._torch = torch
        self._modules = modules
        self._first: dict[str, Any] | None = None
        self._at_peak: dict[str, Any] | None = None
        self._peak_bytes = 0
        self._step = 0
        self._next_s = 0.0
        self.problem = ""
        self._hook: Any = None

    def stop(self) -> None:
        """Take no more censuses at ends of steps."""
        self._hook.remove()

    def begin(self) -> None:
        """Take censuses at ends of steps, and one now if there is memory already."""
        optimizers = sys.modules[self._torch.optim.Optimizer.__module__]
        self._hook = optimizers.register_optimizer_step_post_hook(self._on_step)
        if self._torch.cuda.memory_allocated():
            self._first = self._take()

    def write(self, path: str) -> None:
        """Take a census and write it with those kept, the latest last.

        Raises:
            RuntimeError: if none could be taken.
        """
        now = self._take()
        if now is None:
            raise RuntimeError(self.problem)
        kept = [c for c in (self._first, self._at_peak, now) if c is not None]
        with open(path, "w", encoding="utf-8") as f:
            document = {"format": FORMAT, "version": VERSION, "censuses": kept}
            json.dump(document, f, default=list)  # arrays

    def _take(self) -> dict[str, Any] | None:
        try:
            with uncompiled(self._torch):
                found = take_census(self._torch, self._step, modules=self._modules)
        except Exception as e:  # the program must not notice
            self.problem = f"{type(e).__name__}: {e}"[:500]
            return None
        self._next_s = time.perf_counter() + _PAUSE * found["seconds"]
        return found

    def _on_step(self, *_: Any) -> None:
        self._step += 1
        with uncompiled(self._torch):
            try:
                self._see()
            except Exception as e:  # as above
                self.problem = f"{type(e).__name__}: {e}"[:500]

    def _see(self) -> None:
        if self._step == _FIRST_STEP and self._first is None:
            self._first = self._take()
            self._peak_bytes = self._peak()
            return
        if self._step <= _FIRST_STEP:
            return
        if time.perf_counter() < self._next_s and self._at_peak is not None:
            return
        peak = self._peak()
        if peak > self._peak_bytes * _RISE:
            self._peak_bytes = peak
            self._at_peak = self._take()

    def _peak(self) -> int:
        stats = self._torch.cuda.memory.memory_stats_as_nested_dict()
        return int(stats["allocated_bytes"]["all"]["peak"])

    # A compiled optimizer calls this function uncompiled: Dynamo looks for this mark.
    _on_step._torchdynamo_disable = True  # type: ignore[attr-defined]


class uncompiled:  # noqa: N801 - used as a verb: with uncompiled(torch): ...
    """Keep ``torch.compile`` from tracing what runs in a block, if the program is compiled.

    Otherwise, frames that a compiled function calls are compiled too, with messages. This does what
    ``torch._dynamo.disable`` does, without importing it.
    """

    def __init__(self, torch: Any) -> None:
        native = getattr(torch._C, "_dynamo", None)
        self._set = getattr(getattr(native, "eval_frame", None), "set_eval_frame", None)
        self._before: Any = None

    def __enter__(self) -> None:
        if self._set is not None:
            self._before = self._set(None)

    def __exit__(self, *_: object) -> None:
        if self._set is not None:
            self._set(self._before)
