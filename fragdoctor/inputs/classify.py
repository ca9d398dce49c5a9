"""Tell the kind of an input from its first bytes, and open a name from the command line.

Only the first few kilobytes are examined; the reader for that kind then reports what is wrong in
detail.

Pickles of protocols 0 and 1 have no header and are never read: PyTorch does not write them. But
such a pickle must not be mistaken for text, nor text for such a pickle, so its opcodes and their
effect on the stack are followed to the end of the first bytes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from io import BytesIO
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Struct

from fragdoctor.errors import (
    InputError,
    LimitExceeded,
    NotASnapshot,
    RefusedSnapshot,
    TruncatedSnapshot,
)
from fragdoctor.inputs.bundles import is_bundle
from fragdoctor.inputs.source import ByteStream, open_source, shown
from fragdoctor.inputs.stats_reader import looks_like_stats
from fragdoctor.lazy import regex
from fragdoctor.limits import DEFAULT_LIMITS
from fragdoctor.units import format_size

if TYPE_CHECKING:
    from pickletools import OpcodeInfo


class Wanted(StrEnum):
    """What a command takes, in the words that ``something_else`` uses."""

    SNAPSHOT = "a memory snapshot"
    MESSAGE = "a message or a log"
    MODEL = "a model"
    PROGRAM = "a Python program"


class InputKind(StrEnum):
    """The kind of an input. The values fit sentences: "FILE is a zip archive, not a model."."""

    PICKLE = "a pickle"
    OLD_PICKLE = "a pickle of protocol 0 or 1"
    SNAPSHOT_JSON = "a memory snapshot as JSON"
    PAGE = "an HTML page"
    STATS = "memory statistics"
    SAFETENSORS = "a safetensors file"
    MODEL_CONFIG = "the configuration of a model"
    JSON = "JSON"
    PROGRAM = "a program"
    SHELL = "a shell script"
    REPORT = "a report of fragdoctor"
    TEXT = "text"
    ARCHIVE = "a zip archive"
    SAVED = "a file of torch.save()"
    OLD_SAVED = "a file of torch.save() before PyTorch 1.6"
    NUMPY = "a NumPy archive (.npz)"
    ZLIB = "compressed with zlib, as joblib.dump() does"
    BINARY = "binary data"
    EMPTY = "empty"
    BUNDLE = "a bundle of fragdoctor run"
    FOLDER = "a directory"

    @property
    def may_be_snapshot(self) -> bool:
        """Whether the snapshot reader gets the input: it reads the input or explains why not."""
        return self in (
            InputKind.PICKLE,
            InputKind.OLD_PICKLE,
            InputKind.SNAPSHOT_JSON,
            InputKind.PAGE,
            InputKind.SAVED,
        )

    @property
    def is_text(self) -> bool:
        """Whether the input may hold a message or be a log; a log may begin with anything."""
        return self in (InputKind.TEXT, InputKind.JSON, InputKind.MODEL_CONFIG, InputKind.SHELL)


_PACKED: Final = ("", ".gz", ".zst")
SNAPSHOT_SUFFIXES: Final = tuple(s + p for s in (".pickle", ".pkl") for p in _PACKED)
TEXT_SUFFIXES: Final = tuple(
    s + p for s in (".txt", ".log", ".out", ".err", ".stderr", ".stdout") for p in _PACKED
)
STATS_SUFFIXES: Final = tuple(s + p for s in (".json", ".jsonl") for p in _PACKED)
KNOWN_SUFFIXES: Final = (*SNAPSHOT_SUFFIXES, *TEXT_SUFFIXES, *STATS_SUFFIXES, ".html", ".zip")
"""Lowercase suffixes of the files to look at when a folder is searched."""

_ZIP: Final = b"PK\x03\x04"
_EMPTY_ZIP: Final = b"PK\x05\x06"
_FIRST_NAME: Final = 30
"""Offset of the first member's name in a zip file."""

