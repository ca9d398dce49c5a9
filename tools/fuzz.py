"""Fuzz the native core with libFuzzer, under ASan and UBSan, and count the executions.

    python tools/fuzz.py --seconds 15               # a short run of each target
    python tools/fuzz.py --seconds 3600 --corpus fuzz_corpus

Needs Clang with its runtime libraries; without them the run is skipped, with a message. The inputs
that a target finds interesting stay in the corpus folder, and a later run continues from them. The
exit code is 1 if a target failed; the failing input is next to the corpus, with the target's name.
"""

from __future__ import annotations

import argparse
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SEEDS = ROOT / "tests" / "native" / "seeds"
TARGETS = {
    "pickle": ("fuzz_reader", "*.pickle"),
    "json": ("fuzz_reader", "*.json"),
    "replay": ("replay_fuzz", ""),
    "allocator": ("allocator_random", ""),
}
MOST_BYTES = {"pickle": 16384, "json": 16384, "replay": 4096, "allocator": 8192}


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
    """Build the targets."""
    options = {"CMAKE_CXX_COMPILER": compiler, "CMAKE_BUILD_TYPE": "Debug", "FRAGDOCTOR_FUZZ": "ON",
               "FRAGDOCTOR_SANITIZE": "ON", "FRAGDOCTOR_PYTHON": "OFF"}  # fmt: skip
    flags = [f"-D{name}={value}" for name, value in options.items()]
    subprocess.run(["cmake", "-S", ROOT, "-B", folder, *flags], check=True, capture_output=True)
    subprocess.run(["cmake", "--build", folder, "--parallel", "2"], check=True, capture_output=True)


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
    )  # fmt: skip
    counted = re.search(r"stat::number_of_executed_units:\s*(\d+)", ended.stderr)
    if ended.returncode:
        print(ended.stderr[-4000:])
    return int(counted[1]) if counted else 0, ended.returncode


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
    failed = False
    with tempfile.TemporaryDirectory() as scratch:
        corpus = options.corpus or Path(scratch, "corpus")
        build(compiler, Path(scratch, "build"))
        for target in options.target or TARGETS:
            name, pattern = TARGETS[target]
            fill(corpus / target, pattern)
            program = Path(scratch, "build", f"{name}_fuzzer")
            n, code = run(target, program, corpus / target, options.seconds, options.seed)
            print(f"{target}: {n:,} executions, {'FOUND SOMETHING' if code else 'nothing found'}")
            failed |= code != 0
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
