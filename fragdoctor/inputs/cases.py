"""Combine files, directories, bundles and standard input into one case, each by its reader."""

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
    SOURCES,
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
    kind_of_quiet,
    open_input,
    read_text,
    something_else,
)
from fragdoctor.inputs.notebooks import printed_by_cells
from fragdoctor.inputs.remote import is_remote
from fragdoctor.inputs.source import HEAD_BYTES, open_source, shown
from fragdoctor.model.case import BundleFacts, Case, OomLog, OomMessage, Overrides, StatsSeries
from fragdoctor.model.census import Census
from fragdoctor.model.snapshot import Snapshot
from fragdoctor.model.story import Scene

_MAX_DIRECTORY: Final = 1000


class _Parts(Struct):
    """The parts of the case that have been read so far."""

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
        """Number of usable inputs so far."""
        return len(self.snapshots) + len(self.logs) + len(self.stats)


def read_case(names: Sequence[str], overrides: Overrides, *, beside: Sequence[str] = ()) -> Case:
    """Return one case made from all inputs.

    Texts and statistics in ``beside`` are read as well, and left out if they hold nothing useful.

    Raises:
        InputError: an input is missing, unreadable, or of a kind that fragdoctor does not know.
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
            parts.quiet.append(e.log)  # the user asked about this text: "no failure" is an answer
            parts.sources.append(shown(name))
    for name in beside:
        # Stray notes are no reason to refuse the recording.
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
    """Return the case in a bundle; the user's overrides win over the bundle's own facts.

    Raises:
        InputError: the path is not a bundle, or the bundle is damaged or refused; the subclass
            says which.
    """
    if not is_bundle(path):
        raise NotASnapshot(
            f"{fspath(path)} is not a bundle.", hint="To write a bundle: fragdoctor run"
        )
    return read_case([fspath(path)], overrides or Overrides())


def read_messages(words: Sequence[str], overrides: Overrides) -> Case:
    """Return a case of messages, from the words themselves, a file, or standard input.

    Raises:
        InputError: there is nothing to read, or the input is neither a message nor a log.
    """
    if not words or list(words) == [STDIN] or (len(words) == 1 and _exists(words[0])):
        with open_input(words[0] if words else STDIN) as found:
            name, kind = found.shown, found.kind
            is_read = kind.is_text or kind in _MAY_QUOTE
            data, damage = found.read_all() if is_read else (b"", "")
    else:
        name, data, damage = "command line", _spoken(words), ""
        kind = classify(data[:HEAD_BYTES])
    if not data:
        raise something_else(name, kind, Wanted.MESSAGE)
    parts = _Parts()
    try:
        _read_text(name, kind, data, parts, damage)
    except NothingFound as e:
        if e.log is None:
            raise something_else(name, e.kind, Wanted.MESSAGE) from e
        parts.quiet.append(e.log)
    return Case(
        oom=joined_logs(parts.logs or parts.quiet),
        stats=joined_stats(parts.stats),
        overrides=overrides,
        sources=(name,),
    )


_MAY_QUOTE: Final = (InputKind.STATS, InputKind.SNAPSHOT_JSON, InputKind.PAGE)
"""Kinds of input that are not text but may still quote the text of an exception."""


def read_snapshot(name: str) -> Snapshot:
    """Return the snapshot in a file, in a folder, in a bundle, or on standard input.

    Raises:
        InputError: the input is missing, unreadable, or not a snapshot.
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
    """Return text in any of the usual encodings; undecodable bytes become U+FFFD."""
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):  # PowerShell's > writes UTF-16
        return data.decode("utf-16", errors="replace")
    return data.replace(b"\0", b"").decode("utf-8-sig", errors="replace")


def _read_input(name: str, parts: _Parts) -> InputKind:
    """Read the input with this name into ``parts``, and return its kind."""
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
    """Read the files of a bundle; a damaged one is left out if another one is usable.

    A file with content that no genuine file has is refused, even if the other files are fine.
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
            _read_member(name, file, bundle, parts)
        except (RefusedSnapshot, LimitExceeded) as e:
            message = e.message.removeprefix(_IT).lstrip()
            raise type(e)(f"{file} in {shown(name)} {message}", hint=e.hint, offset=e.offset) from e
        except InputError as e:  # the bundle's other files are just as useful without this one
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
    """Read one file of a bundle with the reader for its kind of content."""
    from fragdoctor.inputs.census_reader import read_censuses, read_source_lines
    from fragdoctor.inputs.snapshot_reader import read_snapshot as load

    with bundle.open(file) as raw, open_source(raw, name=_IT) as stream:
        binary = cast("BinaryIO", stream)
        if file == SNAPSHOT:
            told = {d.index: d.limit_bytes for d in bundle.facts.devices}
            limits = {index: limit for index, limit in told.items() if limit is not None}
            parts.snapshots.append((name, replace(load(binary), limits=limits)))
        elif file == CENSUS:
            parts.censuses = read_censuses(binary)
        elif file == SOURCES:
            parts.source_lines = read_source_lines(binary)
        else:
            data, damage = read_text(stream, file)
            if data:
                _read_text(_IT, classify(data[:HEAD_BYTES]), data, parts, damage)


_IT: Final = "it"
"""What a reader's errors call a file of a bundle; the bundle's reader adds the file's name."""


