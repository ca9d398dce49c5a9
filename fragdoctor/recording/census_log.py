"""The censuses of a program: an early one, one at the peak, and one for each bundle."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from .census import FORMAT, VERSION, Census, take_census
from .module_names import ModuleNames

_FIRST_STEP = 2
_RISE = 1.01
_PAUSE = 50
"""Times as long as a census took, until there may be another at the end of a step."""


def can_take(torch: Any) -> bool:
    """Return whether this PyTorch can be asked for what a census needs: from 2.1 on."""
    needed = ("DisableTorchFunction", "_current_autograd_node")
    return all(hasattr(getattr(torch, "_C", None), name) for name in needed)


class CensusLog:
    """Takes censuses at ends of optimizer steps, seldom, and keeps two of them.

    The first is of the second step, which has gradients and optimizer state: what has grown since
    then is what leaks. The other is of a step at whose end the peak had risen; taken again while it
    rises, for a fiftieth of the time at most.

    Args:
        torch: the program's own.
        modules: names them, where allocations are noted with them.

    Attributes:
        problem: why one could not be taken, "".
    """

    def __init__(self, torch: Any, modules: ModuleNames | None = None) -> None:
        self._torch = torch
        self._modules = modules
        self._first: Census | None = None
        self._at_peak: Census | None = None
        self._peak_bytes = 0
        self._step = 0
        self._next_s = 0.0
        self.problem = ""
        self._hook: Any = None

    def stop(self) -> None:
        """Take no more at ends of steps."""
        self._hook.remove()

    def begin(self) -> None:
        """Take them at ends of steps, and one now where there is memory already."""
        optimizers = sys.modules[self._torch.optim.Optimizer.__module__]
        self._hook = optimizers.register_optimizer_step_post_hook(self._on_step)
        if self._torch.cuda.memory_allocated():
            self._first = self._take()

    def write(self, path: str) -> None:
        """Take one and write it with those kept, the latest last.

        Raises:
            RuntimeError: none could be taken.
        """
        now = self._take()
        if now is None:
            raise RuntimeError(self.problem)
        kept = [c for c in (self._first, self._at_peak, now) if c is not None]
        document = {
            "format": FORMAT,
            "version": VERSION,
            "censuses": [c.as_json() for c in kept],
        }
        with open(path, "w", encoding="utf-8") as f:
            json.dump(document, f)

    def _take(self) -> Census | None:
        try:
            with uncompiled(self._torch):
                found = take_census(self._torch, self._step, modules=self._modules)
        except Exception as e:  # the program must not notice
            self.problem = f"{type(e).__name__}: {e}"[:500]
            return None
        self._next_s = time.perf_counter() + _PAUSE * found.seconds
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

    # A compiled optimizer calls it as it is: Dynamo looks for this mark.
    _on_step._torchdynamo_disable = True  # type: ignore[attr-defined]


class uncompiled:  # noqa: N801 - used as a verb: with uncompiled(torch): ...
    """Keep ``torch.compile`` from tracing what runs in a block, where the program is compiled.

    Frames that a compiled function calls are compiled too, with what that prints. It is what
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
