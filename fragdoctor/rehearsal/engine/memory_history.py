"""The memory history of a rehearsal, as PyTorch's recorder keeps it and its snapshots show it.

The stack of each request is Python's, and each distinct stack is stored once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, Final

from fragdoctor.model.marks import GENERATED, WORKSPACE, module_note
from fragdoctor.rehearsal.engine import SEEN_THROUGH, frames_from
from fragdoctor.rehearsal.engine.gpu import ACTIONS, STATES, Event

if TYPE_CHECKING:
    from fragdoctor.rehearsal.engine.module_notes import ModuleNotes

ENGINE: Final = str(Path(__file__).parent)
OURS: Final = (ENGINE, SEEN_THROUGH)
_NOT_USERS: Final = ("<", *OURS, str(Path(os.__file__).parent))
_ENGINE_CALL: Final = "_engine_run_backward"
_OPERATIONS: Final = tuple(
    os.path.join(ENGINE, name)  # noqa: PTH118 - a folder ends with its separator
    for name in ("dispatch.py", "fused_layers.py", "recurrent.py", "sparse.py", "kernels" + os.sep)
)
"""Files that carry out operations: on a GPU that is C++, which shows no Python frames."""
Frame = dict[str, Any]
Stack = tuple[tuple[int, ...], str]
"""For each frame the id of its code (what Dynamo writes may have no hash) and the instruction that
it has reached, innermost frame first; and the note on the request."""


def _is_shown(code: CodeType) -> bool | None:
    """Return whether a stack shows code; None if it is ours and stands in for C++."""
    if code.co_filename.startswith(_OPERATIONS):
        return None
    return not code.co_filename.startswith(OURS)


class RecordedStacks:
    """Stacks by number; a stack that requests memory with different notes has a number for each.

    Attributes:
        outermost: code whose frame is omitted with those of its callers: the program is below it.
        last: number of the last stack that requested memory.
    """

    def __init__(self) -> None:
        self._numbers: dict[Stack, int] = {}
        self._stacks: list[Stack] = []
        self._frames: dict[tuple[int, int], Frame] = {}
        self._codes: dict[int, CodeType] = {}  # kept, so that their ids are not reused
        self._is_shown: dict[int, bool | None] = {}
        self.outermost: CodeType | None = None
        self._shown: dict[tuple[int, ...], list[Frame]] = {}
        self.last = -1

    def here(self, note: str, *, in_backward: bool) -> int:
        """Return the number of the stack that requests memory, with a note or "".

        The autograd engine works in a thread of its own on a GPU, which has no Python frames except
        those of hooks and functions that it calls.
        """
        frame: FrameType | None = sys._getframe(1)
        key: list[int] = []
        add = key.append
        is_shown = self._is_shown
        outermost = self.outermost
        while frame is not None:  # as fast as it can be: each request asks
            code = frame.f_code
            if code is outermost or (in_backward and code.co_name == _ENGINE_CALL):
                break
            number = id(code)
            if number not in is_shown:
                self._codes[number], is_shown[number] = code, _is_shown(code)
            if is_shown[number]:
                add(number)
                add(frame.f_lasti)
            elif is_shown[number] is None:
                key.clear()
            frame = frame.f_back
        stack = tuple(key), note
        found = self._numbers.setdefault(stack, len(self._stacks))
        if found == len(self._stacks):
            self._stacks.append(stack)
        self.last = found
        return found

    def note(self, number: int) -> str:
        """Return the note on a stack's requests: the path of a module, or ``WORKSPACE``."""
        return self._stacks[number][1] if number >= 0 else ""

    def frames(self, number: int) -> list[Frame]:
        """Return a stack as a snapshot has it, innermost frame first; [] for -1.

        Equal stacks share one list and equal frames one dict, which the pickle then refers to.
        """
        if number < 0:
            return []
        places = self._stacks[number][0]
        found = self._shown.get(places)
        if found is None:
            pairs = zip(places[::2], places[1::2], strict=True)
            found = self._shown[places] = [self._frame(*pair) for pair in pairs]
        return found

    def _frame(self, number: int, instruction: int) -> Frame:
        found = self._frames.get((number, instruction))
        if found is None:
            code = self._codes[number]
            lines = (n for start, end, n in code.co_lines() if start <= instruction < end)
            line = next(lines, None)
            found = self._frames[number, instruction] = {
                "name": code.co_name,
                "filename": code.co_filename,
                "line": code.co_firstlineno if line is None else line,
            }
        return found


def is_users(filename: str) -> bool:
    """Return whether a file is the user's: not installed, not Python's own, not Inductor's."""
    return not (
        "site-packages" in filename
        or "dist-packages" in filename
        or filename.startswith(_NOT_USERS)
        or GENERATED.search(filename)
    )


