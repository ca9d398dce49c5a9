"""Several bundles of one run: ordered by how much they explain, one for each process."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from fragdoctor.errors import InputError
from fragdoctor.frozen import frozen
from fragdoctor.inputs.bundles import is_bundle, open_bundle
from fragdoctor.model.case import BundleFacts

_ORDER: Final = {"oom": 0, "signal": 1, "exit": 2}


@frozen
class FoundBundle:
    """One bundle of a run and its manifest."""

    path: Path
    facts: BundleFacts


def find_bundles(directory: Path) -> tuple[FoundBundle, ...]:
    """Return the bundles in a directory, the one that explains most first.

    That is the failure that ended its program before one that was caught; then the first in time:
    what fails later, on other ranks too, is often the consequence. A signal comes before an exit,
    and the good end of a program that caught its failures before these.
    """
    found = []
    for path in sorted(directory.iterdir()) if directory.is_dir() else ():
        if not path.name.startswith(".") and is_bundle(path):
            try:
                with open_bundle(str(path)) as bundle:
                    found.append(FoundBundle(path, bundle.facts))
            except InputError:
                continue  # written by another program; reported when it is given by name
    return tuple(sorted(found, key=telling_order))


def telling_order(found: FoundBundle) -> tuple[int, int, str, str]:
    """Return the sort key of ``find_bundles``."""
    facts = found.facts
    is_fatal = facts.ended_program or _is_failure(facts)
    order = 0 if is_fatal else _ORDER.get(facts.reason, len(_ORDER))
    if facts.reason == "exit" and facts.n_ooms and not facts.exception:
        # It ended well: its recording shows the failures that were caught, and the rest.
        return 0, 1, facts.time, found.path.name
    return order, 0 if is_fatal else 2, facts.time, found.path.name


def _is_failure(facts: BundleFacts) -> bool:
    """Return whether a failure without a bundle of its own ended the program."""
    return facts.exception.endswith("OutOfMemoryError")


def pack(bundle: Path) -> Path:
    """Turn a bundle into a zip file beside it and return that; the directory is removed.

    The zip is complete before it appears under its name, which no other file has.

    Raises:
        OSError: it cannot be written; the directory is untouched then.
    """
    target = _free_name(bundle)
    temporary = bundle.with_name(f".{bundle.name}.{os.getpid()}.zip.tmp")
    files: Sequence[Path] = sorted(p for p in bundle.iterdir() if p.is_file())
    try:
        with zipfile.ZipFile(temporary, "x", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            for file in files:
                archive.write(file, f"{bundle.name}/{file.name}")
        with temporary.open("rb") as done:
            os.fsync(done.fileno())
        temporary.rename(target)
    finally:
        temporary.unlink(missing_ok=True)
    for file in files:
        file.unlink()
    bundle.rmdir()
    return target


def _free_name(bundle: Path) -> Path:
    n, target = 1, bundle.with_name(f"{bundle.name}.zip")
    while target.exists():
        n += 1
        target = bundle.with_name(f"{bundle.name}-{n}.zip")
    return target


Process = tuple[str, int | None, int]


def one_of_each_process(paths: Sequence[str]) -> list[str]:
    """Return the paths, with only the most informative bundle of each process.

    What is no bundle, or does not say which process it is of, stays.
    """
    best: dict[Process, FoundBundle] = {}
    kept = []
    for path in paths:
        found = _read(path)
        if found is None or found.facts.pid is None:
            kept.append(path)
            continue
        process = (found.facts.host, found.facts.rank, found.facts.pid)
        known = best.get(process)
        if known is None or telling_order(found) < telling_order(known):
            best[process] = found
    chosen = {str(b.path) for b in best.values()} | set(kept)
    return [path for path in paths if str(Path(path)) in chosen or path in chosen]


def _read(path: str) -> FoundBundle | None:
    if "://" in path or not is_bundle(path):
        return None
    try:
        with open_bundle(path) as bundle:
            return FoundBundle(Path(path), bundle.facts)
    except InputError:
        return None  # it will be a row with its reason
