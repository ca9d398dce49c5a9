"""The outcome of a rehearsal: figures, failures, and the snapshot that it leaves."""

from __future__ import annotations

import gc
import json
import os
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NoReturn

import torch

from fragdoctor.errors import ConfigError
from fragdoctor.model.marks import PROGRAM
from fragdoctor.rehearsal.engine import leave, put
from fragdoctor.rehearsal.engine.memory_history import OURS, History, is_users, snapshot
from fragdoctor.rehearsal.engine.session import SeenOom, Session

MAX_STACK: Final = 64
_SIZES: Final = ("peak_allocated", "peak_reserved", "allocated", "reserved")


def _has_other_layout(error: BaseException) -> bool:
    """Return whether a sparse or nested tensor was a local variable where an error came from."""
    trace, found = error.__traceback__, False
    while trace is not None:
        at_hand = trace.tb_frame.f_locals.values()
        if not trace.tb_frame.f_code.co_filename.startswith(OURS):
            found = any(
                isinstance(t, torch.Tensor) and (t.layout is not torch.strided or t.is_nested)
                for t in at_hand
            )
        trace = trace.tb_next
    return found


def _oom_behind(error: BaseException | None) -> BaseException | None:
    """Return the out-of-memory error that an error is, or that caused it."""
    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = error.__cause__ or error.__context__
    return error


def _place(filename: str, line: int | None, function: str = "") -> dict[str, Any]:
    return {"filename": filename, "line": line or 0, "function": function}


def _frames(error: BaseException | None) -> list[dict[str, Any]]:
    """Return the frames that an error came from, without ours, the innermost last."""
    trace = None if error is None else error.__traceback__
    places = [(f.filename, f.lineno, f.name) for f in traceback.extract_tb(trace)]
    if isinstance(error, SyntaxError) and error.filename:  # not a valid Python file
        places.append((error.filename, error.lineno, "<module>"))
    return [_place(*place) for place in places if not place[0].startswith(OURS)]


