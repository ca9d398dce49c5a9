"""Make golden cases of the allocator model.

    python tools/make_golden.py select RECORDED_DIR tests/golden/recorded.jsonl.xz
    python tools/make_golden.py jobs 2.12.1 0 300 > jobs.jsonl      scenarios and random lists
    python tools/make_golden.py pack 2.12.1 jobs.jsonl states.jsonl OUT.jsonl.xz

``jobs`` writes the input for the option ``--jobs`` of the oracle, which is the real allocator on a
device that only does bookkeeping; ``pack`` adds the oracle's states to the cases. The oracle must
pass ``use_on_oom`` and ``no_split`` to ``torch.cuda.MemPool`` and keep no reference to a dropped
pool. Cases in which the real allocator itself crashed are left out, and counted.
``FRAGDOCTOR_GOLDEN=OUT.jsonl.xz pytest tests/trace/test_golden.py`` compares any such file.
"""

from __future__ import annotations

import gzip
import json
import lzma
import sys
from pathlib import Path
from typing import Any

from allocator_cases import Case, Op, random_case, scenarios

FIGURES = ("reserved", "allocated", "active", "requested", "retries", "ooms")


def job_op(op: Op) -> dict[str, Any]:
    """Return an operation in the oracle's format."""
    kind, rest = op[0], op[1:]
    names = {
        "a": ("alloc", ("id", "size", "stream")),
        "f": ("free", ("id",)),
        "e": ("empty_cache", ()),
        "r": ("record_stream", ("id", "stream")),
        "sync": ("sync", ()),
        "fraction": ("fraction", ("value",)),
        "pool": ("pool_begin", ("pool", "use_on_oom", "no_split")),
        "end": ("pool_end", ()),
        "drop": ("pool_drop", ("pool",)),
    }
    if kind == "expandable":
        return {"op": "settings", "value": f"expandable_segments:{rest[0]}"}
    name, keys = names[kind]
    return {"op": name, **dict(zip(keys, rest, strict=True))}


def cases_for(version: str, first: int, last: int) -> list[Case]:
    """Return the scenarios that a PyTorch release understands, and random lists."""
    new = version.startswith("2.15")
    chosen = [c for c in scenarios() if new or "segments_reserve" not in c["conf"]]
    return chosen + [random_case(seed) for seed in range(first, last)]


def pack(case: Case, states: list[dict[str, Any]], version: str) -> Case | None:
    """Return a case with what the oracle did, or None if the oracle crashed."""
    if not states or "final" not in states[-1]:
        return None
    steps = states[:-1]
    expect: dict[str, Any] = {k: [s[k] for s in steps] for k in FIGURES}
    expect["addr"] = [s["addr"] for s in steps if "addr" in s]
    expect["messages"] = [s["oom"] for s in steps if "oom" in s]
    expect["segments"] = [
        [
            s["address"],
            s["total_size"],
            s["is_expandable"],
            s["stream"],
            s["segment_type"],
            [
                [b["size"], b["requested_size"], b["state"].replace("awaiting", "pending")]
                for b in s["blocks"]
            ],
        ]
        for s in states[-1]["final"]["segments"]
    ]
    total = case["total_mb"] * 1024**2
    return {**case, "torch": version, "device_total": total, "fraction": None, "expect": expect}


def write(path: Path, cases: list[Case]) -> None:
    """Write cases to a file, one per line."""
    with lzma.open(path, "wt", preset=9) as file:
        for case in cases:
            file.write(json.dumps(case, separators=(",", ":")) + "\n")
    print(f"{path}: {len(cases)} cases, {path.stat().st_size} bytes", file=sys.stderr)


def select(folder: Path) -> list[Case]:
    """Return a cross-section: one short list per release and setting, from alternating families."""
    groups: dict[tuple[str, str], list[Case]] = {}
    for path in sorted(folder.glob("*.jsonl.gz")):
        with gzip.open(path, "rt") as file:
            for line in file:
                case = json.loads(line)
                groups.setdefault((case["torch"], case["conf"]), []).append(case)
    families = ("random", "steps", "grow", "streams", "holes")
    chosen = []
    for n, (_, cases) in enumerate(sorted(groups.items())):
        wanted = [c for c in cases if c["family"] == families[n % len(families)]] or cases
        busy = [c for c in wanted if c["expect"]["retries"][-1] > 0] or wanted
        chosen.append(min(busy, key=lambda c: len(c["ops"])))
    return chosen


def main(argv: list[str]) -> None:
    """Run the command named in the arguments."""
    if argv[0] == "select":
        write(Path(argv[2]), select(Path(argv[1])))
    elif argv[0] == "jobs":
        for n, case in enumerate(cases_for(argv[1], int(argv[2]), int(argv[3]))):
            job = {**case, "case": case["name"], "name": n, "given": case["ops"]}
            print(json.dumps({**job, "ops": [job_op(op) for op in case["ops"]]}))
    elif argv[0] == "pack":
        jobs = [json.loads(line) for line in Path(argv[2]).read_text().splitlines()]
        states: dict[int, list[dict[str, Any]]] = {}
        for line in Path(argv[3]).read_text().splitlines():
            state = json.loads(line)
            states.setdefault(state["job"], []).append(state)
        packed = []
        for n, job in enumerate(jobs):
            case = {k: v for k, v in job.items() if k not in {"case", "given"}}
            case |= {"name": job["case"], "ops": job["given"]}
            packed.append(pack(case, states.get(n, []), argv[1]))
        write(Path(argv[4]), [c for c in packed if c is not None])
        print(f"{packed.count(None)} cases in which the oracle crashed", file=sys.stderr)
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
