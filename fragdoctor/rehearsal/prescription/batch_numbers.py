"""The number that sets the batch size without a data loader.

It may be in the program, in its arguments, or in a file beside it that it imports or reads.

Such a number is recognized not by its name but by its effect: with an n-th of it the models get an
n-th of the rows, or n times as many if it is the number of batches that something is split into.
They have as many parameters as before. Which number to try first is a guess. The numbers of a list
that the program chooses from are divided together.

Rows are along the first dimension of what models are given. They may be along the second one, after
the steps of a sequence, if each is computed independently: what is along a sequence is not.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import islice
from math import gcd
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from msgspec import Struct
from msgspec.structs import replace

from fragdoctor.rehearsal.divided_numbers import ARGUMENT, divided
from fragdoctor.rehearsal.programs import Program

MAX_TRIED: Final = 3
NOT_NEAR: Final = (9, 0.0)
MAX_FILES: Final = 64
MAX_BYTES: Final = 2**20
_SETTING: Final = re.compile(
    r"""^\s{0,40}["']?([\w.-]{1,80})["']?\s{0,9}[:=]\s{0,9}(\d{1,9})(?![\w.])"""
)
_LOOPS: Final = (ast.For, ast.AsyncFor, ast.While)
_SCOPES: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef, *_LOOPS)


class BatchNumber(Struct, frozen=True):
    """A number that may set the batch size, or a list of such numbers.

    Attributes:
        name: the name that it is given to, "" if it is used directly.
        values: the number, or those of the list.
        places: its positions, in the form that ``engine/treatments/numbers.py`` takes.
        source: the text that it is in; "" if it is an argument.
        file: path of the file that it is in, "" if that is the program.
        size: the batch size: rows, or what they come from, such as graphs.
        is_count: whether it is a number of batches: more of them are smaller.
        axis: dimension of the rows.
    """

    name: str
    values: tuple[int, ...]
    places: tuple[str, ...]
    source: str = ""
    file: str = ""
    size: int = 0
    is_count: bool = False
    axis: int = 0

    @property
    def value(self) -> int:
        """The number, or the largest of the list."""
        return max(self.values)

    @property
    def is_list(self) -> bool:
        """Whether it is more than one number."""
        return len(self.values) > 1

    def _divisor(self, n: int) -> Fraction:
        return Fraction(1, n) if self.is_count else Fraction(n)

    def spec(self, n: int) -> str:
        """Return the spec that gives batches of an n-th of the rows in a rehearsal."""
        places = ",".join(self.places)
        return f"batch-number:{self._divisor(n)}:{places}{self.file and ':'}{quote(self.file)}"

    def lines(self, n: int) -> list[str]:
        """Return the lines that the user writes for batches of an n-th of the rows."""
        divisor = self._divisor(n)
        if not self.source:
            return [f"{self.name} {int(self.value / divisor)}  # in the arguments".lstrip()]
        written = divided(self.source.encode(), divisor, [*self.places]).decode().split("\n")
        rows = dict.fromkeys(int(place.partition(".")[0]) for place in self.places)
        place = f"{Path(self.file).name}:" if self.file else "line "
        return [f"{written[row - 1].strip()}  # {place}{row}" for row in rows]


def batch_numbers(
    program: Program, rows: Sequence[Sequence[int]], files: Sequence[str] = ()
) -> list[BatchNumber]:
    """Return the numbers that may produce these numbers of rows by dimension, the likeliest first.

    ``files`` are files that the program imports or reads; those beside it are looked at.
    """
    found = [*_arguments(program.args)]
    script = Path(program.target).absolute()
    if program.kind == "script":
        found += _in_file(script, _in_source)
    near_by = {script.parent, Path.cwd()}
    others = (one for one in map(Path, files) if not near_by.isdisjoint(one.parents))
    for other in islice((one for one in others if one != script), MAX_FILES):
        inside = _in_file(other, _in_source if other.suffix == ".py" else _in_settings)
        found += [replace(one, file=str(other)) for one in inside]

    def distance(one: BatchNumber) -> tuple[int, float]:
        ratios = (
            (axis, max(one.value, n) / min(one.value, n))
            for axis, sizes in enumerate(rows)
            for n in sizes
            if n
        )
        return min((pair for pair in ratios if pair[1].is_integer()), default=NOT_NEAR)

    def is_seen(one: BatchNumber) -> bool:
        """Whether it is not one number among others, such as those of a shape, by chance."""
        return not one.is_list or any(len({*one.values} & {*sizes}) > 1 for sizes in rows)

    near = [one for one in found if one.value > 1 and distance(one) != NOT_NEAR and is_seen(one)]
    near.sort(key=lambda one: ("batch" not in one.name.lower(), not one.is_list, distance(one)))
    return near[:MAX_TRIED]