# The first member that PyTorchFileWriter writes (data.pkl, or its format version since 2.6), and
# NumPy's arrays.
_SAVED_NAME: Final = regex(
    rb"[^/\x00]{1,250}/(?:data\.pkl|\.format_version|\.storage_alignment|byteorder|version|data/\d)"
)
_ARRAY_NAME: Final = regex(rb"[^\x00]{1,250}?\.npy")
_ZLIB: Final = tuple(b"\x78" + level for level in (b"\x01", b"\x5e", b"\x9c", b"\xda"))
_OLD_SAVED: Final = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""MAGIC_NUMBER of torch/serialization.py, which stands in front as a separate pickle."""

_BOMS: Final = (b"\xff\xfe", b"\xfe\xff")
_UTF8_BOM: Final = b"\xef\xbb\xbf"
_SPACE: Final = b" \t\r\n\x0b\x0c"
_PAGE: Final = regex(rb"<(?:!doctype|!--|html|head|body|script|meta|title)", re.IGNORECASE)
# Keys with the type of value that a snapshot has: many other files hold "segments": 39.
_SNAPSHOT_KEYS: Final = regex(
    rb'"(?:segments|device_traces|external_annotations|blocks)"\s*:\s*\['
    rb'|"allocator_settings"\s*:\s*\{|"segment_type"\s*:\s*"'
)
_REPORT: Final = regex(rb'\{\s{0,9}"schema_version": "\d')
_PRODUCER: Final = regex(
    rb'"(?:producer|exporter|driver)"\s{0,9}:\s{0,9}(?:\{\s{0,30}"name"\s{0,9}:\s{0,9})?"fragdoctor"'
)
"""Who wrote a trace, a speedscope file or SARIF."""
_JUNIT: Final = regex(rb'<\?xml [^>\n]{0,99}>\s{0,9}<testsuites name="fragdoctor"')
_REPORT_PAGE: Final = b'<meta name="generator" content="fragdoctor">'
_REPORT_TEXT: Final = regex(
    rb"(?:#{1,3} )?(?:(?:Out of memory|Failed at)[^\r]{3,500}?\n)?"
    rb"(?:\*\*)?[A-Z][a-zA-Z ,]{4,60}"
    rb"(?: on GPU \d{1,9})?(?: \((?:proven|likely|possible)\)(?:\*\*)?[ .]"
    rb"|(?:\*\*)?\.(?:\*\*)? (?:Try|Record the run):)"
    rb"|(?:#{1,3} )?(?:\*\*)?No memory failure found\."
)
"""Text and Markdown have no mark: what failed, then the verdict and how sure it is."""
_SHELL: Final = regex(rb"#![^\n]{0,99}sh\b")
_MODEL_KEYS: Final = regex(
    rb'"(?:model_type|architectures|hidden_size|num_hidden_layers|n_layer|weight_map|_class_name)"'
    rb"\s*:"
)
MAX_HEADER_BYTES: Final = 100_000_000
"""The longest header that the safetensors library reads."""


def classify(head: bytes) -> InputKind:  # noqa: PLR0911 - one return per kind
    """Return the kind of input that starts with these (uncompressed) bytes; 4 KiB is plenty.

    ``head`` is the first ``source.HEAD_BYTES`` bytes, or the whole input if it is shorter.
    """
    if not head or head.startswith(_EMPTY_ZIP):
        return InputKind.EMPTY
    if (packed := _by_magic(head)) is not None:
        return packed
    if head.startswith(_BOMS):
        return InputKind.TEXT
    if is_safetensors(head):
        return InputKind.SAFETENSORS
    start = head.removeprefix(_UTF8_BOM).lstrip(_SPACE)
    if not start:
        return InputKind.EMPTY
    if is_old_pickle(head):
        return InputKind.OLD_PICKLE
    if start[:1] in b"{[" and (kind := _kind_of_json(start)) is not InputKind.TEXT:
        return kind
    return _kind_of_text(start) if _is_text(head) else InputKind.BINARY


def _kind_of_text(start: bytes) -> InputKind:
    if _JUNIT.match(start) or _REPORT_TEXT.match(start):
        return InputKind.REPORT
    if _PAGE.match(start):
        return InputKind.REPORT if _REPORT_PAGE in start else InputKind.PAGE
    return InputKind.SHELL if _SHELL.match(start) else InputKind.TEXT


def _by_magic(head: bytes) -> InputKind | None:
    """Return the kind if magic bytes alone show it: pickles, archives, zlib."""
    if head.startswith(_OLD_SAVED):
        return InputKind.OLD_SAVED
    if head.startswith(b"\x80") and (len(head) == 1 or head[1] < 32):
        return InputKind.PICKLE
    if head.startswith(_ZIP):
        return _kind_of_archive(head)
    return InputKind.ZLIB if head.startswith(_ZLIB) and b"\x00" in head else None


def _kind_of_archive(head: bytes) -> InputKind:
    if _SAVED_NAME.match(head, _FIRST_NAME):
        return InputKind.SAVED
    n = int.from_bytes(head[26:28], "little")
    is_array = _ARRAY_NAME.fullmatch(head[_FIRST_NAME : _FIRST_NAME + n]) is not None
    return InputKind.NUMPY if is_array else InputKind.ARCHIVE


def is_safetensors(head: bytes) -> bool:
    """Return whether a file begins like a safetensors file: a header's length, then its brace."""
    return head[8:9] == b"{" and 2 <= int.from_bytes(head[:8], "little") <= MAX_HEADER_BYTES


