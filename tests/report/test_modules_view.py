"""The table of modules in reports."""

from __future__ import annotations

from msgspec.structs import replace
from page_samples import named

from fragdoctor.model.modules import KINDS, ModuleMemory
from fragdoctor.report.base import RenderOptions, Verbosity, render
from fragdoctor.units import MIB


def memory(name: str, n_bytes: int, *children: ModuleMemory, n: int = 1) -> ModuleMemory:
    figures = dict.fromkeys(KINDS, 0) | {"parameters_bytes": n_bytes}
    return ModuleMemory(0, name, n, children=children, **figures)


def lines(*modules: ModuleMemory, verbosity: Verbosity = Verbosity.NORMAL, width: int = 80):
    diagnosis = replace(named(), modules=modules)
    options = RenderOptions(width=width, verbosity=verbosity)
    text = render("analyze", "text", diagnosis, options)
    _, _, rest = text.partition("Where in the model")
    return rest.partition("\n\n")[0].splitlines()


def test_largest_modules_are_opened_and_small_neighbours_are_one_row() -> None:
    small = [memory(f"small{i}", MIB // 10) for i in range(5)]
    found = lines(memory("GPT", 101 * MIB, memory("big", 100 * MIB), *small))

    assert [line.strip().split("  ")[0] for line in found[2:]] == ["GPT", "big", "(5 smaller)"]
    assert found[0].strip() == "at the peak of allocated memory, in MiB"


def test_full_report_has_every_module() -> None:
    small = [memory(f"small{i}", MIB // 10) for i in range(5)]
    model = memory("GPT", 101 * MIB, memory("big", 100 * MIB), *small)
    found = lines(model, verbosity=Verbosity.FULL)

    assert [line.split()[0] for line in found[2:]] == ["GPT", "big", *(m.name for m in small)]


def test_large_peaks_are_written_in_gib_and_empty_columns_are_left_out() -> None:
    found = lines(memory("GPT", 20 * 1024 * MIB, n=3))

    assert "in GiB" in found[0]
    assert found[1].split() == ["module", "all", "params"]
    assert found[2].split() == ["GPT", "(3)", "20.00", "20.00"]


def test_hostile_names_are_made_safe() -> None:
    text = "\n".join(lines(memory("GPT\x1b[31m\n", MIB)))

    assert "\x1b" not in text
    assert len(text.splitlines()) == 3
