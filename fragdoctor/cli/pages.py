"""The pages that ``fragdoctor view`` serves: of named inputs, and of files dropped on a page."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from io import BufferedIOBase
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, BinaryIO, Final, NamedTuple
from urllib.parse import unquote

from msgspec.structs import replace

from fragdoctor.errors import ConfigError, FragdoctorError
from fragdoctor.limits import DEFAULT_LIMITS
from fragdoctor.model.case import Overrides
from fragdoctor.model.hooks import watched_by
from fragdoctor.report.base import RenderOptions
from fragdoctor.units import format_size

if TYPE_CHECKING:
    from fragdoctor.future.whatif import FairReplay
    from fragdoctor.model.case import Case
    from fragdoctor.model.diagnosis import Diagnosis
    from fragdoctor.trace.replay import Reproduction
    from fragdoctor.trace.trace import Trace


IsWanted = Callable[[], bool]
Answer = Callable[[object, IsWanted], dict[str, Any]]

_LOOK_EVERY_S: Final = 0.05
MAX_CONF: Final = 1000
_SHOWN: Final = (
    *("conf", "capacity_bytes", "margin_bytes", "fits", "is_conclusive", "note"),
    *("oom_event", "oom_bytes", "ooms", "retries", "driver_calls"),
    *("peak_reserved_bytes", "peak_allocated_bytes"),
    *("smallest_capacity_bytes", "smallest_capacity_note"),
)


class Shown(NamedTuple):
    """A page, and the replays that answer its what-ifs, or None if it has none."""

    page: bytes
    answer: Answer | None = None


def shown_case(case: Case) -> Shown:
    """Diagnose a case; return its page.

    Raises:
        FragdoctorError: the case cannot be diagnosed.
    """
    from fragdoctor.diagnosis.pipeline import diagnose
    from fragdoctor.report.page.page import render_page
    from fragdoctor.report.views.analyze import document

    diagnosis = diagnose(case)
    page = render_page(diagnosis, document(diagnosis, RenderOptions()), is_live=True)
    return Shown(page.encode(), ViewReplays(diagnosis))


class Abandoned(Exception):  # noqa: N818 - not an error: whoever asked is gone
    """Nobody is waiting for the answer anymore."""


class ViewReplays:
    """Answers what-ifs by replay; each device is reproduced once, when it is first asked about."""

    def __init__(self, diagnosis: Diagnosis) -> None:
        self._diagnosis = diagnosis
        self._traces: dict[int, Trace] = {d: a.trace for d, a in diagnosis.analyses.items()}
        self._replay_of = cache(self._replayed)
        self._lock = threading.Lock()

    def __call__(self, question: object, is_wanted: IsWanted) -> dict[str, Any]:
        """Return the replay's answer to a question.

        Args:
            question: ``device``, ``conf`` ("" or null: as recorded), ``capacity_bytes`` (null: as
                recorded) and ``smallest`` (whether to look for the smallest capacity).
            is_wanted: returns whether somebody is still waiting for the answer.

        Raises:
            FragdoctorError: a setting is wrong, or there is nothing to replay.
            ValueError: the question is malformed.
            Abandoned: nobody is waiting for the answer.
        """
        from fragdoctor.future.search import with_smallest_capacity
        from fragdoctor.future.whatif import WhatIf
        from fragdoctor.model.simulation import Promise
        from fragdoctor.report import words
        from fragdoctor.report.views.advice import promised

        device, conf, capacity, is_smallest = self._read(question)
        with self._turn(is_wanted):
            reproduction, fair = self._replay_of(device)
            what_if = WhatIf(conf=conf, capacity_bytes=capacity)
            with watched_by(lambda *_: go_on(is_wanted)):
                go_on(is_wanted)
                result = fair.replay(what_if)
                if is_smallest:
                    result = with_smallest_capacity(reproduction, what_if, result)
        outlook = result.outlook
        promise = promised(Promise.of(result.fits, outlook), self._diagnosis)
        return {
            **{name: getattr(result, name) for name in _SHOWN},
            "outlook": "" if outlook is None else words.outlook_text(outlook),
            "said": [promise.style.value, promise.text],
        }

    def _read(self, question: object) -> tuple[int, str | None, int | None, bool]:
        """Return the device, the settings, the capacity, and whether the smallest is wanted."""
        if not isinstance(question, dict):
            raise ValueError("no object")  # noqa: TRY004 - what was sent is wrong, not the program
        device, conf, capacity = (question.get(k) for k in ("device", "conf", "capacity_bytes"))
        if type(device) is not int or device not in self._traces:
            raise ValueError("no such device")
        if conf is not None and (not isinstance(conf, str) or len(conf) > MAX_CONF):
            raise ValueError("conf is no text")
        if capacity is not None and (type(capacity) is not int or not 0 < capacity < 2**50):
            raise ValueError("capacity_bytes is no size")
        return device, conf or None, capacity, question.get("smallest") is True

    @contextlib.contextmanager
    def _turn(self, is_wanted: IsWanted) -> Iterator[None]:
        """Wait until no other question is being answered, while somebody waits for this answer."""
        while not self._lock.acquire(timeout=_LOOK_EVERY_S):
            go_on(is_wanted)
        try:
            yield
        finally:
            self._lock.release()

    def _replayed(self, device: int) -> tuple[Reproduction, FairReplay]:
        from fragdoctor.future.whatif import FairReplay
        from fragdoctor.trace.reproduction import reproduce

        reproduction = reproduce(self._traces[device])
        return reproduction, FairReplay(reproduction)


def go_on(is_wanted: IsWanted) -> None:
    """Raise ``Abandoned`` if nobody is waiting anymore."""
    if not is_wanted():
        raise Abandoned


MAX_FILES: Final = 256
MAX_NAME: Final = 200
_CHUNK_BYTES: Final = 1 << 20


class Sent(NamedTuple):
    """An announced file: its name without folders, and its size."""

    name: str
    n_bytes: int


def announced(text: str) -> Sequence[Sent]:
    """Return the files that a request announces, in their order in its body.

    Args:
        text: their names and sizes, as JSON in which every special character is percent-encoded.

    Raises:
        ValueError: the text is malformed.
    """
    found: list[Sent] = []
    told = json.loads(unquote(text, errors="strict"))
    if not isinstance(told, list) or not all(isinstance(pair, list) for pair in told):
        raise ValueError("no list of files")
    for name, n_bytes in told:
        if not isinstance(name, str) or type(n_bytes) is not int or n_bytes < 0:
            raise ValueError("no file")
        last = re.split(r"[/\\]", name)[-1].replace("\0", "")[-MAX_NAME:]
        found.append(Sent(last if last not in ("", ".", "..") else "file", n_bytes))
    if not 0 < len(found) <= MAX_FILES:
        raise ValueError("no files, or too many")
    return found


def opened(
    known: Overrides, files: Sequence[Sent], body: BufferedIOBase, is_wanted: IsWanted
) -> Shown:
    """Read files from the body of a request and return their page.

    The files are kept in a private folder until they have been diagnosed.

    Raises:
        FragdoctorError: the files cannot be diagnosed, are refused, or do not fit on the disk.
        ValueError: there are fewer bytes than announced.
        Abandoned: nobody is waiting for the page.
    """
    with TemporaryDirectory(prefix="fragdoctor-") as name:
        folder = Path(name)
        _check_room(sum(file.n_bytes for file in files), folder)
        paths = []
        for number, file in enumerate(files):
            (folder / str(number)).mkdir()  # two files may have the same name
            path = folder / str(number) / file.name
            with path.open("xb") as copy:
                _copy(body, copy, file.n_bytes)
            paths.append(str(path))
        try:
            with watched_by(lambda *_: go_on(is_wanted)):
                return _diagnosed(paths, [file.name for file in files], known)
        except FragdoctorError as e:
            here = re.compile(re.escape(f"{folder}/") + r"\d+/")
            raise ConfigError(here.sub("", e.message), hint=here.sub("", e.hint)) from e


def _check_room(n_bytes: int, folder: Path) -> None:
    limit = min(DEFAULT_LIMITS.max_input_bytes, shutil.disk_usage(folder).free)
    if n_bytes > limit:
        raise ConfigError(
            f"They need {format_size(n_bytes)}; there is room for {format_size(limit)}.",
            hint="Name the file instead: fragdoctor view FILE",
        )


def _copy(body: BufferedIOBase, copy: BinaryIO, n_bytes: int) -> None:
    while n_bytes:
        part = body.read(min(n_bytes, _CHUNK_BYTES))
        if not part:
            raise ValueError("cut short")
        copy.write(part)
        n_bytes -= len(part)


def _diagnosed(paths: Sequence[str], names: Sequence[str], known: Overrides) -> Shown:
    from fragdoctor.cli.analyze import RankOptions, analyze_fleet
    from fragdoctor.inputs.cases import read_case
    from fragdoctor.inputs.discovery import discover

    found = discover(paths) if len(paths) > 1 else None
    if found is not None and found.is_fleet:
        _, page = analyze_fleet(
            found, known, RenderOptions(), RankOptions(workers=1, output_format="html")
        )
        return Shown(page.encode())
    case = read_case(paths if found is None else found.case_names, known)
    return shown_case(replace(case, sources=tuple(names)))