def something_else(
    name: str, kind: InputKind, wanted: Wanted, *, offset: int | None = None
) -> InputError:
    """Return the error for an input that is not what the command wants.

    ``name`` is the input's display name (see ``source.shown``); ``offset`` is the byte at which
    the snapshot reader notices the mismatch.
    """
    if kind is InputKind.EMPTY:
        hint = _PASTE if name in _PASTED else _KILLED
        return NotASnapshot(f"{name} is empty.", hint=hint, offset=offset)
    error = RefusedSnapshot if kind is InputKind.OLD_PICKLE else NotASnapshot
    hint = _hint(name, kind, wanted)
    return error(f"{name} is {kind}, not {wanted}.", hint=hint, offset=offset)


def _hint(name: str, kind: InputKind, wanted: Wanted) -> str:
    hints = _ALWAYS | _HINTS[wanted]
    hint = hints.get(kind, hints[None]).format(name=name)
    is_piped = kind is InputKind.ARCHIVE and name in _PASTED
    return f"{hint} Give a bundle by its file name.".lstrip() if is_piped else hint


MODEL_INPUTS: Final = (
    "Give a Hugging Face config.json, the folder of a model with one, or --params."
)
_KILLED: Final = "A program that was killed while writing leaves such a file."
_PASTE: Final = "Pipe a program's output in, or paste the text of the exception."
_PASTED: Final = ("standard input", "command line")
_NEVER_RUN: Final = "PyTorch writes protocol 2 or later; nothing in it was executed."
_WRITE_ONE: Final = 'Write one with torch.cuda.memory._dump_snapshot("snapshot.pickle").'
_PICKLE_IT: Final = "In your program: pickle.dump(snapshot, open('snapshot.pickle', 'wb'))."
_ANALYZE: Final = "Run: fragdoctor analyze {name}"
_ESTIMATE: Final = "Run: fragdoctor estimate {name}"
_RUN: Final = "On a GPU: fragdoctor run {name}; without one: fragdoctor rehearse {name}"
_MADE_FROM: Final = "Give the files that it was made from: fragdoctor FILE -o report.md"
_OUTPUT: Final = "Give what it printed."
_OOM: Final = "For a message or a log, run: fragdoctor oom {name}"
_ALWAYS: Final[dict[InputKind | None, str]] = {
    InputKind.OLD_PICKLE: _NEVER_RUN,
    InputKind.PROGRAM: _RUN,
    InputKind.SHELL: _OUTPUT,
    InputKind.REPORT: _MADE_FROM,
    InputKind.SAFETENSORS: _ESTIMATE,
    InputKind.MODEL_CONFIG: _ESTIMATE,
}
"""What to do with an input, whatever the command wants."""
_HINTS: Final[dict[Wanted, dict[InputKind | None, str]]] = {
    Wanted.SNAPSHOT: {
        InputKind.ARCHIVE: "A snapshot is written by torch.cuda.memory._dump_snapshot(), a bundle "
        "by fragdoctor run.",
        InputKind.OLD_SAVED: "Save it again with PyTorch 1.6 or later, or with pickle.dump().",
        InputKind.NUMPY: _PICKLE_IT,
        InputKind.ZLIB: _PICKLE_IT,
        InputKind.TEXT: _OOM,
        InputKind.JSON: _ANALYZE,
        InputKind.STATS: _ANALYZE,
        None: _WRITE_ONE,
    },
    Wanted.MESSAGE: {
        InputKind.ARCHIVE: "",
        InputKind.BINARY: "",
        InputKind.JSON: _PASTE,
        None: _ANALYZE,
    },
    Wanted.MODEL: {InputKind.SAFETENSORS: MODEL_INPUTS, None: MODEL_INPUTS},
    Wanted.PROGRAM: {
        InputKind.SHELL: "Give the program that it starts: fragdoctor rehearse train.py -- ARGS",
        InputKind.REPORT: "Give the script of the training.",
        None: "Give the script of the training; for what a run left: fragdoctor analyze {name}",
    },
}
"""What to do instead, by what the command wants and what the input is."""


