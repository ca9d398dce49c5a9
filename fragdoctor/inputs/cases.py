"""Files, directories, bundles and standard input become one case: each goes to its reader."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import BinaryIO, Final, cast

from msgspec import Struct, field
from msgspec.structs import replace

from fragdoctor.errors import ConfigError, InputError, LimitExceeded, NotASnapshot, RefusedSnapshot
from fragdoctor.inputs.bundles import (
    CENSUS,
    SNAPSHOT,
    BundleFiles,
    is_bundle,
    open_bundle,
    with_facts,
)
from fragdoctor.inputs.classify import (
    STDIN,
    TEXT_SUFFIXES,
    Input,
    InputKind,
    Wanted,
    classify,
    kind_of,
    open_input,
    read_text,
    something_else,
)
from fragdoctor.inputs.remote import is_remote
from fragdoctor.inputs.source import HEAD_BYTES, open_source, shown
from fragdoctor.model.case import BundleFacts, Case, OomLog, OomMessage, Overrides, StatsSeries
from fragdoctor.model.census import Census
from fragdoctor.model.snapshot import Snapshot
from fragdoctor.model.story import Scene

_MAX_DIRECTORY: Final = 1000


class _Parts(Struct):
    """What has been read so far."""

    snapshots: list[tuple[str, Snapshot]] = field(default_factory=list)
    logs: list[OomLog] = field(default_factory=list)
    stats: list[StatsSeries] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    bundles: list[tuple[str, BundleFacts]] = field(default_factory=list)
    quiet: list[OomLog] = field(default_factory=list)
    censuses: tuple[Census, ...] = ()
    source_lines: Mapping[str, Mapping[int, str]] = field(default_factory=dict)

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
        try:
            _read_input(name, parts)
        except NothingFound as e:
            if e.log is None:
                raise
            parts.quiet.append(e.log)  # a text that was asked about: no failure is an answer
            parts.sources.append(shown(name))
    for name in beside:
        # Notes that lie around are no reason to refuse the recording.
        with contextlib.suppress(InputError), open_input(name) as found:
            _read_one(found, parts)
    if len(parts.snapshots) > 1:
        raise _several([name for name, _ in parts.snapshots])
    if len(parts.bundles) > 1:
        raise _several([name for name, _ in parts.bundles], "bundles")
    facts = parts.bundles[0][1] if parts.bundles else None
    return Case(
        snapshot=parts.snapshots[0][1] if parts.snapshots else None,
        oom=joined_logs(parts.logs or parts.quiet),
        stats=joined_stats(parts.stats),
        overrides=overrides if facts is None else with_facts(overrides, facts),
        sources=tuple(parts.sources),
        bundle=facts,
        censuses=parts.censuses,
        source_lines=parts.source_lines,
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
        InputError: there is nothing to read, or it is something else.
    """
    from fragdoctor.inputs.messages import find_messages

    if not words or list(words) == [STDIN] or (len(words) == 1 and _exists(words[0])):
        with open_input(words[0] if words else STDIN) as found:
            name, kind = found.shown, found.kind
            is_read = kind.is_text or kind in _MAY_QUOTE
            data, damage = found.read_all() if is_read else (b"", "")
    else:
        name, data, damage = "command line", _spoken(words), ""
        kind = classify(data[:HEAD_BYTES])
    log = replace(find_messages(decoded(data)), damage=damage) if data else OomLog(())
    may_be_quiet = kind in _MAY_BE_QUIET or kind is InputKind.STATS
    if not log.messages and not may_be_quiet:
        raise something_else(name, kind, Wanted.MESSAGE)
    return Case(oom=log, overrides=overrides, sources=(name,))


_MAY_BE_QUIET: Final = (InputKind.TEXT, InputKind.JSON)
"""Kinds of text for which "no failure in it" is an answer."""

_MAY_QUOTE: Final = (InputKind.STATS, InputKind.SNAPSHOT_JSON, InputKind.PAGE)
"""What is no text, and may hold that of an exception all the same."""


