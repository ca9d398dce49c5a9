"""Compare our cheapest checkpointed modules with every n-th block, all, and PyTorch's own solver.

    python benchmarks/bench_checkpoints.py --python PY --solver DIR [NAME ...]

For each model of ``unequal_models.py``, blocks are checkpointed: all, every second, every third,
and those that ``torch.distributed._tools.sac_ilp.sac_milp`` chooses for some budgets. Each choice
is rehearsed, and the memory that it needs is the limit under which ``rehearse --cure`` looks for
its own set. PY is a Python with PyTorch, Transformers and diffusers; DIR is a folder with PuLP and
pwlf. Operations are those that both rehearsals counted, not those that were planned.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from msgspec.structs import replace
from unequal_models import HELD_OUT, LOOKED, MODELS

from fragdoctor.errors import ConfigError
from fragdoctor.rehearsal.prescription.catalogue import Traits
from fragdoctor.rehearsal.prescription.search import CureSearch
from fragdoctor.rehearsal.process import RehearsalConditions, rehearsed_gpu
from fragdoctor.rehearsal.programs import Program

HERE: Final = Path(__file__).resolve().parent
MIB: Final = 2**20
SHARES: Final = (0.8, 0.6)


@dataclass(frozen=True)
class Row:
    """Another way to checkpoint, and ours with the memory that the other one needs.

    Attributes:
        how: the other way.
        needs, peak: memory in MiB, of the other way and ours.
        again: recomputed operations as a share, of the other way and ours.
    """

    how: str
    needs: tuple[float, float]
    peak: tuple[float, float]
    again: tuple[float, float]


class Comparison(CureSearch):
    """Rehearses other ways to checkpoint, and ours with the memory that each of them needs."""

    def __init__(self, name: str, python: str, solver: str) -> None:
        self.name, self.rows, self.missing = name, list[Row](), list[str]()
        program = Program(str(HERE / "unequal_models.py"), False, [name], [python])
        gpu = rehearsed_gpu("h100", MIB, is_unlimited=False)
        conditions = RehearsalConditions(
            gpu=gpu, stops_by_itself=False, allows_writes=True, variables={"PYTHONPATH": solver}
        )
        super().__init__(program, conditions, None, 1e5)

    def _search(self, traits: Traits) -> None:
        self._n_flops = traits["n_flops"]
        paths = [part["path"] for part in traits["parts"]]
        numbers = [paths.index(path) for path in traits["blocks"] if path in paths]
        for how, chosen in (
            ("all blocks", numbers),
            ("every 2nd", numbers[::2]),
            ("every 3rd", numbers[::3]),
        ):
            if chosen:
                self._compare(how, self._program, ["checkpoint:" + ",".join(map(str, chosen))])
        for share in SHARES:
            plan = self._snapshot.with_name("plan.json")
            plan.unlink(missing_ok=True)
            script = str(HERE / "sac_program.py")
            args = ["plan", self.name, str(share), str(plan)]
            how = f"sac_milp, {share:.0%}"
            try:
                self._measured(replace(self._program, target=script, args=args), [])
            except ConfigError as err:
                self.missing.append(f"{how}: {err.message}")
                continue
            if not json.loads(plan.read_text()):
                self.missing.append(f"{how}: no solution")
                continue
            args = ["run", self.name, str(plan)]
            self._compare(how, replace(self._program, target=script, args=args), [])

    def _compare(self, how: str, program: Program, specs: Sequence[str]) -> None:
        try:
            other = self._measured(program, specs)
        except ConfigError as err:
            self.missing.append(f"{how}: {err.message}")
            return
        self._capacity_bytes = other[0]
        self._conditions = replace(self._conditions, fitting_bytes=other[0])
        self._tried = []  # they were judged by another limit
        as_it_is = self._as_it_is
        if other[0] >= as_it_is.needs_bytes:
            ours = (as_it_is.needs_bytes, as_it_is.found.peak_allocated_bytes, 0.0)
        else:
            self._checkpoint()
            fitting = [one for one in self._tried if one.fits]
            if not fitting:
                self.missing.append(f"{how}: needs {other[0] / MIB:.0f} MiB, none of ours does")
                return
            best = min(fitting, key=lambda one: one.rank)
            ours = self._measured(self._program, best.treatments[0].specs)
        pairs = list(zip(other, ours, strict=True))
        needs, peak = (tuple(n / MIB for n in pair) for pair in pairs[:2])
        self.rows.append(Row(how, needs, peak, pairs[2]))  # type: ignore[arg-type]

    def _measured(self, program: Program, specs: Sequence[str]) -> tuple[int, int, float]:
        """Return needed bytes, peak allocated bytes, and recomputed operations as a share."""
        before, self._program = self._program, program
        try:
            conditions = replace(self._conditions, observes=True, treatments=specs)
            seen = self._rehearse(conditions)
        finally:
            self._program = before
        again = seen.found.traits["n_flops"] / self._n_flops - 1
        return seen.needs_bytes, seen.found.peak_allocated_bytes, again


def main(argv: Sequence[str]) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--solver", required=True)
    parser.add_argument("names", nargs="*")
    options = parser.parse_args(argv)
    rows: list[tuple[str, Row]] = []
    print("| model | way | needs, ours (MiB) | peak, ours (MiB) | again, ours |")
    print("| --- | --- | --- | --- | --- |")
    for name in options.names or MODELS:
        one = Comparison(name, options.python, options.solver)
        one.run()
        for row in one.rows:
            print(
                f"| {name} | {row.how} "
                f"| {row.needs[0]:.0f}, {row.needs[1]:.0f} "
                f"| {row.peak[0]:.0f}, {row.peak[1]:.0f} "
                f"| {row.again[0]:.1%}, {row.again[1]:.1%} |"
            )
        for text in one.missing:
            print(f"| {name} | {text} | | | |", flush=True)
        rows += [(name, row) for row in one.rows]
    for half, names in (("looked at", LOOKED), ("held out", HELD_OUT)):
        these = [row for name, row in rows if name in names]
        worse = sum(row.again[1] > row.again[0] + 5e-4 for row in these)
        less = sum(row.again[1] < row.again[0] - 5e-4 for row in these)
        higher = sum(row.peak[1] > row.peak[0] for row in these)
        print(f"{half}: {len(these)}, fewer operations {less}, more {worse}, higher peak {higher}")


if __name__ == "__main__":
    main(sys.argv[1:])
