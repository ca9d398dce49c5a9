"""Hostile files: what each does, and how it must be turned away.

Each entry is (name, bytes, error); what takes long to make is made by a function. "Before" in a
comment says what the stock unpickler does with such a file even when ``find_class`` refuses every
global.
"""

from __future__ import annotations

import base64
import gzip
import json
import pickle
import pickletools
from collections.abc import Callable, Iterator
from typing import Any

import builders
from opcodes import ALLOWED, integer, listing, mapping, op, program, text, u32, u64

from fragdoctor.errors import (
    InputError,
    LimitExceeded,
    NotASnapshot,
    RefusedSnapshot,
    TruncatedSnapshot,
)

Entry = tuple[str, bytes | Callable[[], bytes], type[InputError]]
ARGUMENTS = {  # for opcodes that read something after them
    "GLOBAL": b"os\nsystem\n",
    "INST": b"os\nsystem\n",
    "EXT1": b"\x01",
    "EXT2": b"\x01\x00",
    "EXT4": b"\x01\x00\x00\x00",
}


def forbidden_opcodes() -> Iterator[Entry]:
    for opcode in pickletools.opcodes:
        if opcode.name not in ALLOWED:
            argument = ARGUMENTS.get(opcode.name, b"\x01\x00\x00\x00\x00\x00\x00\x00\n1\n")
            body = text("os") + text("system") + op(opcode.name, argument)
            yield f"opcode {opcode.name}", program(body), RefusedSnapshot
    for byte in (0x00, 0x7F, 0xFF):
        yield f"no opcode {byte:#04x}", program(bytes([byte])), RefusedSnapshot


def globals_and_protocols() -> Iterator[Entry]:
    yield "protocol 0 global", b"cos\nsystem\n(S'echo pwned'\ntR.", RefusedSnapshot
    yield "protocol 0 list", b"(lp0\nI1\na.", RefusedSnapshot
    yield "protocol 1 dict", b"}q\x00.", RefusedSnapshot
    yield "reduce in protocol 2", b"\x80\x02cos\nsystem\nX\x01\x00\x00\x00x\x85R.", RefusedSnapshot
    for version in (0, 1, 6, 31):
        yield f"protocol number {version}", program(protocol=version), RefusedSnapshot
    yield "second PROTO", program(op("PROTO", b"\x04"), op("NONE")), RefusedSnapshot
    yield "MEMOIZE in protocol 2", program(listing(), op("MEMOIZE"), protocol=2), RefusedSnapshot
    frame = program(op("FRAME", u64(0)), listing(), protocol=2)
    yield "FRAME in protocol 2", frame, RefusedSnapshot


def memo_attacks() -> Iterator[Entry]:
    # Before: nine bytes that take 1.5 GB, since the memo is an array up to the largest index.
    bomb = program(op("NONE"), op("LONG_BINPUT", u32(0x08000000)), protocol=2)
    yield "memo bomb of nine bytes", bomb, RefusedSnapshot
    far = program(op("EMPTY_LIST"), op("LONG_BINPUT", u32(0xFFFFFFFF)), protocol=2)
    yield "memo index 2^32 - 1", far, RefusedSnapshot
    yield "memo index skips one", program(op("EMPTY_LIST"), op("BINPUT", b"\x01")), RefusedSnapshot
    yield "memo of nothing", program(op("MEMOIZE")), RefusedSnapshot
    yield "memo of a mark", program(op("MARK"), op("MEMOIZE")), RefusedSnapshot
    yield "memo of a number", program(integer(1), op("MEMOIZE")), RefusedSnapshot
    twice = program(op("EMPTY_LIST"), op("MEMOIZE"), op("MEMOIZE"))
    yield "container twice in the memo", twice, RefusedSnapshot
    yield "get from an empty memo", program(op("BINGET", b"\x00")), RefusedSnapshot
    yield "get beyond the memo", program(op("LONG_BINGET", u32(0xFFFFFFFF))), RefusedSnapshot
    # Before: doubles at each step, so that whoever walks it never ends.
    laughs = [op("EMPTY_LIST"), op("MEMOIZE")]
    for i in range(30):
        again = op("BINGET", bytes([i]))
        laughs += [op("EMPTY_LIST"), op("MEMOIZE"), op("MARK"), again, again, op("APPENDS")]
    yield "billion laughs", program(*laughs), LimitExceeded


