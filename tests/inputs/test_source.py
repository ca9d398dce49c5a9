"""Byte streams: what is packed comes out whole, wherever it comes from."""

from __future__ import annotations

import gzip
import io
import json
import random

import pytest
from builders import pickled, small
from stock import assert_same, from_python

from fragdoctor.errors import InputError, LimitExceeded
from fragdoctor.inputs.snapshot_reader import read_snapshot
from fragdoctor.inputs.source import open_source, zstd_module
from fragdoctor.limits import Limits
from fragdoctor.model.hooks import watched_by

PACKERS = {"": bytes, "gzip": gzip.compress, "zstd": zstd_module().compress}
BODIES = {"pickle": pickled(small()), "json": json.dumps(small()).encode()}


def read_all(stream: io.RawIOBase) -> bytes:
    parts = []
    buffer = bytearray(1000)
    while n := stream.readinto(memoryview(buffer)):
        parts.append(bytes(buffer[:n]))
    return b"".join(parts)


@pytest.mark.parametrize("compression", PACKERS)
@pytest.mark.parametrize("n_bytes", [0, 1, 4095, 4096, 4097, 300_000])
def test_stream_gives_every_byte_once(compression, n_bytes):
    body = (b"0123456789abcdef!" * (n_bytes // 17 + 1))[:n_bytes]

    with open_source(PACKERS[compression](body)) as stream:
        assert stream.compression == compression
        assert stream.head == body[:4096]
        assert read_all(stream) == body
        assert stream.n_bytes == n_bytes


@pytest.mark.parametrize("compression", PACKERS)
@pytest.mark.parametrize("container", BODIES)
def test_packed_file_on_disk_is_read(tmp_path, compression, container):
    path = tmp_path / "snapshot"
    path.write_bytes(PACKERS[compression](BODIES[container]))

    result = read_snapshot(path)

    assert_same(from_python(small()), result)
    assert result.provenance.container == container
    assert result.provenance.compression == compression
    assert result.provenance.n_bytes == len(BODIES[container])


def test_gzip_members_and_zstd_frames_are_joined():
    half = len(BODIES["pickle"]) // 2
    parts = BODIES["pickle"][:half], BODIES["pickle"][half:]

    for pack in (gzip.compress, zstd_module().compress):
        assert_same(from_python(small()), read_snapshot(b"".join(map(pack, parts))))


def test_open_stream_keeps_its_name(tmp_path):
    path = tmp_path / "s.pickle"
    path.write_bytes(BODIES["pickle"])

    with path.open("rb") as file, open_source(file) as stream:
        assert stream.name == str(path)


def test_input_longer_than_the_limit_is_refused():
    limits = Limits(max_input_bytes=4999)

    with (
        open_source(bytes(5000), limits=limits) as stream,
        pytest.raises(LimitExceeded, match="longer than"),
    ):
        read_all(stream)


def test_missing_path_is_an_input_error(tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        open_source(tmp_path / "none")


def test_path_with_a_null_byte_is_an_input_error():
    with pytest.raises(InputError, match="not a file name"):
        open_source("a\0b")


@pytest.mark.parametrize("compression", PACKERS)
def test_reading_tells_how_much_of_the_file_was_read(tmp_path, compression):
    body = random.Random(1).randbytes(6 << 20) * 2
    path = tmp_path / "big"
    path.write_bytes(PACKERS[compression](body))
    told = []

    with watched_by(lambda *what: told.append(what)), open_source(path) as stream:
        read_all(stream)

    assert len(told) >= 2
    assert {what for what, _, _ in told} == {"Reading"}
    assert {total for _, _, total in told} == {path.stat().st_size}
    done = [n for _, n, _ in told]
    assert done == sorted(done)
    assert done[-1] <= path.stat().st_size


def test_reading_of_a_pipe_tells_no_total():
    told = []

    with watched_by(lambda *what: told.append(what)), open_source(bytes(5 << 20)) as stream:
        read_all(stream)

    assert [total for _, _, total in told] == [0]