def read_snapshot(name: str) -> Snapshot:
    """Return the snapshot in a file, in a folder, in a bundle, or on standard input.

    Raises:
        InputError: the input is missing, unreadable, or no snapshot.
    """
    parts = _Parts()
    try:
        kind = _read_input(name, parts)
    except NothingFound as e:
        raise something_else(shown(name), e.kind, Wanted.SNAPSHOT) from e
    damaged = [u for _, facts in parts.bundles for u in facts.unusable if u.startswith(SNAPSHOT)]
    if damaged and not parts.snapshots:
        raise InputError(
            f"In {name} {damaged[0]}.", hint=f"Without it, run: fragdoctor analyze {name}"
        )
    if not parts.snapshots and kind in (InputKind.BUNDLE, InputKind.FOLDER):
        raise NotASnapshot(
            f"{shown(name)} holds no memory snapshot.",
            hint=f"Only a trace can be replayed. Run: fragdoctor analyze {name}",
        )
    if not parts.snapshots:
        raise something_else(shown(name), kind, Wanted.SNAPSHOT)
    return parts.snapshots[0][1]


def decoded(data: bytes) -> str:
    """Return text of any usual encoding; what cannot be decoded becomes U+FFFD."""
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):  # PowerShell's > writes UTF-16
        return data.decode("utf-16", errors="replace")
    return data.decode("utf-8-sig", errors="replace")


def _read_input(name: str, parts: _Parts) -> InputKind:
    """Read what a name leads to into ``parts``, and return what it is."""
    with open_input(name) as found:
        if found.kind is InputKind.BUNDLE:
            with open_bundle(name) as bundle:
                _read_bundle(name, bundle, parts)
        elif found.kind is InputKind.FOLDER:
            _read_directory(name, parts)
        else:
            _read_one(found, parts)
        return found.kind


def _read_bundle(name: str, bundle: BundleFiles, parts: _Parts) -> None:
    """Read what a bundle holds; a damaged part is left out if another part is usable.

    What no genuine file holds is refused, whatever lies beside it.
    """
    if not bundle.names:
        raise InputError(
            f"{shown(name)} holds a manifest and nothing else.",
            hint=" ".join(bundle.facts.problems[:1]),
        )
    unusable: list[tuple[str, InputError]] = []
    n_before = parts.n_read
    for file in (*bundle.names, *bundle.added):
        try:
            if file in bundle.names:
                _read_member(name, file, bundle, parts)
            else:
                _read_added(file, bundle, parts)
        except (RefusedSnapshot, LimitExceeded) as e:
            message = e.message.removeprefix(_IT).lstrip()
            raise type(e)(f"{file} in {shown(name)} {message}", hint=e.hint, offset=e.offset) from e
        except InputError as e:  # what lies beside it is worth as much without it
            unusable.append((file, e))
    problems = [f"{file} cannot be used: {_reason(e)}" for file, e in unusable]
    if unusable and parts.n_read == n_before:
        raise InputError(
            f"{shown(name)} holds nothing to judge: {problems[0]}.", hint=unusable[0][1].hint
        )
    parts.bundles.append((name, replace(bundle.facts, unusable=tuple(problems))))
    parts.sources.append(shown(name))


def _reason(error: InputError) -> str:
    at = "" if error.offset is None else f" (byte {error.offset})"
    return error.message.rstrip(".") + at


def _read_member(name: str, file: str, bundle: BundleFiles, parts: _Parts) -> None:
    """Read one file of a bundle, each by the kind of its content."""
    from fragdoctor.inputs.snapshot_reader import read_snapshot as load

    with bundle.open(file) as raw, open_source(raw, name=_IT) as stream:
        if file == SNAPSHOT:
            parts.snapshots.append((name, load(cast("BinaryIO", stream))))
            return
        data, damage = read_text(stream, file)
        if data:
            _read_text(_IT, classify(data[:HEAD_BYTES]), data, parts, damage)


def _read_added(file: str, bundle: BundleFiles, parts: _Parts) -> None:
    """Read what says more of the snapshot: the names that hold memory, or lines of source."""
    from fragdoctor.inputs.census_reader import read_censuses, read_source_lines

    with bundle.open(file) as raw, open_source(raw, name=_IT) as stream:
        if file == CENSUS:
            parts.censuses = read_censuses(cast("BinaryIO", stream))
        else:
            parts.source_lines = read_source_lines(cast("BinaryIO", stream))


_IT: Final = "it"
"""What a file of a bundle is called by its reader: who reads the bundle says which it is."""


