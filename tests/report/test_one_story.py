"""No report says two figures for one thing: those of every recording and message are compared."""

from __future__ import annotations

import re
from pathlib import Path

import diagnoses
import pytest
from figures import FIGURES, contradictions_in
from msgspec.structs import replace

from fragdoctor.diagnosis.pipeline import diagnose
from fragdoctor.inputs.classify import InputKind, classify
from fragdoctor.inputs.messages import find_messages
from fragdoctor.inputs.snapshot_reader import read_snapshot
from fragdoctor.model.case import Case, Overrides
from fragdoctor.model.diagnosis import Cause, RunState
from fragdoctor.report.base import RenderOptions, Verbosity, render
from fragdoctor.report.page.page import whatif_data
from fragdoctor.units import GIB, MIB

SAMPLES = Path(__file__).resolve().parents[2] / "sample_snapshots"
SWEEP = (SAMPLES / "sweep.log").read_text()


def cases_of(path: Path) -> list[Case]:
    """Return a recording, alone and with its message, or a message, as cases."""
    if path.suffix == ".txt":
        return [Case(oom=find_messages(path.read_bytes().decode()))]
    snapshot, message = read_snapshot(path), path.with_name(f"{path.name.split('.')[0]}.txt")
    together = [message] if message.exists() else []
    return [
        Case(snapshot=snapshot),
        *(Case(snapshot=snapshot, oom=find_messages(m.read_text())) for m in together),
    ]


def contradictions(case: Case) -> list[str]:
    """Return what a case's reports say in two ways; of several devices each has its own figures."""
    diagnosis = diagnose(case)
    first = diagnosis.verdict.device
    mine = [d for d in diagnosis.devices if d.device == first] or diagnosis.devices[:1]
    return contradictions_in(replace(diagnosis, devices=mine))


COMMITTED = sorted([*SAMPLES.glob("*.pickle*"), *SAMPLES.glob("*_oom.txt")])


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.name)
def test_each_thing_has_one_figure(path):
    for case in cases_of(path):
        assert contradictions(case) == []


@pytest.mark.parametrize("verbosity", [Verbosity.NORMAL, Verbosity.FULL])
def test_run_that_did_not_fail_gets_no_further(verbosity):
    told = diagnose(Case(snapshot=read_snapshot(SAMPLES / "healthy_training.pickle.gz")))

    shown = render("analyze", "text", told, RenderOptions(verbosity=verbosity))
    tried = whatif_data(told, is_live=False)

    assert "lower peak" in shown
    assert "gets further" not in shown
    assert tried is not None
    assert {said for _, said in (row["said"] for row in tried["variants"])} == {"lower peak"}


def test_what_if_ends_at_what_pytorch_could_have():
    """Not at the device, of which a memory fraction allows a part."""
    told = diagnose(Case(snapshot=read_snapshot(SAMPLES / "memory_limit_oom.pickle")))
    data = whatif_data(told, is_live=False)

    assert data is not None
    ends = {row["name"]: row["capacity"] for row in data["variants"]}
    assert told.devices[0].capacity_bytes == 16 * GIB
    assert data["capacity"] == ends["expandable_segments:True"] < 4 * GIB
    assert ends["Raise the memory fraction"] == 16 * GIB


@pytest.mark.parametrize("form", ["text", "markdown", "html", "json", "sarif", "junit"])
@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.name)
def test_own_report_is_not_read_as_a_log(path, form):
    shown = render("analyze", form, diagnose(cases_of(path)[0]), RenderOptions())

    assert classify(shown.encode()[:4096]) is InputKind.REPORT


def test_nothing_needs_to_change_only_in_a_healthy_run():
    healthy = replace(diagnoses.healthy(), recommendations=())
    leaking = replace(healthy, verdict=replace(healthy.verdict, cause=Cause.LEAK))

    shown = [render("analyze", "text", d, RenderOptions()) for d in (healthy, leaking)]

    assert ["Nothing needs to change." in text for text in shown] == [True, False]


@pytest.mark.slow
@pytest.mark.shared
def test_each_thing_has_one_figure_in_all_shared_recordings_and_messages(shared):
    wrong = {}
    for folder in sorted((shared / "snapshots").iterdir()):
        if (path := folder / "snapshot.pickle").exists():
            message = folder / "oom.txt"
            oom = find_messages(message.read_text()) if message.exists() else None
            wrong[folder.name] = contradictions(Case(snapshot=read_snapshot(path), oom=oom))
    for path in sorted((shared / "oom_messages").glob("*.txt")):
        text = path.read_bytes().decode()
        wrong[path.name] = contradictions(Case(oom=find_messages(text)))

    assert {name: found for name, found in wrong.items() if found} == {}


