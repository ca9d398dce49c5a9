"""Pack some of the recordings into ``tests/golden/recordings.tar.xz`` for tests in a fresh clone.

usage: python tools/make_recordings.py SHARED

SHARED is the folder with all recordings (``snapshots/``); the tests use it instead if it exists.
Other people's messages and snapshots stay out. The same files always give the same archive.
"""

from __future__ import annotations

import io
import json
import lzma
import sys
import tarfile
from pathlib import Path

TARGET = Path(__file__).resolve().parents[1] / "tests" / "golden" / "recordings.tar.xz"
MAX_SMALL_BYTES = 280_000
LARGER = (
    "checkpoint_off",
    "checkpoint_on",
    "frag_gpt_varlen",
    "frag_gpt_varlen_expandable",
    "healthy_gpt",
    "kvcache_cat_expandable",
    "leak_losses",
)
"""Recordings that particular tests need, in addition to all the small ones."""


def main(shared: Path) -> None:
    """Write the archive."""
    snapshots = shared / "snapshots"
    names = sorted(
        folder.name
        for folder in snapshots.iterdir()
        if folder.is_dir()
        and (folder.name in LARGER or (folder / "snapshot.pickle").stat().st_size < MAX_SMALL_BYTES)
    )
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name in names:
            for file in sorted((snapshots / name).iterdir()):
                add(archive, f"snapshots/{name}/{file.name}", file.read_bytes())
        for table in ("expected.json", "index.json"):
            rows = json.loads((snapshots / table).read_text("utf-8"))
            add(archive, f"snapshots/{table}", as_json(chosen(rows, names)))
    TARGET.write_bytes(lzma.compress(packed.getvalue(), preset=9 | lzma.PRESET_EXTREME))
    print(f"{len(names)} recordings, {TARGET.stat().st_size / 1e3:.0f} KB: {TARGET}")


def chosen(rows: object, names: list[str]) -> object:
    """Return a table with only the rows of the chosen recordings."""
    if isinstance(rows, dict):
        return {name: row for name, row in rows.items() if name in names}
    assert isinstance(rows, list)
    return [row for row in rows if row["name"] in names]


def as_json(value: object) -> bytes:
    """Return a value as text that is easy to compare."""
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()


def add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    """Add a file to the archive without owner and time."""
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(data), 0o644
    archive.addfile(info, io.BytesIO(data))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
