from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import diagnoses
import numpy as np
import pytest
from msgspec.structs import replace
from page_blob import decode, decode_array
from page_samples import of_snapshot, tiny, tiny_diagnosis
from stock import from_python

from fragdoctor.diagnosis.pipeline import diagnose
from fragdoctor.inputs.snapshot_reader import read_snapshot
from fragdoctor.model.case import Case
from fragdoctor.model.diagnosis import Diagnosis
from fragdoctor.report.base import RenderOptions, render
from fragdoctor.report.page.page import MAX_PAGE_BYTES

HOSTILE = (
    "</script><script>window.pwned=1</script>",
    "<img src=x onerror=window.pwned=1>",
    "\"' onmouseover=window.pwned=1 x='",
    "{{ 7 * 7 }}{% include 'x' %}${window.pwned=1}",
    "--><!-- <![CDATA[ ]]> &lt;b&gt; &#60;",
    "javascript:window.pwned=1",
    "\u202egnp.exe\u2066\u200b\x1b[2J\x07\x00\r\n\ud800",
    "https://evil.example/x.png",
    "A" * 5000,
)
VOID = {"meta", "link", "br", "img", "input"}


class Reader(HTMLParser):
    """Reads a page strictly: tags must nest; keeps attributes and text."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.bodies: dict[str, list[str]] = {"script": [], "style": []}
        self.feed(page)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in self.bodies:
            self.bodies[self.open[-1]].append(data)
        else:
            self.text.append(data)

    @property
    def words(self) -> str:
        return " ".join("".join(self.text).split())


def render_html(diagnosis: Diagnosis) -> str:
    return render("analyze", "html", diagnosis, RenderOptions())


def payload_of(page: str):
    *payload, _ = Reader(page).bodies["script"]
    return decode(payload[0]) if payload else ({"devices": {}}, b"")


@pytest.mark.parametrize("name", diagnoses.ALL)
def test_page_of_each_kind_is_well_formed_and_names_the_verdict(name):
    diagnosis = diagnoses.ALL[name]()

    reader = Reader(render_html(diagnosis))

    assert diagnosis.verdict.summary in reader.words
    for item in diagnosis.checklist:
        assert (item.value or item.detail) in reader.words
    for recommendation in diagnosis.recommendations:
        assert recommendation.title in reader.words


def test_policy_names_the_pages_own_script_and_style_and_nothing_else():
    reader = Reader(render_html(tiny_diagnosis()))
    policy = next(a["content"] for t, a in reader.tags if t == "meta" and "http-equiv" in a)
    own = [
        "sha256-" + base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
        for body in (reader.bodies["style"][0], reader.bodies["script"][-1])
    ]

    assert own == re.findall(r"'(sha256-[^']+)'", policy)
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    assert "http" not in policy
    assert "require-trusted-types-for 'script'; trusted-types 'none'" in policy


def test_page_refers_to_nothing_outside_itself():
    reader = Reader(render_html(tiny_diagnosis()))

    for tag, attributes in reader.tags:
        for name in ("src", "href", "action", "data", "poster", "srcset", "background"):
            value = attributes.get(name) or "#"
            assert value.startswith(("#", "data:")), f"<{tag} {name}={value}>"
    assert "url(" not in reader.bodies["style"][0]
    assert "@import" not in reader.bodies["style"][0]


def everything(text: str) -> Diagnosis:
    """Return a diagnosis with every part, in which every free text is the one given."""
    real = of_snapshot(from_python(tiny(text.replace("\ud800", ""))))
    words = replace(real, case=diagnoses.fragmentation().case, analyses={})
    # Whose a frame is depends on its path, so a stack may differ in length.
    stranders = [replace(p, stack=()) for p in words.stranders]
    holders = [replace(h, stack=()) for h in words.holders]
    hostile = diagnoses.planted(replace(words, stranders=stranders, holders=holders), text)
    case = replace(hostile.case, snapshot=real.case.snapshot)
    return replace(hostile, case=case, analyses=real.analyses)


@pytest.mark.parametrize("text", HOSTILE)
def test_page_with_hostile_text_in_every_field_has_the_same_markup_as_with_plain_text(text):
    plain = Reader(render_html(everything("plain")))

    page = render_html(everything(text))

    hostile = Reader(page)
    assert [t for t, _ in plain.tags] == [t for t, _ in hostile.tags]
    assert [a.keys() for _, a in plain.tags] == [a.keys() for _, a in hostile.tags]
    assert not [n for _, a in hostile.tags for n in a if n.startswith("on") or n == "style"]
    unseen = "[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u200b\ud800]"
    assert not re.search(unseen, page)
    assert plain.bodies["script"][1] == hostile.bodies["script"][1]
    assert len(page) < 600_000


def test_hostile_text_is_shown_as_it_is_written():
    diagnosis = diagnoses.fragmentation()
    text = "<b>{{ 7 * 7 }}</b>\u202e"
    diagnosis = replace(diagnosis, verdict=replace(diagnosis.verdict, summary=text))

    assert "<b>{{ 7 * 7 }}</b>\\u202e" in Reader(render_html(diagnosis)).words


def curves_of(data, body):
    """Return the curves of a device as the page draws them: stored, or summed from its blocks."""
    if data["timeline"]["allocated"]:
        return {
            name: decode_array(body, data["timeline"][name])
            for name in ("allocated", "active", "reserved")
        }
    assert data["lives"]["complete"]
    n_states = data["timeline"]["n_events"] + 1

    def total(part, first, last):
        change = np.zeros(n_states + 2, np.int64)
        np.add.at(change, first, decode_array(body, part["size"]))
        np.subtract.at(change, last, decode_array(body, part["size"]))
        return np.cumsum(change)[:n_states]

    lives, segments = data["lives"], data["lives"]["segments"]
    born = decode_array(body, lives["born"])
    freed = born + decode_array(body, lives["kept"])
    came = decode_array(body, segments["born"])
    return {
        "allocated": total(lives, born, freed),
        "active": total(lives, born, freed + decode_array(body, lives["waited"])),
        "reserved": total(segments, came, came + decode_array(body, segments["kept"])),
    }


def test_payload_holds_the_figures_of_the_columns():
    diagnosis = tiny_diagnosis()
    analysis = diagnosis.analyses[0]

    head, body = payload_of(render_html(diagnosis))

    data = head["devices"]["0"]
    assert data["timeline"]["bucket"] == 1
    for name, curve in curves_of(data, body).items():
        expected = getattr(analysis.timeline, f"{name}_bytes")
        np.testing.assert_array_equal(expected, curve)
    sizes = decode_array(body, head["devices"]["0"]["map"]["size"])
    np.testing.assert_array_equal(diagnosis.case.snapshot.blocks.size_bytes, sizes)
    assert analysis.timeline.peak_allocated_bytes == head["devices"]["0"]["icicle"]["peak"]["total"]


@pytest.mark.shared
def test_payload_of_each_recording_keeps_peaks_and_totals(shared):
    for folder in sorted((shared / "snapshots").iterdir()):
        if not folder.is_dir():
            continue
        diagnosis = of_snapshot(read_snapshot(folder / "snapshot.pickle"))

        page = render_html(diagnosis)

        assert len(page.encode()) < MAX_PAGE_BYTES, folder.name
        head, body = payload_of(page)
        for figures in diagnosis.devices:
            data = head["devices"][str(figures.device)]
            if data["timeline"]:
                curves = curves_of(data, body)
                assert figures.peak_allocated_bytes == curves["allocated"].max(), folder.name
                assert figures.peak_reserved_bytes == curves["reserved"].max(), folder.name
            if data["map"]:
                total = decode_array(body, data["map"]["total"]).sum()
                assert figures.reserved_bytes == total, folder.name
            held = (
                data["icicle"]["end"]["total"] if data["icicle"] and "end" in data["icicle"] else 0
            )
            assert figures.allocated_bytes == held, folder.name
            if data["icicle"] and "peak" in data["icicle"]:
                assert figures.peak_allocated_bytes == data["icicle"]["peak"]["total"], folder.name


def test_page_without_snapshot_says_what_one_would_add():
    reader = Reader(render_html(diagnoses.capacity()))

    assert "fragdoctor run" in reader.words
    assert "timeline-graphic" not in {a.get("id") for _, a in reader.tags}


def test_page_of_a_snapshot_without_trace_or_segments_is_whole():
    diagnosis: Diagnosis = of_snapshot(from_python({"segments": [], "device_traces": []}))

    reader = Reader(render_html(diagnosis))

    assert "timeline-graphic" not in {a.get("id") for _, a in reader.tags}
    assert len(reader.bodies["script"]) == 1  # the program, without data


def test_page_of_two_devices_offers_both_and_starts_with_the_verdicts():
    one, two = tiny(), tiny(device=1)
    both = {**one, "segments": one["segments"] + two["segments"]}
    both["device_traces"] = [one["device_traces"][0], two["device_traces"][1]]
    diagnosis = of_snapshot(from_python(both))
    diagnosis = replace(diagnosis, verdict=replace(diagnosis.verdict, device=1))

    page = render_html(diagnosis)

    head, _ = payload_of(page)
    assert sorted(head["devices"]) == ["0", "1"]
    assert head["device"] == "1"
    assert page.index('id="memory-1"') < page.index('id="memory-0"')


@pytest.mark.parametrize(
    "added", ["", "formatSize(1).nothing();"], ids=["as it is", "with a fault"]
)
def test_scripts_pass_the_type_check(tmp_path, added):
    root = Path(__file__).parents[2]
    own = root / "node_modules" / ".bin" / "tsc"
    compiler = str(own) if own.exists() else shutil.which("tsc")
    if compiler is None:
        pytest.skip("TypeScript is not installed: npm ci brings it")
    scripts = root / "fragdoctor" / "report" / "assets" / "page"
    project = tmp_path / "tsconfig.json"
    fault = tmp_path / "fault.js"
    fault.write_text(added)
    project.write_text(
        json.dumps(
            {"extends": str(root / "tsconfig.json"), "include": [f"{scripts}/*", str(fault)]}
        )
    )

    checked = subprocess.run(
        [compiler, "--project", str(project)], capture_output=True, text=True, check=False
    )

    assert (checked.returncode == 0) is (not added), checked.stdout
    if added:
        assert "'nothing' does not exist" in checked.stdout


def test_recording_of_nothing_has_no_explorer_to_be_empty(samples: Path) -> None:
    def page(name: str) -> str:
        told = diagnose(Case(snapshot=read_snapshot(samples / name)))
        return render("analyze", "html", told, RenderOptions())

    assert 'id="explorer"' in page("capacity_oom.pickle")
    assert 'id="explorer"' not in page("empty.pickle")
    assert "could not be drawn" not in page("empty.pickle")