@pytest.mark.parametrize(
    ("field", "thing"),
    [("peak_allocated_bytes", "peak allocated"), ("peak_reserved_bytes", "peak reserved"),
     ("capacity_bytes", "what PyTorch could have"), ("stranded_free_bytes", "stranded"),
     ("reserved_bytes", "reserved")],
)  # fmt: skip
def test_figure_that_is_changed_in_one_place_is_seen(field, thing):
    path = "capacity_oom.pickle" if field == "capacity_bytes" else "fragmentation_oom.pickle"
    told = diagnose(Case(snapshot=read_snapshot(SAMPLES / path)))
    (device,) = told.devices
    planted = replace(device, **{field: getattr(device, field) + 10 * MIB})

    found = contradictions_in(replace(told, devices=[planted]))

    assert contradictions_in(told) == []
    assert any(f": {thing}: " in one for one in found), found


def test_contradictions_are_seen():
    said = (
        "Live memory exceeds it by 3.00 MiB: no allocator can. Even so it would be 4.00 MiB short"
    )

    figures = {m for pattern in FIGURES["missing"] for m in re.findall(pattern, said)}

    assert figures == {"3.00 MiB", "4.00 MiB"}


def test_given_capacity_that_the_message_contradicts_is_said_to_be_unused():
    message = find_messages((SAMPLES / "capacity_oom.txt").read_text())

    notes = diagnose(Case(oom=message, overrides=Overrides(capacity_bytes=999 * GIB))).notes

    assert any("999.00 GiB, is not used" in note for note in notes)


def headline(name: str) -> str:
    diagnosis = diagnose(Case(snapshot=read_snapshot(SAMPLES / name)))
    assert diagnosis.verdict.cause is Cause.HEALTHY
    return render("analyze", "text", diagnosis, RenderOptions(100))


def test_healthy_run_is_offered_a_lower_peak_and_no_cure():
    said = headline("healthy_training.pickle.gz")

    assert "Cure" not in said
    assert "To lower the peak, if you want to:" in said.splitlines()[0]
    assert "peak live memory falls by" in said
    assert re.search(r"peak \S+ MiB lower", said)


def test_run_near_its_limit_is_offered_room_and_no_cure_that_gains_none():
    diagnosis = diagnose(Case(snapshot=read_snapshot(SAMPLES / "kvcache_retries.pickle.gz")))

    assert diagnosis.verdict.state is RunState.NEAR_LIMIT
    assert "Cure" not in render("analyze", "text", diagnosis, RenderOptions(100))
    # Each change that was replayed gains nothing here, so it is none of the advice.
    assert {advice.predicted.method for advice in diagnosis.rejected} == {"replay"}
    assert {advice.predicted.method for advice in diagnosis.recommendations} == {"none"}


@pytest.mark.parametrize(
    ("name", "shown"),
    [("caught_ooms", "600.00 MiB, when it failed"), ("capacity_oom", "2.93 GiB\n")],
)
def test_first_screen_is_about_the_failure_though_the_program_went_on(name, shown):
    diagnosis = diagnose(Case(snapshot=read_snapshot(SAMPLES / f"{name}.pickle")))

    said = render("analyze", "text", diagnosis, RenderOptions(80))

    assert "Who holds it  live when it failed" in said
    assert shown in said
    assert "live at the end" not in said


@pytest.mark.parametrize(
    ("file", "script"),
    [
        ("/home/me/infer.py", "infer.py"),
        (r"C:\work\my-run.py", "my-run.py"),
        ("/usr/lib/python3/site-packages/torch/run.py", "PROGRAM"),  # whose program it starts
        ("<frozen runpy>", "PROGRAM"),
        ("/tmp/ipykernel_34/3668832236.py", "PROGRAM"),  # a cell of a notebook
    ],
)
def test_recording_is_asked_for_by_the_name_of_the_script(file, script):
    text = (SAMPLES / "capacity_oom.txt").read_text()
    frames = (
        f'Traceback (most recent call last):\n  File "{file}", line 12, in <module>\n    main()\n'
    )

    said = render(
        "analyze", "text", diagnose(Case(oom=find_messages(frames + text))), RenderOptions()
    )

    assert f"record the run: fragdoctor run {script}" in " ".join(said.split())


def test_program_that_only_runs_a_model_is_shown_no_script_for_training():
    text = "It fails in inference.\n" + (SAMPLES / "capacity_oom.txt").read_text()

    said = render("analyze", "text", diagnose(Case(oom=find_messages(text))), RenderOptions())

    assert "Not tested. To test it, record the run." in said.replace("\n", " ")


def test_failures_of_a_log_are_counted_once():
    said = render("analyze", "text", diagnose(Case(oom=find_messages(SWEEP))), RenderOptions(80))

    assert "3 OOMs" in said
    assert "6 messages" not in said
    assert said.count("the verdict is about this one") == 1