def users_frame() -> FrameType | None:
    """Return the innermost active frame of the user's own code, or None if there is none."""
    return next((f for f in frames_from(sys._getframe(1)) if is_users(f.f_code.co_filename)), None)


def users_line() -> str:
    """Return the file and line that the user's own code is at, ``train.py:23``, or ""."""
    frame = users_frame()
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""


OOM: Final = ACTIONS.index("oom")
ALLOC: Final = ACTIONS.index("alloc")
_ALLOCATED: Final = STATES.index("active_allocated")


@dataclass(slots=True)
class History:
    """What a recording keeps, according to the arguments of ``_record_memory_history``.

    Attributes:
        enabled: None, ``state`` or ``all``.
        context: None, ``state``, ``alloc`` or ``all``.
        max_entries: events kept for each device.
        skip_actions: actions left out.
        first: number of the first event, by device.
        first_mark: number of the first mark.
    """

    enabled: str | None = "all"
    context: str | None = "all"
    max_entries: int = 2**63 - 1
    skip_actions: tuple[str, ...] = ()
    first: dict[int, int] = field(default_factory=dict)
    first_mark: int = 0


def snapshot(
    now: Any,
    history: History,
    annotations: list[dict[str, Any]],
    *,
    only_pool: tuple[int, int] | None = None,
    at: Any = None,
    modules: ModuleNotes | None = None,
) -> dict[str, Any]:
    """Return segments, traces, settings and annotations of a rehearsal, the session ``now``.

    ``at`` is the moment of a failed request. With ``modules`` each allocation is noted with the
    module that it is for.
    """
    has_stacks = history.enabled is not None and history.context is not None
    stacks = now.stacks if has_stacks else None
    segments: list[dict[str, Any]] = []
    traces = []
    for device in range(now.n_devices):
        found = now.gpus.segments(device) if at is None else at.segments[device]
        segments += _segments(found, device, stacks, only_pool)
        events = now.gpus.trace(device, history.first.get(device, 0))
        n_events = None if at is None else at.n_events[device]
        traces.append(_trace(device, events[:n_events], now.stacks, history, modules))
    return {
        "segments": segments,
        "device_traces": traces,
        "allocator_settings": now.settings.recorded()
        | {
            "pinned_num_register_threads": 1,
            "release_lock_on_cudamalloc": False,
            "pinned_use_cuda_host_register": False,
        },
        "external_annotations": annotations[-history.max_entries :],
    }


def _segments(
    segments: Iterable[Any],
    device: int,
    stacks: RecordedStacks | None,
    only_pool: tuple[int, int] | None,
) -> list[dict[str, Any]]:
    found = []
    for segment, blocks in segments:
        if only_pool not in {None, (0, 0)} and (0, segment.pool) != only_pool:
            continue
        shown = [
            {
                "address": block.address,
                "size": block.size,
                "requested_size": block.requested,
                "state": STATES[block.state],
                "frames": [] if stacks is None else stacks.frames(block.stack),
            }
            for block in blocks
        ]
        active = [block for block in blocks if block.state]
        found.append(
            {
                "device": device,
                "address": segment.address,
                "total_size": segment.size,
                "allocated_size": sum(b.size for b in active if b.state == _ALLOCATED),
                "active_size": sum(b.size for b in active),
                "requested_size": sum(b.requested for b in active),
                "stream": segment.stream,
                "segment_type": "small" if segment.is_small else "large",
                "segment_pool_id": (0, segment.pool),
                "is_expandable": bool(segment.is_expandable),
                "frames": [],
                "blocks": shown,
            }
        )
    return found


def _trace(
    device: int,
    events: Sequence[Event],
    stacks: RecordedStacks,
    history: History,
    modules: ModuleNotes | None,
) -> list[dict[str, Any]]:
    if history.enabled != "all":
        return []
    with_stacks = history.context in {"alloc", "all"}
    entries = []
    held = {} if modules is None else modules.of_blocks(device, events)
    for number, event in enumerate(events):
        action = ACTIONS[event.action]
        if action in history.skip_actions:
            continue
        entry: dict[str, Any] = {
            "action": action,
            "device_free" if event.action == OOM else "addr": event.address,
            "size": event.size,
            "stream": event.stream,
            "time_us": event.time_us,
            "compile_context": "N/A",
            "user_metadata": "",
            "pool_id": (0, event.pool),
        }
        if with_stacks and event.stack >= 0:
            entry["frames"] = stacks.frames(event.stack)
        entries.append(entry)
        note = stacks.note(event.stack)
        if note == WORKSPACE:
            entry["user_metadata"] = WORKSPACE
        elif number in held:
            entry["user_metadata"] = held[number]
        elif note and modules is not None and event.action == ALLOC:
            entry["user_metadata"] = module_note(note)
    return entries[-history.max_entries :] if history.max_entries < len(entries) else entries
