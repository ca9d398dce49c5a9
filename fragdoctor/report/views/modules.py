"""Where in the model the memory was: the tree of modules, with what each of them held."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from msgspec.structs import replace

from fragdoctor.model.diagnosis import Diagnosis
from fragdoctor.model.modules import KINDS, ModuleMemory, rows_of
from fragdoctor.report import document as doc
from fragdoctor.report.document import Detail, Style, dim
from fragdoctor.report.words import by_device
from fragdoctor.units import GIB, MIB

_MOST_ROWS: Final = 12
"""About how many rows the short table has: the largest modules are opened until it has them."""

_MIN_SHARE: Final = 0.01
"""Share of the peak: smaller neighbors are merged into one row of the short table."""

_IN_GIB: Final = 10 * GIB
"""Figures are written in GiB from this size up."""

_TITLES: Final = dict(
    zip(KINDS, ("params", "grads", "optim.", "activ.", "temp.", "other"), strict=True)
)


def modules_section(diagnosis: Diagnosis) -> doc.Section:
    """Return the peak by module: the largest, or all in full reports; empty if none is known.

    In every column, the rows with no other rows inside them add up to what was allocated.
    """
    if not diagnosis.modules:
        return doc.Section("", [])
    found = sorted(diagnosis.modules, key=by_device(diagnosis))
    mine = [m for m in found if m.device == found[0].device]
    in_gib = sum(m.total_bytes for m in mine) >= _IN_GIB
    note = f"at the peak of allocated memory, in {'GiB' if in_gib else 'MiB'}"
    tables = [
        _table(list(_opened(mine)), Detail.SHORT, in_gib=in_gib, has_devices=False),
        _table(
            [(len(path) - 1, module) for path, module in rows_of(found)],
            Detail.FULL,
            in_gib=in_gib,
            has_devices=len(mine) < len(found),
        ),
    ]
    return doc.Section("Where in the model", tables, note, "modules")


_Row = tuple[int, ModuleMemory]
"""A module and its depth in the tree."""


def _table(
    rows: Sequence[_Row], detail: Detail, *, in_gib: bool, has_devices: bool
) -> doc.Table:  # fmt: skip
    def figure(n_bytes: int) -> str:
        if not n_bytes:
            return "-"
        return f"{n_bytes / GIB:,.2f}" if in_gib else f"{n_bytes / MIB:,.1f}"

    def column(kind: str) -> doc.Column:
        return doc.Column(_TITLES[kind], lambda row: figure(getattr(row[1], kind)), "right")

    kinds = [kind for kind in KINDS if any(getattr(module, kind) for _, module in rows)]
    return doc.tabled(
        rows,
        *([doc.Column("GPU", lambda row: str(row[1].device))] if has_devices else []),
        doc.Column("module", _name),
        doc.Column("all", lambda row: figure(row[1].total_bytes), "right", style=Style.STRONG),
        *(column(kind) for kind in kinds),
        detail=detail,
    )


def _name(row: _Row) -> doc.Content:
    depth, module = row
    several = f" ({module.n_modules})" if module.n_modules > 1 else ""
    return ["  " * depth, doc.code(module.name), dim(several)]


def _opened(modules: Sequence[ModuleMemory]) -> Iterator[_Row]:
    """Yield the tree with the largest modules opened, until there are enough rows."""
    tree = _trimmed(modules, _MIN_SHARE * sum(m.total_bytes for m in modules))
    closed, opened = [*tree], set[int]()
    n_rows = len(tree)
    while n_rows < _MOST_ROWS:
        largest = max((m for m in closed if m.children), key=lambda m: m.total_bytes, default=None)
        if largest is None:
            break
        opened.add(id(largest))
        closed = [m for m in closed if m is not largest] + [*largest.children]
        n_rows += len(largest.children)
    todo = [(0, module) for module in reversed(tree)]
    while todo:
        depth, module = todo.pop()
        yield depth, module
        if id(module) in opened:
            todo += ((depth + 1, inner) for inner in reversed(module.children))


def _trimmed(modules: Sequence[ModuleMemory], least: float) -> list[ModuleMemory]:
    """Return the tree with small neighbors merged into one entry."""
    small = [m for m in modules if m.total_bytes < least]
    large = [m for m in modules if len(small) < 2 or m.total_bytes >= least]
    found = []
    for m in large:
        inner = _trimmed(m.children, least)
        found.append(replace(m, children=inner if len(inner) > 1 else ()))
    if len(large) < len(modules):
        sums = {kind: sum(getattr(m, kind) for m in small) for kind in KINDS}
        name = f"({sum(m.n_modules for m in small)} smaller)"
        found.append(ModuleMemory(small[0].device, name, 1, **sums))
    return found
