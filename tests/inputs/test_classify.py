"""What a file is, told by its first bytes."""

from __future__ import annotations

import json
import pickle

import pytest
from builders import cpp_pickled, pickled, small
from hypothesis import given
from hypothesis import strategies as st

from fragdoctor.errors import InputError, RefusedSnapshot
from fragdoctor.inputs.classify import Kind, Wanted, classify, something_else

HEADS = [
    (b"", Kind.EMPTY),
    (b" \n\t\n", Kind.EMPTY),
    (pickled(small(), 2), Kind.PICKLE),
    (pickled(small(), 5), Kind.PICKLE),
    (cpp_pickled(small()), Kind.PICKLE),
    (b"\x80", Kind.PICKLE),
    (b"\x80\x04\x95", Kind.PICKLE),
    (b"cos\nsystem\n(S'true'\ntR.", Kind.OLD_PICKLE),
    (pickle.dumps(small(), 0), Kind.OLD_PICKLE),
    (pickle.dumps(small(), 1), Kind.OLD_PICKLE),
    (json.dumps(small()).encode(), Kind.SNAPSHOT_JSON),
    (json.dumps(small(), indent=2).encode(), Kind.SNAPSHOT_JSON),
    (b'\xef\xbb\xbf{"segments": []}', Kind.SNAPSHOT_JSON),
    (b'[{"device": 0, "segment_type": "large", "blocks": []}]', Kind.SNAPSHOT_JSON),
    (b"[]", Kind.SNAPSHOT_JSON),
    (b"{}\n", Kind.SNAPSHOT_JSON),
    (b'\xef\xbb\xbf{"num_ooms": 3}', Kind.STATS),
    (b'{"step": 1, "allocated_bytes.all.current": 5}\n{"step": 2}', Kind.STATS),
    (b'\n\n [ {"a": 1} ]', Kind.JSON),
    (b"{", Kind.JSON),
    (b'{"segments": 39, "retries": 2}', Kind.JSON),
    (b'{"level": "error", "msg": "CUDA out of memory"}', Kind.JSON),
    (b'{"architectures": ["LlamaForCausalLM"], "hidden_size": 4096}', Kind.MODEL_CONFIG),
    (b'\x40\0\0\0\0\0\0\0{"w":{"dtype":"F32"', Kind.SAFETENSORS),
    (b"<!DOCTYPE html><html>", Kind.PAGE),
    (b"  \n<html lang='en'>", Kind.PAGE),
    (b"<script>local_files = []</script>", Kind.PAGE),
    (b"PK\x03\x04rest", Kind.ARCHIVE),
    (b"CUDA out of memory. Tried to allocate 2.00 GiB", Kind.TEXT),
    (b"[rank3]: torch.OutOfMemoryError: CUDA out of memory.", Kind.TEXT),
    (b"[0]: Traceback (most recent call last):", Kind.TEXT),
    (b"[2024-05-01 10:00:00] step 1", Kind.TEXT),
    (b"(base) user@host:~$ python train.py", Kind.TEXT),
    (b"cost is 5\nsomething\n", Kind.TEXT),
    (b"cat\ndog\n", Kind.TEXT),
    (b"{not json, a dict of Python}", Kind.TEXT),
    (b"\x1b[31mCUDA out of memory\x1b[0m", Kind.TEXT),
    (b"\xff\xfeC\x00U\x00", Kind.TEXT),
    ("Speicher reicht nicht \u2013 Abbruch".encode(), Kind.TEXT),
    ("r\u00e9sum\u00e9".encode("latin-1"), Kind.TEXT),
    (bytes(64), Kind.BINARY),
    (b"\x7fELF\x02\x01\x01\x00", Kind.BINARY),
    (bytes(range(14, 27)) * 40, Kind.BINARY),
]


@pytest.mark.parametrize(("head", "kind"), HEADS, ids=[repr(h[:24]) for h, _ in HEADS])
def test_head_gives_its_kind(head, kind):
    assert classify(head[:4096]) is kind


@given(st.binary(max_size=64))
def test_any_bytes_give_a_kind(head):
    assert classify(head) in Kind


@given(st.text(alphabet=st.characters(codec="ascii", categories=["L", "Zs"]), min_size=1))
def test_plain_words_are_text(text):
    assert classify(text.encode()) is (Kind.TEXT if text.strip() else Kind.EMPTY)


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("wanted", Wanted)
def test_every_kind_has_a_sentence_that_names_the_input(kind, wanted):
    error = something_else("a{b}.bin", kind, wanted)

    assert isinstance(error, InputError)
    assert error.message.startswith("a{b}.bin is ")
    assert isinstance(error, RefusedSnapshot) == (kind is Kind.OLD_PICKLE)
    assert "{" not in error.hint.replace("a{b}.bin", "")