class ProgramOutcome:
    """Collects what is known of a rehearsal and writes it once.

    Attributes:
        request: what was asked for.
        now: the rehearsal.
        failure: the error that ended the program; None = it ended well.
        steps: its steps.
    """

    def __init__(self, request: dict[str, Any], now: Session) -> None:
        self.request = request
        self.now = now
        self.failure: BaseException | None = None
        self.steps: Any = None
        self.traits: Any = None
        self.stopped = ""
        self.program_globals: dict[str, Any] = {}
        self._pid = os.getpid()
        self._progress: int | None = request.get("progress_fd")

    def on_step(self, number: int) -> None:
        """Report a complete step to the parent process."""
        n_bytes = self.now.gpus.figures(0)["allocated"]
        event = {"event": "step", "step": number, "allocated_bytes": n_bytes}
        if self._progress is not None and os.getpid() == self._pid:
            with suppress(OSError):
                os.write(self._progress, (json.dumps(event) + "\n").encode())

    def stop_early(self, reason: str) -> NoReturn:
        """Write the outcome and end the process, since enough has been seen."""
        self.stopped = reason
        self.end(0)
        leave(0)

    def end(self, code: int) -> None:
        """Write the outcome."""
        if os.getpid() != self._pid:
            return  # a child of the program that came back here
        gc.disable()
        now = self.now
        is_fatal = bool(code) or _oom_behind(self.failure) is not None
        oom = now.seen_ooms[-1] if now.seen_ooms and is_fatal else None
        skipping = now.loops.skipping
        fails_after_skipping = bool(code and oom is None and not self.stopped and skipping.n_skips)
        if fails_after_skipping:
            self.stopped = self._failure_after_skipping()
        if now.is_started:
            now.modules.read_all()
            if not (code or self.stopped or skipping.missing()):
                now.marks.note("END", PROGRAM, 0)
        marks = now.marks.annotations if oom is None else now.marks.annotations[: oom.n_marks]
        shown = snapshot(now, History(), marks, at=oom, modules=now.modules)
        put(torch._C, "_cuda_memorySnapshot", lambda *_: shown)
        torch.cuda.memory._dump_snapshot(self.request["snapshot"])
        status = "stopped" if self.stopped else "failed" if code else "finished"
        figures = [now.gpus.figures(d) for d in range(now.n_devices)]
        found = {
            "status": status if oom is None else "out_of_memory",
            "exit_code": code,
            "torch_version": torch.__version__,
            "steps": self.steps.n_taken if oom is None else oom.step,
            "stopped": self.stopped,
            "partial_reason": "" if oom is not None else self.stopped or skipping.missing(),
            "fails_after_skipping": fails_after_skipping,
            "n_skipped": sum(skipping.n_skipped.values()),
            "used_cuda": now.is_started,
            "devices": [
                {
                    "device": d,
                    "retries": f["retries"],
                    "n_events": f["events"],
                    **{f"{name}_bytes": f[name] for name in _SIZES},
                }
                for d, f in enumerate(figures)
            ],
            "n_ooms": sum(f["ooms"] for f in figures),
            "out_of_memory": None if oom is None else self._described(oom),
            "failure": self._failure(),
            "assumptions": [
                {
                    "location": _place(a.filename, a.line) if a.line else None,
                    "operation": a.operation,
                    "assumed": a.assumed,
                    "count": n,
                }
                for a, n in now.assumptions.made.items()
            ],
            "notes": list(now.assumptions.notes),
            "handles": now.libraries,
            "conf": now.settings.conf,
            "traits": {},
        }
        if self.traits is not None:
            of_steps = self.steps.traits(is_stopped=bool(self.stopped))
            limits = {"allowed_bytes": now.allowed_bytes}
            found["traits"] = {**self.traits.found(), **of_steps, **limits}
        if "libraries" in self.request:
            found["libraries"] = self.request["libraries"].found()
        temporary = Path(f"{self.request['outcome']}.tmp")
        temporary.write_text(json.dumps(found), encoding="utf-8")
        temporary.replace(self.request["outcome"])

    def _failure_after_skipping(self) -> str:
        """Return what ended the program, which may lack the effects of the skipped rounds."""
        failure = self._failure()
        if failure is None:
            return "the program ended with an error after rounds of its loops were skipped"
        place = failure["location"]
        where = f" at {Path(place['filename']).name}:{place['line']}" if place else ""
        said = failure["text"].strip().partition("\n")[0]
        return (
            f"the program failed{where} after rounds of its loops were skipped "
            f"({failure['type']}: {said})"
        )

    def _described(self, oom: SeenOom) -> dict[str, Any]:
        frames = _frames(_oom_behind(self.failure))[::-1]
        if not frames:
            asked_by = self.now.stacks.frames(oom.stack)
            frames = [_place(f["filename"], f["line"], f["name"]) for f in asked_by]
        own = next((f for f in frames if is_users(f["filename"])), frames[0] if frames else None)
        return {
            "step": oom.step,
            "event": oom.n_events[oom.device] - 1,
            "device": oom.device,
            "requested_bytes": oom.requested_bytes,
            "location": own,
            "stack": frames[:MAX_STACK],
            "message": str(self.failure) if self.failure is not None else "",
        }

    def _failure(self) -> dict[str, Any] | None:
        error = self.failure
        if error is None or isinstance(error, SystemExit):
            return None
        frames = _frames(error)
        own = [frame for frame in frames if is_users(frame["filename"])]
        return {
            "is_of_other_layout": _has_other_layout(error),
            "type": type(error).__name__,
            "text": (error.message if isinstance(error, ConfigError) else str(error))[:2000],
            "advice": error.hint if isinstance(error, ConfigError) else None,
            "location": (own or frames)[-1] if frames else None,
        }
