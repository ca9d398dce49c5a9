"""Snapshots as people save them: by torch.save, wrapped in a dict, with sources beside them."""

from __future__ import annotations

import io
import pickle
import warnings
import zipfile

import builders
import pytest

from fragdoctor.errors import InputError, LimitExceeded, NotASnapshot, RefusedSnapshot
from fragdoctor.inputs.snapshot_reader import read_snapshot

SNAPSHOT = builders.small()


def saved(obj, *, protocol=2, packing=zipfile.ZIP_STORED, member="run/data.pkl", extra=()):
    """Return what torch.save writes for plain data: a zip with a pickle and small members."""
    out = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(out, "w", packing) as archive:
        warnings.simplefilter("ignore")  # zipfile warns of names that are there twice
        archive.writestr(member, obj if isinstance(obj, bytes) else pickle.dumps(obj, protocol))
        for name, data in (("run/.format_version", b"1"), ("run/byteorder", b"little"), *extra):
            archive.writestr(name, data)
    return out.getvalue()


def test_snapshot_of_torch_save_is_read_as_the_plain_one(tmp_path):
    path = tmp_path / "snapshot.pt"
    path.write_bytes(saved(SNAPSHOT))

    found = read_snapshot(path)

    plain = read_snapshot(pickle.dumps(SNAPSHOT, 2))
    assert found.provenance.container == "torch.save"
    assert found.segments.address.tolist() == plain.segments.address.tolist()
    assert found.events.action.tolist() == plain.events.action.tolist()


@pytest.mark.parametrize("write", [pickle.dumps, saved])
def test_snapshot_in_a_dict_beside_other_things_is_found(write):
    wrapped = {"step": 7, "config": {"lr": 0.1, "size": 3}, "memory": SNAPSHOT, "host": ["a", 2]}

    found = read_snapshot(write(wrapped))

    assert len(found.events.action) == len(read_snapshot(pickle.dumps(SNAPSHOT)).events.action)


def test_sources_attached_to_a_snapshot_do_not_disturb():
    more = {
        "source_code": {"/job/fit.py": "import torch\n" * 1000},
        "shape_data": [{"0x7f00": [["aten.add", (2, 3), "torch.float32"]]}],
    }

    found = read_snapshot(pickle.dumps({**SNAPSHOT, **more}))

    assert set(found.provenance.unknown_keys) == {"source_code", "shape_data"}


def test_several_snapshots_in_one_file_are_not_mixed():
    two = pickle.dumps({"a": SNAPSHOT, "b": builders.small()})

    with pytest.raises(NotASnapshot, match="several"):
        read_snapshot(two)


def test_dict_inside_of_a_snapshot_is_not_taken_for_it():
    found = read_snapshot(pickle.dumps({**SNAPSHOT, "before": builders.small()}))

    assert found.provenance.unknown_keys == {"before": 1}


def test_saved_tensors_are_refused_and_nothing_is_run():
    class Evil:
        def __reduce__(self):
            return (print, ("executed",))

    with pytest.raises(RefusedSnapshot, match="global"):
        read_snapshot(saved({"snapshot": SNAPSHOT, "weights": Evil()}))


def test_values_without_end_stop_at_a_limit():
    endless = b"\x80\x02(" + b"N" * (100 << 20)

    with pytest.raises(LimitExceeded):
        read_snapshot(saved(endless, packing=zipfile.ZIP_DEFLATED))


def test_bomb_stops_at_the_limit_of_expansion():
    text = b"X\x00\x00\x01\x00" + b"a" * 65536  # the same string again and again
    data = b"\x80\x02]q\x00(" + text * 2000

    with pytest.raises(LimitExceeded, match="unpacks to more than"):
        read_snapshot(saved(data, packing=zipfile.ZIP_DEFLATED))


@pytest.mark.parametrize(
    ("data", "error", "sentence"),
    [
        (saved(SNAPSHOT, extra=[("run/data.pkl", b"x")]), RefusedSnapshot, "twice"),
        (saved(SNAPSHOT, packing=zipfile.ZIP_BZIP2), RefusedSnapshot, "unusual"),
        (saved(SNAPSHOT)[:-40], InputError, "damaged"),
        (saved(SNAPSHOT, member="run/version"), NotASnapshot, "zip archive"),
        (saved(SNAPSHOT, member="a.npy"), NotASnapshot, "NumPy"),
    ],
)
def test_other_archives_are_one_sentence(data, error, sentence):
    with pytest.raises(error, match=sentence) as caught:
        read_snapshot(data)

    assert caught.value.hint


def test_archive_from_a_pipe_asks_for_its_name():
    class Pipe(io.RawIOBase):
        name = "pipe"

        def __init__(self):
            self._data = io.BytesIO(saved(SNAPSHOT))

        def readable(self):
            return True

        def readinto(self, buffer):
            return self._data.readinto(buffer)

    with pytest.raises(NotASnapshot, match="pipe"):
        read_snapshot(Pipe())
