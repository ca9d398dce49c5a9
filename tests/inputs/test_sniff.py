"""What a file is, told by its first bytes."""

from __future__ import annotations

import json
import pickle

import pytest
from builders import cpp_pickled, pickled, small
from hypothesis import given
from hypothesis import strategies as st

from fragdoctor.inputs.sniff import Kind, sniff

HEADS = [
    (b"", Kind.EMPTY),
    (pickled(small(), 2), Kind.PICKLE),
    (pickled(small(), 5), Kind.PICKLE),
    (cpp_pickled(small()), Kind.PICKLE),
    (b"\x80", Kind.PICKLE),
    (b"cos\nsystem\n(S'true'\ntR.", Kind.PICKLE),
    (pickle.dumps([1, {"a": 2}], 0), Kind.PICKLE),
    (pickle.dumps([1, {"a": 2}], 1), Kind.PICKLE),
    (pickle.dumps({"a": 2}, 1), Kind.PICKLE),
    (json.dumps(small()).encode(), Kind.JSON),
    (json.dumps(small(), indent=2).encode(), Kind.JSON),
    (b'\xef\xbb\xbf{"segments": []}', Kind.JSON),
    (b"[]", Kind.JSON),
    (b'\n\n [ {"a": 1} ]', Kind.JSON),
    (b"{", Kind.JSON),
    (b"<!DOCTYPE html><html>", Kind.HTML),
    (b"  \n<html lang='en'>", Kind.HTML),
    (b"<script>local_files = []</script>", Kind.HTML),
    (b"PK\x03\x04rest", Kind.ZIP),
    (b"CUDA out of memory. Tried to allocate 2.00 GiB", Kind.TEXT),
    (b"[rank3]: torch.OutOfMemoryError: CUDA out of memory.", Kind.TEXT),
    (b"[0]: Traceback (most recent call last):", Kind.TEXT),
    (b"[2024-05-01 10:00:00] step 1", Kind.TEXT),
    (b"(base) user@host:~$ python train.py", Kind.TEXT),
    (b"cost is 5\nsomething\n", Kind.TEXT),
    ("Speicher reicht nicht \u2013 Abbruch".encode(), Kind.TEXT),
    (bytes(64), Kind.BINARY),
    (b"\x7fELF\x02\x01\x01\x00", Kind.BINARY),
]


@pytest.mark.parametrize(("head", "kind"), HEADS, ids=[repr(h[:24]) for h, _ in HEADS])
def test_head_gives_its_kind(head, kind):
    assert sniff(head[:4096]) is kind


@given(st.binary(max_size=64))
def test_any_bytes_give_a_kind(head):
    assert sniff(head) in Kind


@given(st.text(alphabet=st.characters(codec="ascii", categories=["L", "Zs"]), min_size=1))
def test_plain_words_are_text(text):
    assert sniff(text.encode()) is Kind.TEXT
