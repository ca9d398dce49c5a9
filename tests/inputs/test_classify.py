"""What a file is, told by its first bytes."""

from __future__ import annotations

import json
import pickle

import pytest
from builders import cpp_pickled, pickled, small
from hypothesis import given
from hypothesis import strategies as st

from fragdoctor.errors import InputError, RefusedSnapshot
from fragdoctor.inputs.classify import InputKind, Wanted, classify, something_else

HEADS = [
    (b"", InputKind.EMPTY),
    (b" \n\t\n", InputKind.EMPTY),
    (pickled(small(), 2), InputKind.PICKLE),
    (pickled(small(), 5), InputKind.PICKLE),
    (cpp_pickled(small()), InputKind.PICKLE),
    (b"\x80", InputKind.PICKLE),
    (b"\x80\x04\x95", InputKind.PICKLE),
    (b"cos\nsystem\n(S'true'\ntR.", InputKind.OLD_PICKLE),
    (pickle.dumps(small(), 0), InputKind.OLD_PICKLE),
    (pickle.dumps(small(), 1), InputKind.OLD_PICKLE),
    (json.dumps(small()).encode(), InputKind.SNAPSHOT_JSON),
    (json.dumps(small(), indent=2).encode(), InputKind.SNAPSHOT_JSON),
    (b'\xef\xbb\xbf{"segments": []}', InputKind.SNAPSHOT_JSON),
    (b'[{"device": 0, "segment_type": "large", "blocks": []}]', InputKind.SNAPSHOT_JSON),
    (b"[]", InputKind.SNAPSHOT_JSON),
    (b"{}\n", InputKind.SNAPSHOT_JSON),
    (b'\xef\xbb\xbf{"num_ooms": 3}', InputKind.STATS),
    (b'{"step": 1, "allocated_bytes.all.current": 5}\n{"step": 2}', InputKind.STATS),
    (b'\n\n [ {"a": 1} ]', InputKind.JSON),
    (b"{", InputKind.JSON),
    (b'{"segments": 39, "retries": 2}', InputKind.JSON),
    (b'{"level": "error", "msg": "CUDA out of memory"}', InputKind.JSON),
    (b'{"architectures": ["LlamaForCausalLM"], "hidden_size": 4096}', InputKind.MODEL_CONFIG),
    (b'\x40\0\0\0\0\0\0\0{"w":{"dtype":"F32"', InputKind.SAFETENSORS),
    (b"<!DOCTYPE html><html>", InputKind.PAGE),
    (b"  \n<html lang='en'>", InputKind.PAGE),
    (b"<script>local_files = []</script>", InputKind.PAGE),
    (b"PK\x03\x04rest", InputKind.ARCHIVE),
    (b"CUDA out of memory. Tried to allocate 2.00 GiB", InputKind.TEXT),
    (b"[rank3]: torch.OutOfMemoryError: CUDA out of memory.", InputKind.TEXT),
    (b"[0]: Traceback (most recent call last):", InputKind.TEXT),
    (b"[2024-05-01 10:00:00] step 1", InputKind.TEXT),
    (b"(base) user@host:~$ python train.py", InputKind.TEXT),
    (b"cost is 5\nsomething\n", InputKind.TEXT),
    (b"cat\ndog\n", InputKind.TEXT),
    (b"{not json, a dict of Python}", InputKind.TEXT),
    (b"\x1b[31mCUDA out of memory\x1b[0m", InputKind.TEXT),
    (b"\xff\xfeC\x00U\x00", InputKind.TEXT),
    ("Speicher reicht nicht \u2013 Abbruch".encode(), InputKind.TEXT),
    ("r\u00e9sum\u00e9".encode("latin-1"), InputKind.TEXT),
    (b"PK\x05\x06" + bytes(18), InputKind.EMPTY),
    (b'{\n  "schema_version": "1.0",\n  "sources": []}', InputKind.REPORT),
    (b'<html><meta name="generator" content="fragdoctor">', InputKind.REPORT),
    (b"Out of memory on GPU 0: 2 GiB requested.\nA memory limit (likely). Try:", InputKind.REPORT),
    (b"## Healthy on GPU 0 (likely). Nothing needs to change.\n", InputKind.REPORT),
    (b"Cause unknown. Try:\n", InputKind.REPORT),
    (
        b"Out of memory on GPU 0: 2 GiB requested.\nTraceback (most recent call last):",
        InputKind.TEXT,
    ),
    (b"#!/bin/bash\n#SBATCH --gpus 8\n", InputKind.SHELL),
    (b"#!/usr/bin/env python\nimport torch\n", InputKind.TEXT),
    (b"step 1\n" + bytes(300) + b"\nstep 9\n", InputKind.TEXT),
    ("step 1\nstep 2\n".encode("utf-16-le"), InputKind.TEXT),
    (b"\x93NUMPY\x01\x00v\x00{'descr': '<f8'}\n\xff\xfe" + bytes(64), InputKind.BINARY),
    (bytes(64), InputKind.BINARY),
    (b"\x7fELF\x02\x01\x01\x00", InputKind.BINARY),
    (bytes(range(14, 27)) * 40, InputKind.BINARY),
]


@pytest.mark.parametrize(("head", "kind"), HEADS, ids=[repr(h[:24]) for h, _ in HEADS])
def test_head_gives_its_kind(head, kind):
    assert classify(head[:4096]) is kind


@given(st.binary(max_size=64))
def test_any_bytes_give_a_kind(head):
    assert classify(head) in InputKind


@given(st.text(alphabet=st.characters(codec="ascii", categories=["L", "Zs"]), min_size=1))
def test_plain_words_are_text(text):
    assert classify(text.encode()) is (InputKind.TEXT if text.strip() else InputKind.EMPTY)


@pytest.mark.parametrize("kind", InputKind)
@pytest.mark.parametrize("wanted", Wanted)
def test_every_kind_has_a_sentence_that_names_the_input(kind, wanted):
    error = something_else("a{b}.bin", kind, wanted)

    assert isinstance(error, InputError)
    assert error.message.startswith("a{b}.bin is ")
    assert isinstance(error, RefusedSnapshot) == (kind is InputKind.OLD_PICKLE)
    assert "{" not in error.hint.replace("a{b}.bin", "")
