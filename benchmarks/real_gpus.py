"""Compare rehearsals with recordings that others made on real GPUs, request by request.

    python benchmarks/real_gpus.py [--clones FOLDER] [--python PATH] [--only TEXT]

Each row of ``RECORDINGS`` is a public repository with a training script and the memory snapshot
that the script dumped on somebody's GPU. The repository is cloned from GitHub, or taken from
``FOLDER/OWNER+NAME`` if that exists; ``fragdoctor rehearse`` runs the script in a temporary copy,
and the snapshot that the script dumps there is compared with the one in the repository. This prints
a table in Markdown; nothing from the repositories is kept.

A request is a size that the program asked the allocator for. If both recordings have the same
number of requests, those at the same position are compared; otherwise the requests in the longest
common runs count as equal. The scripts need einops, einx, frozendict, jaxtyping,
pandas and regex in their Python; the compiled one needs Triton.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from difflib import SequenceMatcher
from pathlib import Path
from typing import Final, NamedTuple

from fragdoctor.inputs.cases import read_snapshot
from fragdoctor.model.snapshot import Action
from fragdoctor.trace.trace import Trace

MIB: Final = 2**20
ALL_STEPS: Final = "1000"
"""More steps than any script has: with a number of steps, no rounds of loops are skipped."""


class Edit(NamedTuple):
    """A change to a script whose committed state is not the one that made the recording."""

    file: str
    before: str
    after: str


class Recording(NamedTuple):
    """A script and its recording.

    Attributes:
        repository, commit: the repository and commit on GitHub.
        script: the script's path in the repository; folder: where the script is started.
        args: the script's arguments.
        recorded: the snapshot in the repository; dumped: where the script writes its snapshot.
        gpu: the GPU whose kernels are rehearsed.
        edits: the changes to make first.
        imports: the folders on the module search path.
        paths: the parts of the repository that are needed.
    """

    repository: str
    commit: str
    script: str
    recorded: str
    dumped: str
    gpu: str
    args: Sequence[str] = ()
    folder: str = "."
    edits: Sequence[Edit] = ()
    imports: Sequence[str] = (".", "cs336-basics")
    paths: Sequence[str] = ("cs336-basics", "cs336_systems")


MAGMA27: Final = Recording(
    "MAGMA27/assignment2-systems",
    "15883f2b1d6bc52439d8935e280bce430151f361",
    "cs336_systems/benchmarking_script.py",
    "memory_snapshot.pickle",
    "memory_snapshot.pickle",
    "rtx4090",
)


def _shreyansh26(name: str) -> Recording:
    return Recording(
        "shreyansh26/MLSys-Experiments",
        "b63fb8c",
        f"model_memory_usage/{name}.py",
        f"model_memory_usage/{name}.pkl",
        f"model_memory_usage/{name}.pkl",
        "h100",
        folder="model_memory_usage",
        imports=(),
        paths=(f"model_memory_usage/{name}.py",),
    )


SILMONT2000: Final = Recording(
    "silmont2000/assignment2-systems",
    "133f064",
    "cs336_systems/trace_peak_memory.py",
    "mem_snapshot.pickle",
    "mem_snapshot.pickle",
    "rtx4090",
)

BCRAFTON: Final = Recording(
    "bcrafton/assignment2-systems",
    "0c0e8a736edbf5f55ec1a3536fd0f126a9eb9ee9",
    "benchmarking_script.py",
    "memory_snapshot.pickle",
    "memory_snapshot.pickle",
    "rtx4090",
    imports=(".",),
    paths=("benchmarking_script.py", "cs336_basics"),
)
NOTHANMIN: Final = Recording(
    "notHanmin/assignment2-systems",
    "33be88e6487892dd486fcbc60d84fa5fdc2d3a5f",
    "cs336_systems/benchmarking_script.py",
    "memory_snapshot.pickle",
    "memory_snapshot.pickle",
    "rtx4090",
)


def _wedsonlin(length: int, pattern: str, word: str, autocast: str) -> Recording:
    name = f"results/medium_{length}_{word}_memory_snapshot.pickle"
    return Recording(
        "Wedsonlin/assignment2-systems",
        "8630bcf",
        "cs336_systems/nsys_profile.py",
        name,
        name,
        "rtx4090",
        ("--context_length", str(length), "--d_model", "1024", "--d_ff", "4096",
         "--num_layers", "24", "--num_heads", "16", "--model_name", "medium",
         "--memory-profile", "true", "--pattern", pattern, "--autocast", autocast),
        folder="cs336_systems",
        # Before Python 3.12, an f-string may not contain the same kind of quotes.
        edits=(Edit("cs336_systems/nsys_profile.py", '{model.config["context_length"]}',
                    "{model.config['context_length']}"),),
    )  # fmt: skip


RECORDINGS: Final = (
    MAGMA27,
    _shreyansh26("profile_grad"),
    _shreyansh26("profile_no_grad"),
    SILMONT2000,
    BCRAFTON,
    NOTHANMIN,
    # The recordings with 512 tokens contain requests of casts, so they were made with autocast.
    *(
        _wedsonlin(n, *pattern, "true" if n == 512 else "false")
        for pattern in (("forward-only", "inference"), ("full-training-step", "training"))
        for n in (128, 256, 512, 1024)
    ),
)


class Figures(NamedTuple):
    """A snapshot's figures for its first GPU: requests in order, peaks, number of segments."""

    requests: Sequence[int]
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    n_segments: int


