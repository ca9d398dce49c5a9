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

from fragdoctor.model.marks import GENERATED, WORKSPACE
from fragdoctor.model.module_notes import module_note
from fragdoctor.model.settings import AllocatorSettings
from fragdoctor.rehearsal.engine import SEEN_THROUGH
from fragdoctor.rehearsal.engine.gpu import ACTIONS, STATES, Event

if TYPE_CHECKING:
    from fragdoctor.rehearsal.engine.module_notes import ModuleNotes

ENGINE: Final = str(Path(__file__).parent)
OURS: Final = (ENGINE, SEEN_THROUGH)
_NOT_USERS: Final = ("<", ENGINE, str(Path(os.__file__).parent))
_ENGINE_CALL: Final = "_engine_run_backward"
_OPERATIONS: Final = tuple(
    os.path.join(ENGINE, name)  # noqa: PTH118 - a folder ends with its separator
    for name in ("dispatch.py", "fused_layers.py", "sparse.py", "kernels" + os.sep)
)
"""Files that carry out operations: on a GPU that is C++, which shows no Python frames."""
Frame = dict[str, Any]


def _kept(code: CodeType) -> CodeType | bool:
    """Return code as a stack shows it; False if it is ours, True if it stands in for C++."""
    if not code.co_filename.startswith(OURS):
        return code
    return code.co_filename.startswith(_OPERATIONS)


class RecordedStacks:
    """Stacks by number; a stack that requests memory with different notes has a number for each.

    Attributes:
        outermost: code whose frame is omitted with those of its callers: the program is below it.
        last: number of the last stack that requested memory.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, ...], int] = {}
        self._stacks: list[tuple[tuple[Any, int], ...]] = []
        self._frames: dict[tuple[int, int], Frame] = {}
        self._kept: dict[int, CodeType | bool] = {}
        self.outermost: CodeType | None = None
        self._held: list[CodeType] = []  # so that their ids are not reused
        self._shown: dict[int, list[Frame]] = {}
        self._with_notes: dict[tuple[int, str], int] = {}
        self._notes: list[tuple[int, str]] = []
        self.last = -1

    def here(self, note: str, *, in_backward: bool) -> int:
        """Return the number of the stack that requests memory, with a note or "".

        The autograd engine works in a thread of its own on a GPU, which has no Python frames except
        those of hooks and functions that it calls.
        """
        frame: FrameType | None = sys._getframe(1)
        key: list[int] = []
        add = key.append
        kept = self._kept
        outermost = self.outermost
        while frame is not None:
            code = frame.f_code
            if code is outermost or (in_backward and code.co_name == _ENGINE_CALL):
                break
            number = id(code)
            if number not in kept:
                kept[number] = _kept(code)
                self._held.append(code)
            if kept[number] is True:
                key.clear()
            elif kept[number]:
                add(number)
                add(frame.f_lasti)
            frame = frame.f_back
        place = tuple(key)
        found = self._numbers.get(place)
        if found is None:
            found = self._numbers[place] = len(self._stacks)
            self._stacks.append(tuple((kept[key[i]], key[i + 1]) for i in range(0, len(key), 2)))
            self._notes.append((found, ""))
        if note:
            found = self._noted(found, note)
        self.last = found
        return found

    def _noted(self, stack: int, note: str) -> int:
        found = self._with_notes.get((stack, note))
        if found is None:
            found = self._with_notes[stack, note] = len(self._stacks)
            self._stacks.append(self._stacks[stack])
            self._notes.append((stack, note))
        return found

    def note(self, number: int) -> str:
        """Return the note on a stack's requests: the path of a module, or ``WORKSPACE``."""
        return self._notes[number][1] if number >= 0 else ""

    def frames(self, number: int) -> list[Frame]:
        """Return a stack as a snapshot has it, innermost frame first; [] for -1.

        Equal stacks share one list and equal frames one dict, which the pickle then refers to.
        """
        if number < 0:
            return []
        number = self._notes[number][0]
        found = self._shown.get(number)
        if found is None:
            found = self._shown[number] = [self._frame(*place) for place in self._stacks[number]]
        return found

    def _frame(self, code: CodeType, instruction: int) -> Frame:
        place = (id(code), instruction)  # what Dynamo writes may have constants without a hash
        found = self._frames.get(place)
        if found is None:
            found = {
                "name": code.co_name,
                "filename": code.co_filename,
                "line": _line(code, instruction),
            }
            self._frames[place] = found
        return found


def _line(code: CodeType, instruction: int) -> int:
    line = code.co_firstlineno
    for start, end, number in code.co_lines():
        if start <= instruction < end:
            return number if number is not None else line
    return line


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
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


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
        "allocator_settings": settings_of(now.budget.settings),
        "external_annotations": annotations[-history.max_entries :],
    }


def settings_of(settings: AllocatorSettings) -> dict[str, Any]:
    """Return the settings under the names that a snapshot uses."""
    return settings.recorded() | {
        "pinned_num_register_threads": 1,
        "release_lock_on_cudamalloc": False,
        "pinned_use_cuda_host_register": False,
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
        entry = _entry(event, action, stacks if with_stacks else None)
        entries.append(entry)
        note = stacks.note(event.stack)
        if note == WORKSPACE:
            entry["user_metadata"] = WORKSPACE
        elif number in held:
            entry["user_metadata"] = held[number]
        elif note and modules is not None and event.action == ALLOC:
            entry["user_metadata"] = module_note(note)
    return entries[-history.max_entries :] if history.max_entries < len(entries) else entries


def _entry(event: Event, action: str, stacks: RecordedStacks | None) -> dict[str, Any]:
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
    if stacks is not None and event.stack >= 0:
        entry["frames"] = stacks.frames(event.stack)
    return entry