def containers() -> Iterator[Entry]:
    own = op("EMPTY_LIST") + op("MEMOIZE") + op("MARK") + op("BINGET", b"\x00") + op("APPENDS")
    yield "list inside itself", program(own), RefusedSnapshot
    own = op("EMPTY_LIST") + op("MEMOIZE") + op("BINGET", b"\x00") + op("APPEND")
    yield "list inside itself by APPEND", program(own), RefusedSnapshot
    own = op("EMPTY_DICT") + op("MEMOIZE") + text("a") + op("BINGET", b"\x00") + op("SETITEM")
    yield "dict inside itself", program(own), RefusedSnapshot
    inner = listing(op("EMPTY_LIST") + op("MEMOIZE") + op("MARK") + op("BINGET", b"\x00"))
    yield "mark left open", program(inner), RefusedSnapshot
    used = op("EMPTY_DICT") + text("a") + integer(1) + op("SETITEM")
    more = text("b") + integer(2) + op("SETITEM")
    yield "dict extended after use", program(used, more), RefusedSnapshot
    shared = op("EMPTY_LIST") + op("MEMOIZE") + op("BINGET", b"\x00") + integer(1) + op("APPEND")
    yield "list extended after use", program(shared), RefusedSnapshot
    yield "APPENDS without a mark", program(op("EMPTY_LIST"), op("APPENDS")), RefusedSnapshot
    yield "APPEND on nothing", program(integer(1), op("APPEND")), RefusedSnapshot
    yield "APPEND to a number", program(integer(1), integer(2), op("APPEND")), RefusedSnapshot
    number = program(integer(1), op("MARK"), integer(2), op("APPENDS"))
    yield "APPENDS to a number", number, RefusedSnapshot
    yield "SETITEMS without a dict", program(op("MARK"), op("SETITEMS")), RefusedSnapshot
    wrong = program(op("EMPTY_LIST"), op("MARK"), text("a"), integer(1), op("SETITEMS"))
    yield "SETITEMS on a list", wrong, RefusedSnapshot
    yield "key without a value", program(mapping(text("a"))), RefusedSnapshot
    key = program(mapping(op("EMPTY_LIST"), integer(1)))
    yield "list as a key", key, RefusedSnapshot
    yield "dict as a key", program(mapping(op("EMPTY_DICT"), integer(1))), RefusedSnapshot
    yield "TUPLE2 of one", program(integer(1), op("TUPLE2")), RefusedSnapshot
    yield "TUPLE without a mark", program(integer(1), op("TUPLE")), RefusedSnapshot
    yield "two values at the end", program(op("EMPTY_LIST"), op("EMPTY_LIST")), RefusedSnapshot
    yield "nothing at the end", program(), RefusedSnapshot
    # Before: 200 KB of marks and lists end the process with a segmentation fault.
    deep = op("EMPTY_LIST") * 200_000 + op("APPEND") * 199_999
    yield "200,000 lists deep by APPEND", program(deep), LimitExceeded
    deep = (op("EMPTY_LIST") + op("MARK")) * 100_000
    yield "100,000 marks deep", program(deep), LimitExceeded
    deep = op("EMPTY_TUPLE") + op("TUPLE1") * 200_000
    yield "200,000 tuples deep", program(deep), LimitExceeded
    yield "5,000,000 lists side by side", program(op("EMPTY_LIST") * 5_000_000), LimitExceeded


def lengths() -> Iterator[Entry]:
    long8 = program(op("BINUNICODE8", u64(1 << 62)), stop=False)
    yield "string of 2^62 bytes", long8, LimitExceeded
    yield "string of 2^64 - 1 bytes", program(op("BINUNICODE8", u64(2**64 - 1))), LimitExceeded
    yield "string of 4 GiB", program(op("BINUNICODE", u32(0xFFFFFFFF))), LimitExceeded
    yield "string longer than the file", program(op("BINUNICODE", u32(1 << 23))), TruncatedSnapshot
    yield "LONG4 of 2 GiB", program(op("LONG4", u32(0x7FFFFFFF))), TruncatedSnapshot
    yield "LONG4 of negative length", program(op("LONG4", u32(0xFFFFFFFF))), RefusedSnapshot
    frame = program(op("FRAME", u64(1 << 62)), listing())
    yield "FRAME longer than the file", frame, RefusedSnapshot
    yield "FRAME of 2^64 - 1", program(op("FRAME", u64(2**64 - 1)), listing()), RefusedSnapshot
    nested = program(op("FRAME", u64(30)), op("FRAME", u64(2)), listing())
    yield "FRAME inside a FRAME", nested, RefusedSnapshot
    bad = op("SHORT_BINUNICODE", b"\x02\xc3\x28")
    yield "string that is no UTF-8", program(bad), RefusedSnapshot
    yield "overlong UTF-8", program(op("SHORT_BINUNICODE", b"\x02\xc0\x80")), RefusedSnapshot


