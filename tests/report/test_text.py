from __future__ import annotations

import re
from collections.abc import Callable

import diagnoses
import pytest
from attacks import ATTACKS, assert_all_seen

from fragdoctor.report.base import FORMATS, RenderOptions, Verbosity, renderer
from fragdoctor.report.text import render_diagnosis
from fragdoctor.report.text.simulation import render_simulation

WIDTHS = (60, 80, 120)
ANSI = re.compile(r"\x1b\[[0-9;]*m")


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", diagnoses.ALL)
def test_report_matches_golden(name: str, width: int, golden: Callable[[str, str], None]) -> None:
    text = render_diagnosis(diagnoses.ALL[name](), RenderOptions(width))

    golden(f"{name}_{width}.txt", text)


@pytest.mark.parametrize("name", ["fragmentation", "two_devices"])
def test_verbose_report_matches_golden(name: str, golden: Callable[[str, str], None]) -> None:
    options = RenderOptions(80, verbosity=Verbosity.VERBOSE)

    golden(f"{name}_verbose_80.txt", render_diagnosis(diagnoses.ALL[name](), options))


def test_terminal_report_matches_golden(golden: Callable[[str, str], None]) -> None:
    options = RenderOptions(80, color=True, unicode=True)

    golden("fragmentation_terminal_80.txt", render_diagnosis(diagnoses.fragmentation(), options))


@pytest.mark.parametrize("width", [80, 120])
def test_simulation_matches_golden(width: int, golden: Callable[[str, str], None]) -> None:
    golden(
        f"simulation_{width}.txt", render_simulation(diagnoses.simulation(), RenderOptions(width))
    )


@pytest.mark.parametrize("fmt", ["json", "markdown"])
@pytest.mark.parametrize("name", diagnoses.ALL)
def test_format_matches_golden(name: str, fmt: str, golden: Callable[[str, str], None]) -> None:
    suffix = {"json": "json", "markdown": "md"}[fmt]

    golden(f"{name}.{suffix}", renderer(fmt)(diagnoses.ALL[name](), RenderOptions()))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", diagnoses.ALL)
@pytest.mark.parametrize("verbosity", list(Verbosity))
def test_report_lines_stay_within_width(name: str, width: int, verbosity: Verbosity) -> None:
    text = render_diagnosis(diagnoses.ALL[name](), RenderOptions(width, verbosity=verbosity))

    copied = [line for line in text.splitlines() if "PYTORCH_CUDA_ALLOC_CONF=" in line]
    long = [ln for ln in text.splitlines() if len(ln) > width and ln not in copied]
    assert long == [] or verbosity is Verbosity.QUIET


@pytest.mark.parametrize("name", diagnoses.ALL)
def test_report_on_a_pipe_is_plain_ascii(name: str) -> None:
    text = render_diagnosis(diagnoses.ALL[name](), RenderOptions(verbosity=Verbosity.VERBOSE))

    assert text.isascii()
    assert "\x1b" not in text
    assert text.endswith("\n")
    assert not any(line != line.rstrip() for line in text.splitlines())


@pytest.mark.parametrize("name", diagnoses.ALL)
def test_report_colour_changes_nothing_but_colour(name: str) -> None:
    plain = render_diagnosis(diagnoses.ALL[name](), RenderOptions())
    coloured = render_diagnosis(diagnoses.ALL[name](), RenderOptions(color=True))

    assert ANSI.search(coloured)
    assert plain == ANSI.sub("", coloured)


def test_quiet_report_is_the_verdict_in_one_line() -> None:
    text = render_diagnosis(diagnoses.fragmentation(), RenderOptions(verbosity=Verbosity.QUIET))

    assert text.count("\n") == 1
    assert text.startswith("Fragmentation (proven) on GPU 0: 500.00 MiB was refused")


def test_report_first_lines_are_the_verdict() -> None:
    lines = render_diagnosis(diagnoses.fragmentation(), RenderOptions()).splitlines()

    assert lines[0] == "Fragmentation (proven)  GPU 0"
    assert lines[1].startswith("500.00 MiB was refused while 1.13 GiB was free")


def test_report_setting_stands_alone_on_its_line() -> None:
    lines = render_diagnosis(diagnoses.fragmentation(), RenderOptions(60)).splitlines()

    assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in [ln.strip() for ln in lines]


@pytest.mark.parametrize("color", [False, True])
@pytest.mark.parametrize("verbosity", list(Verbosity))
@pytest.mark.parametrize("attack", ATTACKS)
def test_report_hostile_text_in_every_field_stays_inert(
    attack: str, verbosity: Verbosity, color: bool
) -> None:
    hostile = diagnoses.planted(diagnoses.fragmentation(), attack)
    options = RenderOptions(color=color, verbosity=verbosity)

    text = render_diagnosis(hostile, options)

    assert_all_seen(ANSI.sub("", text).replace("\n", ""))
    if attack.startswith("[bold"):
        assert "[bold red]markup[/]" in re.sub(r"\s+", " ", ANSI.sub("", text))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("attack", ATTACKS)
def test_format_hostile_text_in_every_field_is_all_seen(name: str, attack: str) -> None:
    for make in diagnoses.ALL.values():
        hostile = diagnoses.planted(make(), attack)
        options = RenderOptions(verbosity=Verbosity.VERBOSE)

        assert_all_seen(renderer(name)(hostile, options).replace("\n", ""))


@pytest.mark.parametrize("attack", ATTACKS)
def test_simulation_hostile_text_is_all_seen(attack: str) -> None:
    text = render_simulation(diagnoses.planted(diagnoses.simulation(), attack), RenderOptions())

    assert_all_seen(text.replace("\n", ""))


def test_report_wide_characters_keep_the_columns() -> None:
    hostile = diagnoses.planted(diagnoses.fragmentation(), "\u6f22\u5b57" * 30)

    text = render_diagnosis(hostile, RenderOptions(80))

    from rich.cells import cell_len

    assert all(
        cell_len(line) <= 80
        for line in text.splitlines()
        if "CONF" not in line and ("\u6f22\u5b57" * 30 not in line)
    )


def test_report_megabyte_name_is_cut() -> None:
    hostile = diagnoses.planted(diagnoses.healthy(), "x" * 1_000_000)

    assert len(render_diagnosis(hostile, RenderOptions())) < 300_000