def kind_of_quiet(kind: InputKind, text: str) -> InputKind:
    """Return the kind of a text that tells of no failure: a document of JSON is no log."""
    if kind is not InputKind.JSON:
        return kind
    try:
        msgspec.json.decode(text.encode(errors="replace"), type=msgspec.Raw)
    except (msgspec.DecodeError, RecursionError) as e:
        if "truncated" not in str(e):
            return InputKind.TEXT  # a log may begin with JSON, or have it in each line
    return kind


def _kind_of_json(start: bytes) -> InputKind:
    snapshot = _SNAPSHOT_KEYS.search(start)
    if _REPORT.match(start) or _PRODUCER.search(start):
        return InputKind.REPORT
    # Statistics may quote anything in a label: the first mark in the text decides.
    if looks_like_stats(start[: snapshot.start()] if snapshot else start):
        return InputKind.STATS
    if snapshot or start.strip(_SPACE) in (b"[]", b"{}"):
        return InputKind.SNAPSHOT_JSON
    if not _looks_like_json(start):
        return InputKind.TEXT
    return (
        InputKind.MODEL_CONFIG
        if start[:1] == b"{" and _MODEL_KEYS.search(start)
        else InputKind.JSON
    )


def _looks_like_json(text: bytes) -> bool:
    """Return whether the text opens like JSON; a log's ``[rank0]: ...`` does not."""
    return (
        re.match(rb'\{\s*["}]|\{\s*\Z|\[\s*[\[{"\]0-9.-]|\[\s*\Z', text) is not None
        and re.match(rb"\[[0-9]+\]?[ :]|\[[0-9]{4}-|\[[0-9]{2}/", text) is None
    )


def _is_text(head: bytes) -> bool:
    """Return whether bytes are text, besides the NULs of lost pages and of UTF-16 without a mark.

    Escape sequences do not count: logs are colored.
    """
    text = head.replace(b"\x00", b"")
    if text != head and (b"\n" not in text or "\ufffd" in text.decode(errors="replace")[:-1]):
        return False
    n_bad = sum(text.count(bytes([c])) for c in range(32) if c not in b"\t\n\r\x0b\x0c\x1b\x08")
    return n_bad <= 0.1 * len(text)


_MAX_DEPTH: Final = 40
"""Most stack values while no mark is open: two for each container around the innermost one."""

_MIN_OPCODES: Final = 6
"""Opcodes needed to believe that the input is a pickle if it does not end within the head."""

_GLOBAL: Final = regex(r"[A-Za-z_][\w.]{0,200} [A-Za-z_][\w.]{0,200}")
_PUTS: Final = ("PUT", "BINPUT", "LONG_BINPUT")


def is_old_pickle(head: bytes) -> bool:
    """Return whether these bytes are a pickle of protocol 0 or 1, or the beginning of one.

    The opcodes and their effect on the stack are followed as ``pickletools`` describes them;
    nothing is executed.
    """
    if not (head.endswith(b".") or b"p0\n" in head or b"q\x00" in head):
        return False  # neither an end nor a memo entry
    import pickletools

    file = BytesIO(head)
    n_opcodes = n_puts = 0
    depths = [0]  # number of values on the stack before the first mark, then after each mark
    try:
        for opcode, value, _place in pickletools.genops(file):
            if opcode.name == "STOP":
                is_long = n_opcodes >= _MIN_OPCODES
                return depths == [1] and (file.tell() == len(head) or is_long)
            is_put, is_name = opcode.name in _PUTS, opcode.name in ("GLOBAL", "INST")
            if (
                opcode.proto > 1
                or (is_put and int(value or 0) > n_puts)  # the pickle module numbers these in order
                or (is_name and not _GLOBAL.fullmatch(str(value)))
                or not _moved(depths, opcode)
            ):
                return False
            n_puts += is_put
            n_opcodes += 1
    except ValueError:  # not an opcode, or an argument that continues past these bytes
        if file.tell() < len(head):
            return False
    return n_opcodes >= _MIN_OPCODES and n_puts > 0