def of_rows(
    number: BatchNumber, n: int, before: Mapping[str, Any], after: Mapping[str, Any]
) -> BatchNumber | None:
    """Return what an n-th of a number does to rows; None if it does not set their number.

    The same models must get an n-th of the rows, or n times as many, or the same.
    """
    if before["n_parameters"] != after["n_parameters"]:
        return None
    for axis, (rows, changed) in enumerate(zip(before["rows"], after["rows"], strict=True)):
        for is_count, factor in ((False, Fraction(n)), (True, Fraction(1, n))):
            new = {*changed} - {*rows}
            sizes = {int(one * factor) for one in new if one * factor in rows}
            if new and len(sizes) == len(new):
                # Graphs have several rows each: parts have to divide the number, too.
                size = number.value if number.is_list else gcd(number.value, *sizes)
                size = max(sizes) if is_count else size
                return replace(number, size=size, is_count=is_count, axis=axis)
    return None


def _arguments(words: Sequence[str]) -> Iterator[BatchNumber]:
    for number, word in enumerate(words):
        option, _, value = word.rpartition("=")
        if value.isascii() and value.isdecimal():
            name = option or (words[number - 1] if number else "")
            yield BatchNumber(name, (int(value),), (f"{ARGUMENT}{number}",))


def _in_file(path: Path, read: Callable[[str], Iterator[BatchNumber]]) -> list[BatchNumber]:
    try:
        is_small = path.stat().st_size <= MAX_BYTES  # JSON may be the data
        return [*read(path.read_bytes().decode())] if is_small else []
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return []


def _in_source(source: str) -> Iterator[BatchNumber]:
    """Yield numbers that are given to names, and bare ones, grouped by function and by loop."""
    module = ast.parse(source)
    names = {id(value): name for name, value in _named(module)}
    alike: dict[tuple[int, int], list[str]] = {}
    inner: list[tuple[ast.AST, int]] = [(module, 0)]
    lines = source.split("\n")
    for node, scope in inner:
        within = id(node) if isinstance(node, _SCOPES) else scope
        inner += [(child, within) for child in ast.iter_child_nodes(node)]
        members: list[ast.AST] = [node]
        if isinstance(node, ast.List | ast.Tuple) and len(node.elts) > 1:
            members = [*node.elts]
        written = [found for one in members if (found := _written(one, lines))]
        if not written or len(written) < len(members):
            continue
        places, values = zip(*written, strict=True)
        if len(written) > 1 or id(node) in names:
            yield BatchNumber(names.get(id(node), ""), values, places, source)
        else:
            alike.setdefault((scope, values[0]), []).extend(places)
    for (_, value), where in alike.items():
        yield BatchNumber("", (value,), tuple(where), source)


def _written(node: ast.AST, lines: Sequence[str]) -> tuple[str, int] | None:
    """Return the place and the value of a number that is written with digits (not ``0x20``)."""
    if not isinstance(node, ast.Constant) or type(node.value) is not int:
        return None
    written = lines[node.lineno - 1].encode()[node.col_offset : node.end_col_offset]
    is_decimal = written.replace(b"_", b"") == str(node.value).encode()
    return (f"{node.lineno}.{node.col_offset}", node.value) if is_decimal else None


def _in_settings(source: str) -> Iterator[BatchNumber]:
    """Yield numbers of a file of settings, each on a line with its name."""
    for row, line in enumerate(source.split("\n"), 1):
        if found := _SETTING.match(line):
            place = f"{row}.{len(line[: found.start(2)].encode())}"
            yield BatchNumber(found[1], (int(found[2]),), (place,), source)


def _named(module: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Yield values with what they are given to: a variable, a parameter, an option."""
    for node in ast.walk(module):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                yield from _assigned(target, node.value)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            yield from _assigned(node.target, node.value)
        elif isinstance(node, ast.arguments):
            named = [*node.posonlyargs, *node.args][-len(node.defaults) :] if node.defaults else []
            pairs = zip(
                [*named, *node.kwonlyargs], [*node.defaults, *node.kw_defaults], strict=True
            )
            yield from ((one.arg, value) for one, value in pairs if value is not None)
        elif isinstance(node, ast.Call):
            option = ast.unparse(node.args[0]) if node.args else ""
            for one in node.keywords:
                yield (option if one.arg == "default" else one.arg or ""), one.value
        elif isinstance(node, ast.Dict):
            pairs_of = zip(node.keys, node.values, strict=True)
            yield from ((ast.unparse(key), value) for key, value in pairs_of if key is not None)


def _assigned(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.AST]]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for pair in zip(target.elts, value.elts, strict=False):
            yield from _assigned(*pair)
    else:
        yield ast.unparse(target), value
