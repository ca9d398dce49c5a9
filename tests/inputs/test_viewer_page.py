"""Snapshots embedded in an HTML page of the memory viewer."""

from __future__ import annotations

import base64
import gzip
import json

import pytest
from builders import BASE, alloc, cpp_pickled, pickled, small, snapshot
from stock import assert_same, from_python

from fragdoctor.errors import NotASnapshot
from fragdoctor.inputs.snapshot_reader import read_snapshot

OTHER = snapshot(events=[alloc(BASE + i * 512, i) for i in range(3000)])


def entry(name: str, raw: bytes) -> dict[str, str]:
    return {"name": name, "base64": base64.b64encode(raw).decode()}


def page(*entries: dict[str, str], after: str = "") -> bytes:
    """Return a page as ``_memory_viz.py`` writes it."""
    return (
        "<!DOCTYPE html>\n<html>\n<head>\n</head>\n<body>\n"
        '<script type="module">\nimport {add_local_files} from "https://x/MemoryViz.js"\n'
        f"const local_files = {json.dumps(list(entries))}\n"
        f"add_local_files(local_files, 'Active Memory Timeline')\n</script>\n{after}</body>\n"
    ).encode()


@pytest.mark.parametrize("raw", [pickled(small()), cpp_pickled(small())], ids=["python", "c++"])
def test_page_gives_its_snapshot(raw):
    result = read_snapshot(page(entry("snapshot.pickle", raw)))

    assert_same(from_python(small()), result)
    assert result.provenance.container == "html"
    assert result.provenance.source.endswith(": snapshot.pickle")


def test_several_entries_give_the_first():
    entries = [
        entry(f"rank{i}.pickle", pickled(d)) for i, d in enumerate([OTHER, small(), small()])
    ]

    result = read_snapshot(page(*entries))

    assert_same(from_python(OTHER), result)


def test_entries_that_are_no_snapshot_are_passed_over():
    entries = [entry("weights.pickle", pickled({"a": 1})), entry("s.pickle", pickled(small()))]

    result = read_snapshot(page(*entries))

    assert_same(from_python(small()), result)


def test_page_whose_entries_are_all_something_else_is_not_a_snapshot():
    with pytest.raises(NotASnapshot):
        read_snapshot(page(entry("a", pickled({"a": 1})), entry("b", pickled([5]))))


def test_large_page_is_read_in_pieces():
    """The payload is longer than the reader's buffers, and text stands around it."""
    raw = page(entry("big.pickle", pickled(OTHER)), after="<p>" + "x" * 200_000 + "</p>")

    assert len(raw) > 300_000
    assert_same(from_python(OTHER), read_snapshot(raw))


def test_escaped_slashes_are_read():
    raw = page(entry("s.pickle", pickled(OTHER)))
    assert b"/" in raw.split(b'"base64": "')[1]

    assert_same(from_python(OTHER), read_snapshot(raw.replace(b"/", b"\\/")))


def test_compressed_page_is_read():
    result = read_snapshot(gzip.compress(page(entry("s.pickle", pickled(small())))))

    assert_same(from_python(small()), result)
    assert (result.provenance.container, result.provenance.compression) == ("html", "gzip")
