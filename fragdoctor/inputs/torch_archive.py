"""Open snapshots written by ``torch.save``: a zip whose ``data.pkl`` is an ordinary pickle.

Only that member is read, as a bounded stream, by our pickle reader, which refuses the opcodes that
a tensor needs (globals, persistent ids). Nothing is loaded, and no other member is opened.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from typing import BinaryIO, Final

from fragdoctor.errors import InputError, NotASnapshot, RefusedSnapshot
from fragdoctor.inputs.zip_members import only_one, open_archive, open_member, parts_of

PICKLE: Final = "data.pkl"
MAX_ENTRIES: Final = 100_000
"""A checkpoint has one member for each storage; a saved snapshot has about five in total."""


@contextmanager
def open_saved(source: str | PathLike[str] | BinaryIO, name: str) -> Iterator[BinaryIO]:
    """Open the pickle inside a file from ``torch.save``; ``name`` is the file's display name.

    Raises:
        InputError: the file cannot be read, or does not hold exactly one such pickle.
    """
    archive = open_archive(source, name, MAX_ENTRIES, "A saved snapshot holds five.")
    with archive, open_member(archive, _pickle_of(archive, name), name) as stream:
        try:
            yield stream
        except RefusedSnapshot as e:
            raise RefusedSnapshot(e.message, hint=CHECKPOINT, offset=e.offset) from e


def _pickle_of(archive: zipfile.ZipFile, name: str) -> zipfile.ZipInfo:
    entries = archive.infolist()
    found = [e for e in entries if len(p := parts_of(e.filename)) == 2 and p[1] == PICKLE]
    if not found:
        raise NotASnapshot(f"{name} is a zip archive, not a memory snapshot.", hint=NO_PICKLE)
    return only_one(found, PICKLE, name, "torch.save() writes no such file.")


NO_PICKLE: Final = f"torch.save() puts a {PICKLE} into its archives; this one has none."


CHECKPOINT: Final = (
    "It looks like a checkpoint. A snapshot is written by torch.cuda.memory._dump_snapshot()."
)


def cannot_seek(name: str) -> InputError:
    """Return the error for an archive from a pipe: a zip lists its members at its end."""
    return NotASnapshot(
        f"{name} is a file of torch.save(), which cannot be read from a pipe.",
        hint="Give it by its file name.",
    )
