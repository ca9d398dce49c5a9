"""What an input is, from its first bytes, and the sentences for an input that is something else.

Only the first kilobytes are looked at; the reader of the kind then says what is wrong in detail.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Final

from fragdoctor.errors import InputError, NotASnapshot, RefusedSnapshot
from fragdoctor.inputs.old_pickle import is_old_pickle
from fragdoctor.inputs.stats_reader import looks_like_stats


class Wanted(StrEnum):
    """What a command takes, as ``something_else`` writes it."""

    SNAPSHOT = "a memory snapshot"
    MESSAGE = "a message or a log"
    MODEL = "a model"


class Kind(StrEnum):
    """What an input is. The values stand in sentences: "FILE is a zip archive, not a model."."""

    PICKLE = "a pickle"
    OLD_PICKLE = "a pickle of protocol 0 or 1"
    SNAPSHOT_JSON = "a memory snapshot as JSON"
    PAGE = "an HTML page"
    STATS = "memory statistics"
    SAFETENSORS = "a safetensors file"
    MODEL_CONFIG = "the configuration of a model"
    JSON = "JSON"
    TEXT = "text"
    ARCHIVE = "a zip archive"
    BINARY = "binary data"
    EMPTY = "empty"
    BUNDLE = "a bundle of fragdoctor run"
    FOLDER = "a directory"

    @property
    def may_be_snapshot(self) -> bool:
        """Whether the reader of snapshots decides: it accepts the input, or says why not."""
        return self in (Kind.PICKLE, Kind.OLD_PICKLE, Kind.SNAPSHOT_JSON, Kind.PAGE)

    @property
    def is_text(self) -> bool:
        """Whether it may hold a message or be a log; a log may begin with any JSON."""
        return self in (Kind.TEXT, Kind.JSON, Kind.MODEL_CONFIG)


_PACKED: Final = ("", ".gz", ".zst")
SNAPSHOT_SUFFIXES: Final = tuple(s + p for s in (".pickle", ".pkl") for p in _PACKED)
TEXT_SUFFIXES: Final = tuple(
    s + p for s in (".txt", ".log", ".out", ".err", ".stderr", ".stdout") for p in _PACKED
)
STATS_SUFFIXES: Final = tuple(s + p for s in (".json", ".jsonl") for p in _PACKED)
KNOWN_SUFFIXES: Final = (*SNAPSHOT_SUFFIXES, *TEXT_SUFFIXES, *STATS_SUFFIXES, ".html", ".zip")
"""Ends of names, in lower case: of files that are looked at where a folder is searched."""

_ZIP: Final = b"PK\x03\x04"
_BOMS: Final = (b"\xff\xfe", b"\xfe\xff")
_UTF8_BOM: Final = b"\xef\xbb\xbf"
_SPACE: Final = b" \t\r\n\x0b\x0c"
_PAGE: Final = re.compile(rb"<(?:!doctype|!--|html|head|body|script|meta|title)", re.IGNORECASE)
# Keys with the values they have in a snapshot: "segments": 39 stands in many other files.
_SNAPSHOT_KEYS: Final = re.compile(
    rb'"(?:segments|device_traces|external_annotations|blocks)"\s*:\s*\['
    rb'|"allocator_settings"\s*:\s*\{|"segment_type"\s*:\s*"'
)
_MODEL_KEYS: Final = re.compile(
    rb'"(?:model_type|architectures|hidden_size|num_hidden_layers|n_layer|weight_map|_class_name)"'
    rb"\s*:"
)
MAX_HEADER_BYTES: Final = 100_000_000
"""The longest header that the safetensors library reads."""


def classify(head: bytes) -> Kind:  # noqa: PLR0911 - one return a kind
    """Return what starts with these (unpacked) bytes; 4 KiB are plenty.

    Args:
        head: the first ``source.HEAD_BYTES`` bytes, or the whole input where it is shorter.
    """
    if not head:
        return Kind.EMPTY
    if head.startswith(b"\x80") and (len(head) == 1 or head[1] < 32):
        return Kind.PICKLE
    if head.startswith(_ZIP):
        return Kind.ARCHIVE
    if head.startswith(_BOMS):
        return Kind.TEXT
    if is_safetensors(head):
        return Kind.SAFETENSORS
    start = head.removeprefix(_UTF8_BOM).lstrip(_SPACE)
    if not start:
        return Kind.EMPTY
    if is_old_pickle(head):
        return Kind.OLD_PICKLE
    if start[:1] in b"{[" and (kind := _kind_of_json(start)) is not Kind.TEXT:
        return kind
    if b"\x00" in head or _control_share(head) > 0.1:
        return Kind.BINARY
    return Kind.PAGE if _PAGE.match(start) else Kind.TEXT


def is_safetensors(head: bytes) -> bool:
    """Return whether a file begins as safetensors do: the length of a header, and its brace."""
    return head[8:9] == b"{" and 2 <= int.from_bytes(head[:8], "little") <= MAX_HEADER_BYTES


def something_else(
    name: str, kind: Kind, wanted: Wanted, *, offset: int | None = None
) -> InputError:
    """Return the error for an input that is not what was wanted.

    Args:
        name: what the input is called for people; see ``source.shown``.
        kind: what it is.
        wanted: what the command takes.
        offset: where that is seen, as the reader of snapshots says it.
    """
    if kind is Kind.EMPTY:
        hint = _PASTE if name in _PASTED else _KILLED
        return NotASnapshot(f"{name} is empty.", hint=hint, offset=offset)
    error = RefusedSnapshot if kind is Kind.OLD_PICKLE else NotASnapshot
    hint = _hint(name, kind, wanted)
    return error(f"{name} is {kind}, not {wanted}.", hint=hint, offset=offset)


def _hint(name: str, kind: Kind, wanted: Wanted) -> str:
    hints = _HINTS[wanted]
    hint = hints.get(kind, hints[None]).format(name=name)
    is_piped = kind is Kind.ARCHIVE and name in _PASTED
    return f"{hint} Give a bundle by the name of its file.".lstrip() if is_piped else hint


MODEL_INPUTS: Final = (
    "Give a Hugging Face config.json, a model directory, safetensors files, or --params."
)
_KILLED: Final = "A program that was killed while writing leaves such a file."
_PASTE: Final = "Pipe a program's output in, or paste the text of the exception."
_PASTED: Final = ("standard input", "command line")
_NEVER_RUN: Final = "PyTorch writes protocol 2 or later; nothing in it was executed."
_WRITE_ONE: Final = 'Write one with torch.cuda.memory._dump_snapshot("snapshot.pickle").'
_ANALYZE: Final = "Run: fragdoctor analyze {name}"
_ESTIMATE: Final = "Run: fragdoctor estimate {name}"
_OOM: Final = "For a message or a log, run: fragdoctor oom {name}"
_HINTS: Final[dict[Wanted, dict[Kind | None, str]]] = {
    Wanted.SNAPSHOT: {
        Kind.OLD_PICKLE: _NEVER_RUN,
        Kind.ARCHIVE: "torch.save() writes such files. A snapshot is written by "
        "torch.cuda.memory._dump_snapshot(), a bundle by fragdoctor run.",
        Kind.TEXT: _OOM,
        Kind.JSON: _OOM,
        Kind.STATS: _ANALYZE,
        Kind.SAFETENSORS: _ESTIMATE,
        Kind.MODEL_CONFIG: _ESTIMATE,
        None: _WRITE_ONE,
    },
    Wanted.MESSAGE: {
        Kind.OLD_PICKLE: _NEVER_RUN,
        Kind.ARCHIVE: "",
        Kind.BINARY: "",
        Kind.SAFETENSORS: _ESTIMATE,
        Kind.MODEL_CONFIG: _ESTIMATE,
        None: _ANALYZE,
    },
    Wanted.MODEL: {Kind.OLD_PICKLE: _NEVER_RUN, None: MODEL_INPUTS},
}
"""What to do instead, by what was wanted and what the input is."""


def _kind_of_json(start: bytes) -> Kind:
    snapshot = _SNAPSHOT_KEYS.search(start)
    # Statistics may quote anything in a label: what comes first decides.
    if looks_like_stats(start[: snapshot.start()] if snapshot else start):
        return Kind.STATS
    if snapshot or start.strip(_SPACE) in (b"[]", b"{}"):
        return Kind.SNAPSHOT_JSON
    if not _looks_like_json(start):
        return Kind.TEXT
    return Kind.MODEL_CONFIG if start[:1] == b"{" and _MODEL_KEYS.search(start) else Kind.JSON


def _looks_like_json(text: bytes) -> bool:
    """Return whether it opens as JSON does; ``[rank0]: ...`` of a log does not."""
    return (
        re.match(rb'\{\s*["}]|\{\s*\Z|\[\s*[\[{"\]0-9.-]|\[\s*\Z', text) is not None
        and re.match(rb"\[[0-9]+\]?[ :]|\[[0-9]{4}-|\[[0-9]{2}/", text) is None
    )


def _control_share(head: bytes) -> float:
    # Escape sequences are welcome: logs are coloured.
    n_bad = sum(head.count(bytes([c])) for c in range(32) if c not in b"\t\n\r\x0b\x0c\x1b\x08")
    return n_bad / len(head)