def figures(snapshot: Path) -> Figures:
    """Return a snapshot's figures for its first GPU."""
    source = read_snapshot(str(snapshot))
    trace = Trace.of(source, source.devices[0])
    events = trace.events
    totals = trace.totals
    return Figures(
        events.size_bytes[events.action == Action.ALLOC].tolist(),
        totals.peak_allocated_bytes,
        totals.peak_reserved_bytes,
        len(trace.segments),
    )


def n_equal(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many requests two recordings have in common, in order."""
    if len(one) == len(other):
        return sum(a == b for a, b in zip(one, other, strict=True))
    blocks = SequenceMatcher(None, one, other, autojunk=False).get_matching_blocks()
    return sum(block.size for block in blocks)


def check_out(recording: Recording, clones: Path | None, home: Path) -> Path:
    """Return an edited copy of the needed parts of a repository; the snapshot is next to it."""
    local = None if clones is None else clones / recording.repository.replace("/", "+")
    source = home / "source"
    if local is not None and local.is_dir():
        source = local / "repo" if (local / "repo").is_dir() else local
    else:
        url = f"https://github.com/{recording.repository}"
        _run(["git", "clone", "-q", "--no-checkout", url, str(source)], home)
    git = ["git", "-C", str(source)]
    tree = home / "tree"
    tree.mkdir()
    archive = [*git, "archive", "-o", str(home / "tree.tar"), recording.commit, *recording.paths]
    _run(archive, home)
    _run(["tar", "-xf", str(home / "tree.tar"), "-C", str(tree)], home)
    content = _run([*git, "show", f"{recording.commit}:{recording.recorded}"], home)
    (home / "recorded.pickle").write_bytes(content)
    for edit in recording.edits:
        file = tree / edit.file
        text = file.read_text(encoding="utf-8")
        if edit.before not in text:
            raise SystemExit(f"{recording.repository}: {edit.before!r} is not in {edit.file}")
        file.write_text(text.replace(edit.before, edit.after), encoding="utf-8")
    dumped = tree / recording.dumped
    dumped.parent.mkdir(parents=True, exist_ok=True)
    dumped.unlink(missing_ok=True)
    return tree


def _run(command: Sequence[str], home: Path) -> bytes:
    return subprocess.run(command, cwd=home, check=True, capture_output=True).stdout


def rehearse(recording: Recording, tree: Path, python: str) -> str:
    """Rehearse the script in its copy; return why that failed, or "" if it worked."""
    paths = [str(tree / name) for name in recording.imports]
    command = [
        sys.executable, "-m", "fragdoctor", "rehearse", "--gpu", recording.gpu, "--unlimited",
        "--allow-writes", "--steps", ALL_STEPS, "--python", python, "--format", "json",
        str(tree / recording.script), "--", *recording.args,
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=tree / recording.folder, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip
    if (tree / recording.dumped).is_file():
        return ""
    try:
        said = json.loads(done.stdout)
        return str(said["error"]["message"] if "error" in said else said["rehearsal"]["stopped"])
    except (ValueError, KeyError):
        return done.stderr.strip().splitlines()[-1] if done.stderr else "nothing was dumped"


def row(recording: Recording, clones: Path | None, python: str) -> str:
    """Return the table's row for one recording."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        tree = check_out(recording, clones, home)
        name = f"{recording.repository} {recording.commit[:7]}, {Path(recording.recorded).name}"
        problem = rehearse(recording, tree, python)
        if problem:
            return f"| {name} | {recording.gpu} | not rehearsed: {problem} | | | |"
        real, ours = figures(home / "recorded.pickle"), figures(tree / recording.dumped)
    equal = n_equal(real.requests, ours.requests)
    of = len(real.requests)
    more = len(ours.requests) - of
    requests = f"{equal:,} of {of:,}" + (f" ({more:+,})" if more else "")
    return (
        f"| {name} | {recording.gpu} | {requests} "
        f"| {_pair(real.peak_allocated_bytes, ours.peak_allocated_bytes)} "
        f"| {_pair(real.peak_reserved_bytes, ours.peak_reserved_bytes)} "
        f"| {real.n_segments:,}" + (f", {ours.n_segments:,}" if ours[3] != real[3] else "") + " |"
    )


def _pair(real: int, ours: int) -> str:
    if real == ours:
        return f"{real / MIB:,.1f}"
    return f"{real / MIB:,.1f}, {ours / MIB:,.1f} ({(ours - real) / real:+.2%})"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--clones", type=Path, help="a folder with repositories, OWNER+NAME each")
    parser.add_argument("--python", default=sys.executable, help="the scripts' Python")
    parser.add_argument("--only", default="", help="those with this text in their repository")
    chosen = parser.parse_args()
    print("| recording | GPU | requests equal | peak MiB | reserved MiB | segments |")
    print("| --- | --- | --- | --- | --- | --- |")
    for recording in RECORDINGS:
        if chosen.only in f"{recording.repository} {recording.recorded}":
            print(row(recording, chosen.clones, chosen.python), flush=True)


if __name__ == "__main__":
    main()
