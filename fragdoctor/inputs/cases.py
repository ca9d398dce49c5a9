"""Files, directories, bundles and standard input become one case: each goes to its reader."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from os import PathLike, fspath
from pathlib import Path
from typing import BinaryIO, Final, cast

from fragdoctor.errors import ConfigError, InputError, LimitExceeded, NotASnapshot, RefusedSnapshot
from fragdoctor.inputs.bundles import SNAPSHOT, BundleFiles, is_bundle, open_bundle, with_facts
from fragdoctor.inputs.kinds import Kind, kind_of
from fragdoctor.inputs.remote import is_remote, without_secrets
from fragdoctor.inputs.source import HEAD_BYTES, ByteStream, open_source
from fragdoctor.limits import DEFAULT_LIMITS
from fragdoctor.model.case import BundleFacts, Case, Overrides, StatsSeries
from fragdoctor.model.oom import OomLog, OomMessage
from fragdoctor.model.snapshot import Snapshot
from fragdoctor.model.story import Scene
from fragdoctor.units import format_size

STDIN: Final = "-"
_MAX_DIRECTORY: Final = 1000


@dataclass(slots=True)
class _Parts:
    """What has been read so far."""

    snapshots: list[tuple[str, Snapshot]] = field(default_factory=list)
    logs: list[OomLog] = field(default_factory=list)
    stats: list[StatsSeries] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    bundles: list[tuple[str, BundleFacts]] = field(default_factory=list)

    @property
    def n_read(self) -> int:
        """Inputs that could be used so far."""
        return len(self.snapshots) + len(self.logs) + len(self.stats)


def read_case(names: Sequence[str], overrides: Overrides, *, beside: Sequence[str] = ()) -> Case:
    """Return one case of all inputs.

    Texts and statistics ``beside`` them are read as well, and left out where they hold nothing.

    Raises:
        InputError: an input is missing, unreadable, or nothing that fragdoctor knows.
        ConfigError: the inputs do not belong to one process.
    """
    if list(names).count(STDIN) > 1:
        raise ConfigError("Standard input is given twice.", hint="Give - once.")
    parts = _Parts()
    for name in names:
        _read_input(name, parts)
    for name in beside:
        # Notes that lie around are no reason to refuse the recording.
        with contextlib.suppress(InputError):
            _read_one(name, parts)
    if len(parts.snapshots) > 1:
        raise _several([name for name, _ in parts.snapshots])
    if len(parts.bundles) > 1:
        raise _several([name for name, _ in parts.bundles], "bundles")
    facts = parts.bundles[0][1] if parts.bundles else None
    return Case(
        snapshot=parts.snapshots[0][1] if parts.snapshots else None,
        oom=joined_logs(parts.logs),
        stats=joined_stats(parts.stats),
        overrides=overrides if facts is None else with_facts(overrides, facts),
        sources=tuple(parts.sources),
        bundle=facts,
    )


def read_bundle(path: str | PathLike[str], overrides: Overrides | None = None) -> Case:
    """Return the case that a bundle holds; what the user says wins over what it knows.

    Raises:
        InputError: it is no bundle, damaged, or refused; the subclasses say which.
    """
    if not is_bundle(path):
        raise NotASnapshot(
            f"{fspath(path)} is no bundle.", hint="A bundle is written by: fragdoctor run"
        )
    return read_case([fspath(path)], overrides or Overrides())


def read_messages(words: Sequence[str], overrides: Overrides) -> Case:
    """Return a case of messages: the words themselves, a file, or standard input.

    Raises:
        InputError: there is nothing to read, or it is a snapshot.
    """
    from fragdoctor.inputs.messages import find_messages

    if not words or list(words) == [STDIN] or (len(words) == 1 and _is_file(words[0])):
        name = words[0] if words else STDIN
        if name != STDIN:
            _check_file(name)
        with _opened(name) as stream:
            data = _read_all(stream, name)
    else:
        name, data = "command line", _spoken(words)
    kind = kind_of(data[:HEAD_BYTES])
    if kind is Kind.EMPTY:
        raise _empty(name)
    is_binary = kind in (Kind.ARCHIVE, Kind.BINARY)
    is_snapshot = kind is Kind.SNAPSHOT
    log = OomLog(()) if is_binary or data[:1] == b"\x80" else find_messages(decoded(data))
    if (is_binary or is_snapshot) and not log.messages:
        what = "a memory snapshot" if is_snapshot else "binary data"
        raise InputError(
            f"{_shown(name)} is {what}, not a message or a log.",
            hint=f"Run: fragdoctor analyze {name}",
        )
    return Case(oom=log, overrides=overrides, sources=(_shown(name),))


def read_snapshot(name: str) -> Snapshot:
    """Return the snapshot in a file or on standard input.

    Raises:
        InputError: the input is missing, unreadable, or no snapshot.
    """
    parts = _Parts()
    _read_input(name, parts)
    damaged = [u for _, facts in parts.bundles for u in facts.unusable if u.startswith(SNAPSHOT)]
    if damaged and not parts.snapshots:
        raise InputError(
            f"In {name} {damaged[0]}.", hint=f"Without it, run: fragdoctor analyze {name}"
        )
    if not parts.snapshots:
        raise NotASnapshot(
            f"{_shown(name)} is no memory snapshot.",
            hint=f"Only a trace can be replayed. Run: fragdoctor analyze {name}",
        )
    return parts.snapshots[0][1]


def decoded(data: bytes) -> str:
    """Return text of any usual encoding; what cannot be decoded becomes U+FFFD."""
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):  # PowerShell's > writes UTF-16
        return data.decode("utf-16", errors="replace")
    return data.decode("utf-8-sig", errors="replace")


def _read_input(name: str, parts: _Parts) -> None:
    if name != STDIN and is_bundle(name):
        with open_bundle(name) as bundle:
            _read_bundle(name, bundle, parts)
    elif name != STDIN and os.path.isdir(name):  # noqa: PTH112 - never raises, unlike Path
        _read_directory(name, parts)
    else:
        _read_one(name, parts)


def _read_bundle(name: str, bundle: BundleFiles, parts: _Parts) -> None:
    """Read what a bundle holds; a part that is damaged is left out where another tells something.

    What no genuine file holds is refused, whatever lies beside it.
    """
    if not bundle.names:
        raise InputError(
            f"{_shown(name)} holds a manifest and nothing else.",
            hint=" ".join(bundle.facts.problems[:1]),
        )
    shown = _shown(name)
    unusable: list[tuple[str, InputError]] = []
    n_before = parts.n_read
    for file in bundle.names:
        try:
            _read_member(name, file, bundle, parts)
        except (RefusedSnapshot, LimitExceeded) as e:
            raise type(e)(
                f"{file} in {shown} is refused: {e.message}", hint=e.hint, offset=e.offset
            ) from e
        except InputError as e:  # what lies beside it is worth as much without it
            unusable.append((file, e))
    problems = [f"{file} cannot be used: {_reason(e)}" for file, e in unusable]
    if unusable and parts.n_read == n_before:
        raise InputError(
            f"{shown} holds nothing to judge: {problems[0]}.", hint=unusable[0][1].hint
        )
    parts.bundles.append((name, replace(bundle.facts, unusable=tuple(problems))))
    parts.sources.append(shown)


def _reason(error: InputError) -> str:
    at = "" if error.offset is None else f" (byte {error.offset})"
    return error.message.rstrip(".") + at


def _read_member(name: str, file: str, bundle: BundleFiles, parts: _Parts) -> None:
    """Read one file of a bundle, each by the kind of its content."""
    from fragdoctor.inputs.snapshot_reader import read_snapshot as load

    with bundle.open(file) as raw:
        if file == SNAPSHOT:
            parts.snapshots.append((name, load(raw)))
            return
        with open_source(raw) as stream:
            data = _read_all(stream, "it")
        if data:
            _read_text("it", kind_of(data[:HEAD_BYTES]), data, parts)


def _read_directory(name: str, parts: _Parts) -> None:
    """Read the folder of one recording: a snapshot and what lies beside it."""
    files = sorted(p for p in Path(name).iterdir() if p.is_file() and not p.name.startswith("."))
    if len(files) > _MAX_DIRECTORY:
        raise ConfigError(
            f"{name} holds {len(files)} files.", hint="Give the files of one process by name."
        )
    kinds = {p: kind_of(_head(p)) for p in files}
    snapshots = [p for p in files if kinds[p] is Kind.SNAPSHOT]
    if len(snapshots) > 1:
        raise _several([str(p) for p in snapshots])
    stats = [p for p in files if kinds[p] is Kind.STATS]
    texts = [p for p in files if kinds[p] is Kind.TEXT and p.suffix.lower() in _TEXT_SUFFIXES]
    n_before = len(parts.sources)
    for path in (*snapshots, *stats):
        _read_one(str(path), parts)
    for path in texts:
        # Notes that lie around are no reason to refuse the recording.
        with contextlib.suppress(NothingFound):
            _read_one(str(path), parts)
    if len(parts.sources) == n_before:
        raise InputError(
            f"{name} holds no snapshot, statistics, message or log.",
            hint="Give a file, or a directory that holds snapshot.pickle.",
        )


class NothingFound(InputError):  # noqa: N818 - reads as what it says
    """A text holds nothing that fragdoctor knows."""


_TEXT_SUFFIXES: Final = (".txt", ".log", ".out", ".err", ".stderr", ".stdout")


def _several(names: Sequence[str], what: str = "snapshots") -> ConfigError:
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return ConfigError(
        f"These are {len(names)} {what}: {shown}. One run looks at one process.",
        hint=f"Run: fragdoctor analyze {names[0]}",
    )


def _read_one(name: str, parts: _Parts) -> None:
    """Read one file or standard input into ``parts``."""
    if name != STDIN:
        _check_file(name)
    with _opened(name) as stream:
        kind = kind_of(stream.head)
        if kind is Kind.EMPTY:
            raise _empty(name)
        if kind is Kind.ARCHIVE:
            raise NotASnapshot(
                f"{_shown(name)} is a zip archive, such as torch.save() writes.",
                hint="A snapshot is written by torch.cuda.memory._dump_snapshot(), a bundle by "
                "fragdoctor run; give a bundle by the name of its file.",
            )
        if kind in (Kind.SNAPSHOT, Kind.BINARY):
            parts.snapshots.append((name, _load(name, stream)))
        else:
            _read_text(name, kind, _read_all(stream, name), parts)
    parts.sources.append(_shown(name))


def _load(name: str, stream: ByteStream) -> Snapshot:
    from fragdoctor.inputs.snapshot_reader import read_snapshot as load

    # A file is opened anew, so that what the reader reports is about the file itself; a pipe
    # cannot be, nor should a URL, and what was looked at is still ahead in the stream.
    is_file = name != STDIN and not is_remote(name) and stat.S_ISREG(Path(name).stat().st_mode)
    return load(name if is_file else cast("BinaryIO", stream))


def _read_text(name: str, kind: Kind, data: bytes, parts: _Parts) -> None:
    from fragdoctor.inputs.messages import find_messages
    from fragdoctor.inputs.stats_reader import looks_like_summary, read_stats

    text = decoded(data)
    has_stats = kind is Kind.STATS or looks_like_summary(text)
    if has_stats:
        parts.stats.append(read_stats(text))
    if kind is Kind.STATS:
        return
    log = find_messages(text)
    if has_stats and all(m.kind == "negative" for m in log.messages):
        return  # statistics hold words of failures without one having happened
    if log.messages or log.markers:
        parts.logs.append(log)
    else:
        raise NothingFound(
            f"{_shown(name)} holds no out-of-memory message, no statistics and no snapshot.",
            hint="Give the text of the exception, or a file of _dump_snapshot().",
        )


def _check_file(name: str) -> None:
    """Refuse early and clearly what opening would refuse, or never finish."""
    if is_remote(name):
        return  # opening it says what is wrong
    path = Path(name)
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as e:
        if len(name) > 40 and len(name.split()) > 3:
            raise InputError(
                "This is text, not a file.", hint="Run: fragdoctor oom 'the message'"
            ) from e
        if isinstance(e, FileNotFoundError):
            raise InputError(f"{name} does not exist.", hint="Check the path.") from e
        reason = getattr(e, "strerror", None) or e
        raise InputError(f"{name} cannot be opened: {reason}.", hint="Check the path.") from e
    if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)):
        raise InputError(f"{name} is no file.", hint="Give a file, a directory, or - for a pipe.")
    if not os.access(path, os.R_OK):
        raise InputError(f"{name} cannot be opened: permission denied.")


def _read_all(stream: ByteStream, name: str) -> bytes:
    """Return a text input whole, up to the limit."""
    limit = DEFAULT_LIMITS.max_text_bytes
    data = bytearray()
    while chunk := stream.read(1 << 20):
        data += chunk
        if len(data) > limit:
            raise LimitExceeded(
                f"{_shown(name)} is longer than {format_size(limit)}.",
                hint="Cut the part around the failure out of it.",
            )
    return bytes(data)


def _opened(name: str) -> ByteStream:
    """Return the bounded stream of a file or standard input, its head already read."""
    try:
        return open_source(name)
    except OSError as e:
        raise InputError(f"{_shown(name)} cannot be read: {e.strerror or e}.") from e


def _empty(name: str) -> InputError:
    return InputError(
        f"{_shown(name)} is empty.",
        hint="Pipe a program's output in, or paste the text of the exception."
        if name in (STDIN, "command line")
        else "A program that was killed while writing leaves such a file.",
    )


def _head(path: Path) -> bytes:
    try:
        with open_source(path) as stream:
            return stream.head
    except InputError:
        return b""


def _spoken(words: Sequence[str]) -> bytes:
    """Return the words of the command line as text; a lone word that looks like a path is one."""
    text = " ".join(words)
    if len(words) == 1 and len(text.split()) == 1 and ("/" in text or "." in text):
        raise InputError(f"{text} does not exist.", hint="Check the path, or paste the message.")
    return text.encode("utf-8", errors="surrogatepass")


def _is_file(word: str) -> bool:
    """Return whether a word names something that exists; a long message never does."""
    if not word:
        return False
    if is_remote(word) and len(word.split()) == 1:
        return True
    try:
        mode = Path(word).stat().st_mode
    except (OSError, ValueError):
        return False
    if stat.S_ISDIR(mode):
        raise InputError(
            f"{word} is a directory.", hint=f"Give a file, or run: fragdoctor analyze {word}"
        )
    return True


def _shown(name: str) -> str:
    return "standard input" if name == STDIN else without_secrets(name)


def joined_logs(logs: Sequence[OomLog]) -> OomLog | None:
    """Return the messages of all texts as one log; the first text's first cause is primary."""
    if len(logs) < 2:
        return logs[0] if logs else None
    messages: list[OomMessage] = []
    primary: int | None = None
    scenes: Sequence[Scene] = ()  # one text's: lines of several texts have no common order
    for log in logs:
        if len(log.scenes) > len(scenes):
            scenes = _moved(log.scenes, len(messages))
        if primary is None and log.messages:
            primary = len(messages) + log.primary
        messages.extend(log.messages)
    return OomLog(
        tuple(messages),
        tuple(m for log in logs for m in log.markers),
        primary or 0,
        sum(log.n_lines for log in logs),
        sum(log.n_bytes for log in logs),
        scenes,
    )


def _moved(scenes: Sequence[Scene], n_before: int) -> tuple[Scene, ...]:
    """Return scenes that refer to messages which now stand behind others."""
    return tuple(
        s if s.message is None else replace(s, message=s.message + n_before) for s in scenes
    )


def joined_stats(series: Sequence[StatsSeries]) -> StatsSeries | None:
    """Return all statistics as one series; a rounded summary yields to exact figures."""
    if len(series) < 2:
        return series[0] if series else None
    entries = [e for s in series for e in s.entries]
    exact = {e.device for e in entries if e.origin == "memory_stats"}
    kept = [
        e for e in entries if e.origin == "memory_stats" or not (e.device in exact or None in exact)
    ]
    repeats = len({e.device for e in kept}) < len(kept)
    return StatsSeries(tuple(kept), is_series=repeats or any(s.is_series for s in series))