def _moved(depths: list[int], opcode: OpcodeInfo) -> bool:
    """Apply the opcode's effect to the stack depths; return False if the stack is too shallow."""
    before = [thing.name for thing in opcode.stack_before]
    after = [thing.name for thing in opcode.stack_after]
    if "mark" in before:  # the opcode pops the mark and everything above it
        if len(depths) == 1:
            return False
        depths.pop()
        before = before[: before.index("mark")]
    if after == ["mark"]:
        depths.append(0)
    else:
        depths[-1] += len(after) - len(before)
    return depths[-1] >= 0 and (len(depths) > 1 or depths[0] <= _MAX_DEPTH)


STDIN: Final = "-"


class Input(Struct, frozen=True):
    """An input that was opened by name and classified; see ``open_input``.

    Attributes:
        name: the name as given: a path, a URL, or ``-``; hostile text.
        kind: the kind by the first bytes; ``BUNDLE`` and ``FOLDER`` by the files inside.
    """

    name: str
    kind: InputKind
    _stream: ByteStream | None = None

    @property
    def shown(self) -> str:
        """The input's display name: hostile text, without passwords."""
        return shown(self.name)

    @property
    def stream(self) -> ByteStream:
        """The uncompressed bytes from the first one on; a bundle and a folder have none."""
        if self._stream is None:
            raise self.is_not(Wanted.SNAPSHOT)
        return self._stream

    def read_all(self) -> tuple[bytes, str]:
        """Return the whole text and a sentence on damage at its end (see ``read_text``).

        Raises:
            LimitExceeded: the text is longer than the limit.
        """
        return read_text(self.stream, self.shown)

    def is_not(self, wanted: Wanted) -> InputError:
        """Return the error for an input that is not what the command wants."""
        return something_else(self.shown, self.kind, wanted)


@contextmanager
def open_input(name: str) -> Iterator[Input]:
    """Open an input by name and classify it; the bytes examined can still be read from it.

    Raises:
        InputError: nothing has that name, or the input cannot be read.
    """
    if name != STDIN and is_bundle(name):
        yield Input(name, InputKind.BUNDLE)
    elif name != STDIN and os.path.isdir(name):  # noqa: PTH112 - never raises, unlike Path
        yield Input(name, InputKind.FOLDER)
    else:
        with open_source(name) as stream:
            kind = classify(stream.head)
            is_program = kind is InputKind.TEXT and name.endswith(".py")
            yield Input(name, InputKind.PROGRAM if is_program else kind, stream)


def kind_of(path: str) -> InputKind | None:
    """Return the kind of the input at a path, or None if it cannot be opened."""
    try:
        with open_input(path) as found:
            return found.kind
    except (InputError, OSError):
        return None


def read_text(stream: ByteStream, name: str) -> tuple[bytes, str]:
    """Return all the text of a stream, and a sentence on damage ("" if there is none).

    Compressed text that is cut off or damaged is read up to that point.

    Raises:
        LimitExceeded: the text is longer than the limit.
    """
    limit = DEFAULT_LIMITS.max_text_bytes
    data = bytearray()
    while True:
        try:
            chunk = stream.read(1 << 16)
        except (TruncatedSnapshot, RefusedSnapshot) as e:
            if not data:
                raise
            return bytes(data), f"{name} was read as far as possible: {e.message}"
        if not chunk:
            return bytes(data), ""
        data += chunk
        if len(data) > limit:
            raise LimitExceeded(
                f"{name} is longer than {format_size(limit)}.",
                hint="Give only the part around the failure.",
            )
