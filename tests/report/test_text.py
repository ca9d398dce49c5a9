"""The report at a terminal: the answer first, short, within its width, inert."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import diagnoses
import pytest
from attacks import ATTACKS, assert_all_seen
from builders import MIB
from msgspec.structs import replace
from rich.cells import cell_len

from fragdoctor.diagnosis.pipeline import diagnose
from fragdoctor.inputs.snapshot_reader import read_snapshot
from fragdoctor.model.case import Case
from fragdoctor.model.diagnosis import Cause, RunState
from fragdoctor.model.finding import Confidence
from fragdoctor.model.phases import Category
from fragdoctor.model.simulation import Outlook, OutlookBasis, OutlookState
from fragdoctor.report.base import RenderOptions, Verbosity, render
from fragdoctor.report.words import also_text, outlook_text

SAMPLES = Path(__file__).parents[2] / "sample_snapshots"
WIDTHS = (60, 80, 120)
ANSI = re.compile(r"\x1b\[[0-9;]*m")
EXPORT = "  export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


def text_of(name_or_diagnosis, **options):
    diagnosis = name_or_diagnosis
    if isinstance(diagnosis, str):
        diagnosis = diagnoses.ALL[diagnosis]()
    return render("analyze", "text", diagnosis, RenderOptions(**options))


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", diagnoses.ALL)
def test_report_matches_golden(name: str, width: int, golden: Callable[[str, str], None]) -> None:
    golden(f"{name}_{width}.txt", text_of(name, width=width))


@pytest.mark.parametrize("name", ["fragmentation", "two_devices"])
def test_full_report_matches_golden(name: str, golden: Callable[[str, str], None]) -> None:
    golden(f"{name}_full_80.txt", text_of(name, verbosity=Verbosity.FULL))


def test_terminal_report_matches_golden(golden: Callable[[str, str], None]) -> None:
    golden("fragmentation_terminal_80.txt", text_of("fragmentation", color=True, unicode=True))


@pytest.mark.parametrize("fmt", ["text", "markdown", "html"])
def test_simulation_matches_golden(fmt: str, golden: Callable[[str, str], None]) -> None:
    suffix = {"text": "txt", "markdown": "md", "html": "html"}[fmt]

    golden(f"simulation.{suffix}", render("simulate", fmt, diagnoses.simulation(), RenderOptions()))


@pytest.mark.parametrize("fmt", ["json", "markdown"])
@pytest.mark.parametrize("name", diagnoses.ALL)
def test_format_matches_golden(name: str, fmt: str, golden: Callable[[str, str], None]) -> None:
    suffix = {"json": "json", "markdown": "md"}[fmt]

    golden(f"{name}.{suffix}", render("analyze", fmt, diagnoses.ALL[name](), RenderOptions()))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", diagnoses.ALL)
@pytest.mark.parametrize("verbosity", [Verbosity.NORMAL, Verbosity.FULL])
def test_report_lines_stay_within_width(name: str, width: int, verbosity: Verbosity) -> None:
    lines = text_of(name, width=width, verbosity=verbosity).splitlines()

    assert [ln for ln in lines if len(ln) > width and "export " not in ln] == []


@pytest.mark.parametrize("name", diagnoses.ALL)
def test_short_report_is_seen_at_once(name: str) -> None:
    assert len(text_of(name).splitlines()) <= 46


@pytest.mark.parametrize("name", diagnoses.ALL)
def test_report_on_a_pipe_is_plain_ascii(name: str) -> None:
    text = text_of(name, verbosity=Verbosity.FULL)

    assert text.isascii()
    assert "\x1b" not in text
    assert text.endswith("\n")
    assert not any(line != line.rstrip() for line in text.splitlines())


@pytest.mark.parametrize("name", diagnoses.ALL)
def test_report_colour_changes_nothing_but_colour(name: str) -> None:
    coloured = text_of(name, color=True)

    assert ANSI.search(coloured)
    assert text_of(name) == ANSI.sub("", coloured)


def test_quiet_report_is_the_verdict_and_the_cure() -> None:
    verdict, cure = text_of("fragmentation", verbosity=Verbosity.QUIET).splitlines()

    assert verdict.startswith("Fragmentation on GPU 0 (proven): 500.00 MiB was refused")
    assert cure == EXPORT.strip()


def test_outlook_stands_in_what_the_cure_wins() -> None:
    one = diagnoses.fragmentation()
    outlook = Outlook(OutlookState.HOLDS, OutlookBasis.REPEATED, steps=12)
    first, *others = one.recommendations
    first = replace(first, predicted=replace(first.predicted, outlook=outlook))

    text = text_of(replace(one, recommendations=(first, *others)))

    said = " ".join(text.split())
    assert "Replayed: the run fits, 672.00 MiB to spare. Will finish." in said


def test_measure_that_is_likely_too_little_is_no_cure_and_a_long_how_is_cut() -> None:
    one = diagnoses.fragmentation()
    outlook = Outlook(
        OutlookState.OPEN, OutlookBasis.SCALED, reason="too far", likely=OutlookState.FAILS
    )
    first, *others = one.recommendations
    change = "; ".join(f"change number {i} of the program" for i in range(20))
    first = replace(first, predicted=replace(first.predicted, outlook=outlook), change=change)

    text = text_of(replace(one, recommendations=(first, *others)))

    assert text.splitlines()[2] == "Fragmentation (proven). Try:"
    said = " ".join(text.split())
    assert "of the program; more with --full." in said
    assert "change number 19" not in said


def test_holder_says_what_it_is_where_its_line_does_not() -> None:
    one = diagnoses.fragmentation()
    state = (Category.OPTIMIZER_STATE, Category.PARAMETERS)
    first = replace(one.holders[0], categories=state)
    second = replace(first, location=None, failure_bytes=32 * MIB, categories=())

    text = text_of(replace(one, holders=(first, second)))

    assert "most of it optimizer state and parameters" in text
    assert "the size of a workspace of cuBLAS" in text


@pytest.mark.parametrize(
    ("state", "likely", "after", "words"),
    [
        ("holds", None, None, "will finish (why)"),
        ("open", "holds", None, "likely finishes (why)"),
        ("open", None, None, "whether it finishes is open: why"),
        ("open", "fails", 2, "likely fails after 2 more steps (why)"),
        ("open", "fails", None, "likely fails (why)"),
        ("fails", None, 0, "will fail in the current step (why)"),
        ("fails", None, 1, "will fail after 1 more step (why)"),
    ],
)
def test_outlook_is_one_of_five_words(
    state: str, likely: str | None, after: int | None, words: str
) -> None:
    outlook = Outlook(
        OutlookState(state),
        fails_after_steps=after,
        reason="why",
        likely=OutlookState(likely) if likely else None,
    )

    assert outlook_text(outlook) == words


@pytest.mark.parametrize(
    ("state", "headline"),
    [
        (RunState.FITS, "Healthy on GPU 0 (proven). Nothing needs to change."),
        (RunState.NEAR_LIMIT, "Near the limit on GPU 0 (proven)."),
        (RunState.NO_HISTORY, "No history recorded on GPU 0. Record the run:"),
        (RunState.EMPTY, "Nothing recorded on GPU 0. Record the run:"),
    ],
)
def test_healthy_run_is_named_by_its_state(state: RunState, headline: str) -> None:
    one = diagnoses.healthy()

    lines = text_of(replace(one, verdict=replace(one.verdict, state=state))).splitlines()

    assert lines[0].rstrip() == headline


def test_setting_that_an_input_recorded_is_one_word_of_the_shell() -> None:
    one = diagnoses.fragmentation()
    first = replace(one.recommendations[0], setting="A=b:1;rm -rf ~\nreboot")

    lines = text_of(replace(one, recommendations=(first,))).splitlines()

    assert "  export A='b:1;rm -rf ~\\nreboot'" in lines


@pytest.mark.parametrize("color", [False, True])
@pytest.mark.parametrize("verbosity", list(Verbosity))
@pytest.mark.parametrize("attack", ATTACKS)
def test_report_hostile_text_in_every_field_stays_inert(
    attack: str, verbosity: Verbosity, color: bool
) -> None:
    hostile = diagnoses.planted(diagnoses.fragmentation(), attack)

    text = text_of(hostile, color=color, verbosity=verbosity)

    assert_all_seen(ANSI.sub("", text).replace("\n", ""))
    if attack.startswith("[bold"):
        assert "[bold red]markup[/]" in re.sub(r"\s+", " ", ANSI.sub("", text))


def test_report_wide_characters_keep_the_columns() -> None:
    hostile = diagnoses.planted(diagnoses.fragmentation(), "\u6f22\u5b57" * 30)

    lines = text_of(hostile).splitlines()

    whole = "\u6f22\u5b57" * 30
    assert all(cell_len(line) <= 80 for line in lines if whole not in line)


def test_report_megabyte_name_is_cut() -> None:
    hostile = diagnoses.planted(diagnoses.healthy(), "x" * 1_000_000)

    assert len(text_of(hostile)) < 300_000


@pytest.mark.parametrize(
    ("script", "shown"),
    [("/app/main.py", "main.py"), ("D:\\app\\main.py", "main.py"), ("src/main.py", "src/main.py"),
     ("/app/$(id).py", "train.py"), ("-x.py", "train.py"), ("/app/a b.py", "train.py")],
)  # fmt: skip
def test_rehearsal_to_copy_names_the_script_where_that_is_safe_to_paste(script, shown):
    data = read_snapshot(SAMPLES / "capacity_oom.pickle")
    names = tuple(script if n.endswith("record.py") else n for n in data.strings)

    told = diagnose(Case(snapshot=replace(data, strings=names)))

    said = render("analyze", "text", told, RenderOptions(80))

    assert f"fragdoctor rehearse {shown} --unlimited" in said


def test_other_causes_are_told_apart_by_their_commas() -> None:
    verdict = replace(
        diagnoses.capacity().verdict,
        confidence=Confidence.LIKELY,
        also=(Cause.MEMORY_LIMIT, Cause.FRAGMENTATION),
    )

    assert also_text(verdict) == "memory limit reached, fragmentation"