def _read_directory(name: str, parts: _Parts) -> None:
    """Read the folder of one recording: a snapshot and what lies beside it."""
    files = sorted(p for p in Path(name).iterdir() if p.is_file() and not p.name.startswith("."))
    if len(files) > _MAX_DIRECTORY:
        raise ConfigError(
            f"{name} holds {len(files)} files.", hint="Give the files of one process by name."
        )
    kinds = {p: kind_of(str(p)) or InputKind.EMPTY for p in files}
    snapshots = [p for p in files if kinds[p].may_be_snapshot]
    if len(snapshots) > 1:
        raise _several([str(p) for p in snapshots])
    stats = [p for p in files if kinds[p] is InputKind.STATS]
    texts = [p for p in files if kinds[p].is_text and p.name.lower().endswith(TEXT_SUFFIXES)]
    n_before = len(parts.sources)
    for path in (*snapshots, *stats):
        _read_input(str(path), parts)
    for path in texts:
        # Notes that lie around are no reason to refuse the recording.
        with contextlib.suppress(NothingFound):
            _read_input(str(path), parts)
    if len(parts.sources) == n_before:
        raise InputError(
            f"{name} holds no snapshot, statistics, message or log.",
            hint="Give a file, or a directory that holds snapshot.pickle.",
        )


class NothingFound(InputError):  # noqa: N818 - reads as what it says
    """A text holds nothing that fragdoctor knows.

    Attributes:
        kind: what the text is.
        log: the text as a log without a failure; None where it is something else.
    """

    def __init__(self, name: str, kind: InputKind, log: OomLog) -> None:
        is_model = kind is InputKind.MODEL_CONFIG
        other = something_else(name, kind, Wanted.SNAPSHOT)
        super().__init__(
            other.message
            if is_model
            else f"{name} holds no out-of-memory message, no statistics and no snapshot.",
            hint=other.hint
            if is_model
            else "Give the text of the exception, or a file of _dump_snapshot().",
        )
        self.kind = kind
        self.log = log if kind in _MAY_BE_QUIET else None


def _several(names: Sequence[str], what: str = "snapshots") -> ConfigError:
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return ConfigError(
        f"These are {len(names)} {what}: {shown}. One run looks at one process.",
        hint=f"Run: fragdoctor analyze {names[0]}",
    )


def _read_one(found: Input, parts: _Parts) -> None:
    """Read one file or standard input into ``parts``."""
    if found.kind.may_be_snapshot:
        parts.snapshots.append((found.name, _load(found)))
    elif found.kind.is_text or found.kind is InputKind.STATS:
        data, damage = found.read_all()
        _read_text(found.shown, found.kind, data, parts, damage)
    else:
        raise found.is_not(Wanted.SNAPSHOT)
    parts.sources.append(found.shown)


def _load(found: Input) -> Snapshot:
    from fragdoctor.inputs.snapshot_reader import read_snapshot as load

    # A file is opened anew, so that what the reader reports is about the file itself; a pipe
    # cannot be, nor should a URL, and what was looked at is still ahead in the stream.
    is_file = found.name != STDIN and not is_remote(found.name) and os.path.isfile(found.name)  # noqa: PTH113 - never raises, unlike Path
    return load(found.name if is_file else cast("BinaryIO", found.stream))


def _read_text(name: str, kind: InputKind, data: bytes, parts: _Parts, damage: str) -> None:
    from fragdoctor.inputs.messages import find_messages
    from fragdoctor.inputs.stats_reader import looks_like_summary, read_stats

    text = decoded(data)
    has_stats = kind is InputKind.STATS or looks_like_summary(text)
    if has_stats:
        parts.stats.append(read_stats(text))
    if kind is InputKind.STATS:
        return
    log = replace(find_messages(text), damage=damage)
    if has_stats and all(m.kind == "negative" for m in log.messages):
        return  # statistics hold words of failures without one having happened
    if log.messages or log.markers:
        parts.logs.append(log)
    else:
        raise NothingFound(name, kind, log)


def _spoken(words: Sequence[str]) -> bytes:
    """Return the words of the command line as text; a lone word that looks like a path is one."""
    text = " ".join(words)
    if len(words) == 1 and len(text.split()) == 1 and ("/" in text or "." in text):
        raise InputError(f"{text} does not exist.", hint="Check the path, or paste the message.")
    return text.encode("utf-8", errors="surrogatepass")


def _exists(word: str) -> bool:
    """Return whether a word names something that exists; a long message never does."""
    if is_remote(word) and len(word.split()) == 1:
        return True
    return os.path.lexists(word)


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
        server=next((log.server for log in logs if log.server), ()),
        utilization=next((log.utilization for log in logs if log.utilization), None),
        program=next((log.program for log in logs if log.program), ()),
        damage=" ".join(log.damage for log in logs if log.damage),
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
