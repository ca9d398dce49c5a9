"""Fuzz the native core with libFuzzer, and count the executions.

    python tools/fuzz.py --seconds 15               # a short run of each target
    python tools/fuzz.py --seconds 3600 --corpus fuzz_corpus

Each target is built twice. A fast build without sanitizers hunts for inputs that reach new code,
and everything that it kept is then run under ASan and UBSan, which go on mutating it for a third of
the time. Without sanitizers, an input takes a tenth of the time.

Needs Clang with its runtime libraries; without them the run is skipped, with a message. The inputs
that a target finds interesting stay in the corpus folder, with the totals in `executions.json`, and
a later run continues from them. The exit code is 1 if a target failed; the failing input is next to
the corpus, with the target's name.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SEEDS = ROOT / "tests" / "native" / "seeds"
TARGETS = {
    "pickle": ("fuzz_reader", "*.pickle"),
    "json": ("fuzz_reader", "*.json"),
    "replay": ("replay_fuzz", ""),
    "allocator": ("allocator_random", ""),
}
# Small ones: the time of an execution is that of its bytes, and every construct fits.
MOST_BYTES = {"pickle": 2048, "json": 2048, "replay": 512, "allocator": 1024}
BUILDS = {
    "fast": {"CMAKE_BUILD_TYPE": "Release", "FRAGDOCTOR_SANITIZE": "OFF"},
    "sanitized": {"CMAKE_BUILD_TYPE": "Debug", "FRAGDOCTOR_SANITIZE": "ON"},
}
ROUND_SECONDS = 120  # targets and builds take turns, so that a run cut short has tried all of them
# Keep less freed memory, and no allocation stacks: half the time, a tenth of the memory.
ASAN_OPTIONS = "quarantine_size_mb=4:malloc_context_size=0"


def clang() -> str | None:
    """Return the newest Clang C++ compiler that links a fuzzer, or None if there is none."""
    names = ["clang++", *(f"clang++-{version}" for version in range(22, 11, -1))]
    for name in filter(shutil.which, names):
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "probe.cpp")
            source.write_text(
                "#include <cstddef>\n#include <cstdint>\n"
                'extern "C" int LLVMFuzzerTestOneInput(const uint8_t*, size_t) { return 0; }\n'
            )
            flags = ["-fsanitize=fuzzer,address,undefined", str(source), "-o", f"{folder}/probe"]
            if subprocess.run([name, *flags], capture_output=True, check=False).returncode == 0:
                return name
    return None


def build(compiler: str, folder: Path) -> None:
    """Build the targets, once for each of BUILDS."""
    for name, own in BUILDS.items():
        options = {"CMAKE_CXX_COMPILER": compiler, "FRAGDOCTOR_FUZZ": "ON",
                   "FRAGDOCTOR_PYTHON": "OFF", **own}  # fmt: skip
        flags = [f"-D{option}={value}" for option, value in options.items()]
        tree = folder / name
        subprocess.run(["cmake", "-S", ROOT, "-B", tree, *flags], check=True, capture_output=True)
        subprocess.run(["cmake", "--build", tree, "--parallel", "2"], check=True,
                       capture_output=True)  # fmt: skip


def fill(corpus: Path, pattern: str) -> None:
    """Put the seeds of a target into its corpus."""
    corpus.mkdir(parents=True, exist_ok=True)
    for path in sorted(SEEDS.glob(pattern)) if pattern else ():
        shutil.copy(path, corpus / path.name)
    if not pattern:
        for i in range(8):
            (corpus / f"seed_{i}").write_bytes(random.Random(i).randbytes(256 << i % 4))


def run(target: str, program: Path, corpus: Path, seconds: int, seed: int) -> tuple[int, int]:
    """Run a target; return how many inputs it executed, and its exit code."""
    ended = subprocess.run(
        [program, f"-max_total_time={seconds}", f"-seed={seed}", f"-max_len={MOST_BYTES[target]}",
         f"-artifact_prefix={corpus.parent}/{target}-", "-print_final_stats=1", "-timeout=20",
         "-rss_limit_mb=2048", corpus],
        capture_output=True, text=True, errors="replace", check=False, cwd=ROOT,
        env=os.environ | {"ASAN_OPTIONS": ASAN_OPTIONS},
    )  # fmt: skip
    counted = re.search(r"stat::number_of_executed_units:\s*(\d+)", ended.stderr)
    if ended.returncode:
        print(ended.stderr[-4000:])
    return int(counted[1]) if counted else 0, ended.returncode


def hunt(programs: Path, corpus: Path, targets: Sequence[str], seconds: int, seed: int) -> bool:
    """Run the targets, one on each core, and print the totals; return whether one failed."""
    totals_file = corpus / "executions.json"
    totals: dict[str, dict[str, int]] = (
        json.loads(totals_file.read_text()) if totals_file.exists() else {}
    )
    failed = False
    for target in targets:
        fill(corpus / target, TARGETS[target][1])
        totals.setdefault(target, dict.fromkeys(BUILDS, 0))

    def has_failed(target: str, start: int) -> bool:
        length, codes = min(ROUND_SECONDS, seconds - start), []
        for build_name in BUILDS:
            program = programs / build_name / f"{TARGETS[target][0]}_fuzzer"
            share = length * 2 // 3 if build_name == "fast" else length - length * 2 // 3
            n, code = run(target, program, corpus / target, max(share, 1), seed + start)
            totals[target][build_name] += n
            codes.append(code)
        return any(codes)

    with ThreadPoolExecutor(os.cpu_count()) as at_once:
        for start in range(0, seconds, ROUND_SECONDS):
            failed |= any(list(at_once.map(has_failed, targets, repeat(start))))
            totals_file.write_text(json.dumps(totals, indent=1) + "\n")
    for target in targets:
        counts = ", ".join(f"{n:,} {name}" for name, n in totals[target].items())
        print(
            f"{target}: {counts} executions, {len(list((corpus / target).iterdir())):,} inputs kept"
        )
    print("FOUND SOMETHING" if failed else "nothing found")
    return failed


def main(argv: Sequence[str] | None = None) -> int:
    """Build and run each target, and print how many inputs it executed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=int, default=15, help="for each target")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--corpus", type=Path, help="kept from run to run")
    parser.add_argument("--target", choices=sorted(TARGETS), action="append")
    options = parser.parse_args(argv)
    compiler = clang()
    if compiler is None or shutil.which("cmake") is None:
        print("Skipped: fuzzing needs CMake and Clang with its fuzzer runtime (libFuzzer).")
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        corpus = options.corpus or Path(scratch, "corpus")
        build(compiler, Path(scratch))
        failed = hunt(Path(scratch), corpus.absolute(), options.target or list(TARGETS),
                      options.seconds, options.seed)  # fmt: skip
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