def _read_directory(name: str, parts: _Parts) -> None:
    """Read the folder of one recording: a snapshot and the files beside it."""
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
        # Stray notes are no reason to refuse the recording.
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
        kind: the kind of the text.
        log: the text as a log without a failure, or None if the text is not a log.
    """

    def __init__(self, name: str, kind: InputKind, log: OomLog) -> None:
        other = something_else(name, kind, Wanted.SNAPSHOT)
        is_known = kind not in (InputKind.TEXT, InputKind.JSON)
        super().__init__(
            other.message
            if is_known
            else f"{name} holds no out-of-memory message, no statistics and no snapshot.",
            hint=other.hint
            if is_known
            else "Give the text of the exception, or a file of _dump_snapshot().",
        )
        self.kind = kind
        self.log = log if kind is InputKind.TEXT else None


def _several(names: Sequence[str], what: str = "snapshots") -> ConfigError:
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return ConfigError(
        f"These are {len(names)} {what}: {shown}. One run looks at one process.",
        hint=f"Run: fragdoctor analyze {names[0]}",
    )


def _read_one(found: Input, parts: _Parts) -> None:
    """Read one file or standard input into ``parts``."""
    if found.kind.may_be_snapshot:
        try:
            parts.snapshots.append((found.name, _load(found)))
        except NotASnapshot as e:
            if found.kind is not InputKind.PAGE:
                raise
            data, damage = found.read_all()  # a saved page may quote the text of an exception
            try:
                _read_text(found.shown, found.kind, data, parts, damage)
            except NothingFound:
                raise e from None
    elif found.kind.is_text or found.kind is InputKind.STATS:
        data, damage = found.read_all()
        _read_text(found.shown, found.kind, data, parts, damage)
    else:
        raise found.is_not(Wanted.SNAPSHOT)
    parts.sources.append(found.shown)


def _load(found: Input) -> Snapshot:
    from fragdoctor.inputs.snapshot_reader import read_snapshot as load

    # A file is opened again, so that the reader's errors are about the file itself. A pipe cannot
    # be reopened and a URL should not be; their stream still has the bytes that were peeked at.
    is_file = found.name != STDIN and not is_remote(found.name) and os.path.isfile(found.name)  # noqa: PTH113 - never raises, unlike Path
    return load(found.name if is_file else cast("BinaryIO", found.stream))


def _read_text(name: str, kind: InputKind, data: bytes, parts: _Parts, damage: str) -> None:
    from fragdoctor.inputs.messages import find_messages
    from fragdoctor.inputs.stats_reader import has_printed_stats, read_stats

    text = printed_by_cells(decoded(data))
    has_stats = kind is InputKind.STATS or has_printed_stats(text)
    if has_stats:
        parts.stats.append(read_stats(text))
    if kind is InputKind.STATS and "emory" not in text and "EMORY" not in text:
        return  # no message is quoted, and a long series takes long to search
    log = replace(find_messages(text), damage=damage)
    is_of_failure = any(m.kind != "negative" for m in log.messages)
    if has_stats and not is_of_failure:
        return  # statistics contain words for failures even if no failure happened
    if is_of_failure or (kind.is_text and (log.messages or log.markers)):
        parts.logs.append(log)
    else:
        raise NothingFound(name, kind_of_quiet(kind, text), log)


def _spoken(words: Sequence[str]) -> bytes:
    """Return the command line's words as text; a single word that looks like a path is an error."""
    text = " ".join(words)
    if len(words) == 1 and len(text.split()) == 1 and ("/" in text or "." in text):
        raise InputError(f"{text} does not exist.", hint="Check the path, or paste the message.")
    return text.encode("utf-8", errors="surrogatepass")


def _exists(word: str) -> bool:
    """Return whether a word is the name of something that exists; a long message never is."""
    if is_remote(word) and len(word.split()) == 1:
        return True
    return os.path.lexists(word)


def joined_logs(logs: Sequence[OomLog]) -> OomLog | None:
    """Return the messages of all texts as one log; the primary one is the first text's primary."""
    if len(logs) < 2:
        return logs[0] if logs else None
    messages: list[OomMessage] = []
    primary: int | None = None
    scenes: Sequence[Scene] = ()  # of one text only: lines of several texts have no common order
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
        scenes,
        server=next((log.server for log in logs if log.server), ()),
        program=next((log.program for log in logs if log.program), ()),
        damage=" ".join(log.damage for log in logs if log.damage),
    )


def _moved(scenes: Sequence[Scene], n_before: int) -> tuple[Scene, ...]:
    """Return scenes whose message indices are shifted by the messages now in front of them."""
    return tuple(
        s if s.message is None else replace(s, message=s.message + n_before) for s in scenes
    )


def joined_stats(series: Sequence[StatsSeries]) -> StatsSeries | None:
    """Return all statistics as one series; exact figures replace a rounded summary."""
    if len(series) < 2:
        return series[0] if series else None
    entries = [e for s in series for e in s.entries]
    exact = {e.device for e in entries if e.origin == "memory_stats"}
    kept = [
        e for e in entries if e.origin == "memory_stats" or not (e.device in exact or None in exact)
    ]
    repeats = len({e.device for e in kept}) < len(kept)
    return StatsSeries(tuple(kept), is_series=repeats or any(s.is_series for s in series))