def _changed(table: str, key: str, value: Any) -> bytes:
    data = builders.small()
    row = {
        "segment": data["segments"][0],
        "block": data["segments"][0]["blocks"][0],
        "event": data["device_traces"][0][1],
        "oom": data["device_traces"][0][5],
        "frame": data["segments"][1]["frames"][0],
        "top": data,
    }[table]
    if value is KeyError:
        del row[key]
    else:
        row[key] = value
    return builders.pickled(data)


def wrong_values() -> Iterator[Entry]:
    sizes = [
        ("segment", "total_size"), ("segment", "allocated_size"), ("segment", "active_size"),
        ("segment", "requested_size"), ("block", "size"), ("block", "requested_size"),
        ("event", "size"), ("oom", "device_free"),
    ]  # fmt: skip
    numbers = [*sizes, ("segment", "address"), ("block", "address"), ("event", "addr"),
               ("segment", "stream"), ("event", "stream"), ("frame", "line"),
               ("segment", "device"), ("event", "time_us")]  # fmt: skip
    for table, key in sizes:
        yield f"negative {table} {key}", _changed(table, key, -1), RefusedSnapshot
    for table, key in numbers:
        for value in (1.5, True, "1", None, [1]):
            name = f"{table} {key} is {value!r}"
            yield name, _changed(table, key, value), RefusedSnapshot
        yield f"{table} {key} is 2^64", _changed(table, key, 2**64), RefusedSnapshot
    for table, key in [("segment", "address"), ("segment", "total_size"), ("block", "size"),
                       ("event", "size"), ("event", "addr"), ("frame", "line"),
                       ("frame", "name")]:  # fmt: skip
        yield f"{table} without {key}", _changed(table, key, KeyError), RefusedSnapshot
    for table, key, value in [
        ("segment", "device", -1), ("segment", "device", 1 << 31), ("event", "time_us", 2**63),
        ("event", "time_us", -1), ("event", "action", 7), ("event", "frames", "text"),
        ("event", "frames", {}), ("event", "frames", [[]]), ("event", "pool_id", (1, 2, 3)),
        ("event", "pool_id", (0.5, 0)), ("event", "pool_id", 3), ("event", "compile_context", 5),
        ("event", "user_metadata", [1]), ("block", "state", 1), ("block", "history", 5),
        ("segment", "is_expandable", 1), ("segment", "segment_type", 4),
        ("top", "allocator_settings", [1]), ("frame", "filename", 3), ("frame", "name", b""[:0]),
    ][:-1]:  # fmt: skip
        yield f"{table} {key} is {value!r}", _changed(table, key, value), RefusedSnapshot
    for key in ("segments", "device_traces"):
        for value in (5, "text", {}, [5], [[5]], [[[]]], [{}]):
            yield f"{key} is {value!r}", _changed("top", key, value), NotASnapshot
    yield "block list twice", _shared_blocks(), RefusedSnapshot
    for name, value in [("a number", 5), ("a text", "x"), ("None", None), ("a dict", {"a": 1}),
                        ("an empty dict", {}), ("a tuple", ())]:  # fmt: skip
        yield f"pickle of {name}", builders.pickled(value), NotASnapshot


def _shared_blocks() -> bytes:
    data = builders.small()
    data["segments"][1]["blocks"] = data["segments"][0]["blocks"]
    return builders.pickled(data)


