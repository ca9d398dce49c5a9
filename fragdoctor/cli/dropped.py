"""Files dropped on the page of ``fragdoctor view``, diagnosed as if named on the command line."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from io import BufferedIOBase
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO, Final, NamedTuple
from urllib.parse import unquote

from msgspec.structs import replace

from fragdoctor.cli.pages import IsWanted, Shown, go_on, shown_case
from fragdoctor.errors import ConfigError, FragdoctorError
from fragdoctor.limits import DEFAULT_LIMITS
from fragdoctor.model.case import Overrides
from fragdoctor.model.hooks import watched_by
from fragdoctor.report.base import RenderOptions
from fragdoctor.units import format_size

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