def compressed() -> Iterator[Entry]:
    from fragdoctor.inputs.source import zstd_module

    # 100 MB of opcodes in 100 KB: strings as long as one may be.
    def endless() -> bytes:
        return op("PROTO", b"\x04") + (op("BINUNICODE", u32(15 << 20)) + bytes(15 << 20)) * 8

    def many() -> bytes:
        return op("PROTO", b"\x04") + (op("BINUNICODE", u32(1 << 20)) + bytes(1 << 20)) * 100

    yield "gzip bomb", lambda: gzip.compress(endless()), LimitExceeded
    yield "gzip bomb of strings", lambda: gzip.compress(many()), LimitExceeded
    yield "zstd bomb of strings", lambda: zstd_module().compress(many()), LimitExceeded
    whole = builders.pickled(builders.small())
    yield "gzip cut short", gzip.compress(whole)[:-20], TruncatedSnapshot
    yield "zstd cut short", zstd_module().compress(whole)[:-20], TruncatedSnapshot
    packed = bytearray(gzip.compress(whole))
    packed[len(packed) // 2] ^= 0xFF
    yield "gzip damaged", bytes(packed), InputError
    yield "gzip header alone", b"\x1f\x8b", InputError
    yield "gzip in gzip", gzip.compress(gzip.compress(whole)), NotASnapshot
    yield "zstd header alone", b"\x28\xb5\x2f\xfd", InputError


def _page(*entries: dict[str, Any]) -> bytes:
    return b"<!DOCTYPE html><script>local_files = " + json.dumps(entries).encode() + b"</script>"


def pages() -> Iterator[Entry]:
    whole = base64.b64encode(builders.pickled(builders.small())).decode()
    attack = base64.b64encode(program(text("os"), text("system"), op("STACK_GLOBAL"))).decode()
    yield "page without a snapshot", b"<html><body>hello</body></html>", NotASnapshot
    yield "page with an empty list", _page(), NotASnapshot
    yield "page with an attack", _page({"name": "a", "base64": attack}), RefusedSnapshot
    yield "page cut short", _page({"name": "a", "base64": whole})[:300], TruncatedSnapshot
    yield "page, no base64", _page({"name": "a", "base64": "?" * 40}), RefusedSnapshot
    yield "page, empty entry", _page({"name": "a", "base64": ""}), NotASnapshot
    yield "page, odd base64", _page({"name": "a", "base64": whole[:401]}), InputError
    long = _page({"name": "a" * 100_000, "base64": whole})
    yield "page, name of 100,000 characters", long, NotASnapshot


def json_files() -> Iterator[Entry]:
    yield "JSON 100,000 deep", b"[" * 100_000, LimitExceeded
    yield "JSON dicts 100,000 deep", b'{"a":' * 100_000, LimitExceeded
    yield "JSON NaN", b'{"segments": NaN}', RefusedSnapshot
    yield "JSON -Infinity", b'{"segments": -Infinity}', RefusedSnapshot
    yield "JSON number of a megabyte", b'{"segments": ' + b"9" * (1 << 20), RefusedSnapshot
    yield "JSON float too large", b'{"segments": 1e999}', RefusedSnapshot
    yield "JSON leading zero", b'{"segments": 01}', RefusedSnapshot
    yield "JSON string of 20 MB", b'{"' + b"a" * (20 << 20), LimitExceeded
    yield "JSON control character", b'{"a\x00": 1}', RefusedSnapshot
    yield "JSON bad escape", b'{"\\x41": 1}', RefusedSnapshot
    yield "JSON trailing text", b'{"segments": []} x', RefusedSnapshot
    yield "JSON no comma", b'{"segments": [] "a": 1}', RefusedSnapshot
    yield "JSON number as a key", b'{"a":1,2:3}', RefusedSnapshot
    yield "JSON cut short", b'{"segments": [', TruncatedSnapshot
    yield "JSON of something else", b'{"allocation.all.current": 5}', NotASnapshot
    yield "JSON invalid UTF-8", b'{"\xff": 1}', RefusedSnapshot


def others() -> Iterator[Entry]:
    yield "nothing", b"", NotASnapshot
    yield "text", b"torch.OutOfMemoryError: CUDA out of memory.", NotASnapshot
    yield "torch.save archive", b"PK\x03\x04" + bytes(100), NotASnapshot
    yield "zero bytes", bytes(1000), NotASnapshot
    yield "one byte", b"\x80", TruncatedSnapshot
    yield "stock exploit", pickle.dumps(Exploit()), RefusedSnapshot


class Exploit:
    """Would create a file if anything executed it."""

    def __reduce__(self) -> Any:
        return (open, ("pwned-by-pickle", "w"))


def catalogue() -> list[Entry]:
    parts = (forbidden_opcodes, globals_and_protocols, memo_attacks, containers, lengths,
             wrong_values, compressed, pages, json_files, others)  # fmt: skip
    return [entry for part in parts for entry in part()]
