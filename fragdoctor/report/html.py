"""The report as one HTML file that needs nothing else: no network, no framework, strict policy.

Every string of the input is hostile. Text in the markup passes through ``escape.visible`` and
Jinja2's autoescape; what the graphics show travels in a compressed blob and reaches the page as
text nodes and canvas text only. The policy names the page's own style and script by hash and
allows nothing else, so markup that slipped through could still not run or load anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import jinja2
from markupsafe import Markup

from fragdoctor.analysis.device import analyze_device
from fragdoctor.analysis.result import DeviceAnalysis
from fragdoctor.errors import ConfigError
from fragdoctor.model.diagnosis import Diagnosis
from fragdoctor.model.simulation import Simulation
from fragdoctor.model.snapshot import Snapshot
from fragdoctor.report import phase_words, phrases
from fragdoctor.report.base import RenderOptions
from fragdoctor.report.page.capture_facts import capture_facts, setting_facts
from fragdoctor.report.page.payload import build_payload
from fragdoctor.report.page.shell import page_environment, page_policy, page_source
from fragdoctor.report.page.story_view import story_view
from fragdoctor.report.page.text_tables import CodeOwners
from fragdoctor.report.page.view import (
    MAX_ROWS,
    STATUS_WORDS,
    device_views,
    message_views,
    stack_line,
)
from fragdoctor.report.page.what_if import what_ifs
from fragdoctor.units import format_count, format_share, format_size

MAX_PAGE_BYTES: Final = 3_000_000
MAX_DEVICES: Final = 64
SCRIPTS: Final = (
    "decode",
    "drawing",
    "envelope",
    "timeline",
    "timeline_painting",
    "segment_map",
    "icicle",
    "main",
)


def render_diagnosis(diagnosis: Diagnosis, options: RenderOptions) -> str:
    """Return the page; the options are those of text and change nothing here."""
    del options
    return render_html(diagnosis)


def render_html(
    diagnosis: Diagnosis,
    simulation: Simulation | None = None,
    analyses: Mapping[int, DeviceAnalysis] | None = None,
) -> str:
    """Return the whole page, below 3 MB: the graphics are made coarser until it is.

    Args:
        diagnosis: what to show.
        simulation: further what-ifs for the table.
        analyses: of the snapshot's devices, where the caller has them; computed otherwise.
    """
    if analyses is None:
        analyses = _analyses(diagnosis.case.snapshot)
    template = _environment().get_template("report.html.j2")
    values = _values(diagnosis, simulation, analyses)
    snapshot = diagnosis.case.snapshot
    owners = None if snapshot is None else CodeOwners.of(snapshot)
    page = ""
    for scale in (1.0, 0.5, 0.2, 0.05):
        values["payload"] = build_payload(diagnosis, analyses, owners, scale)
        values["views"] = device_views(diagnosis, analyses, max(3, int(MAX_ROWS * scale)))
        page = template.render(values)
        if len(page.encode()) <= MAX_PAGE_BYTES:
            return page
    raise ConfigError(
        f"The page would be {format_size(len(page.encode()))}, above its limit of 3 MB.",
        hint="Choose one device with --device, or take --format json.",
    )


def _analyses(snapshot: Snapshot | None) -> dict[int, DeviceAnalysis]:
    if snapshot is None:
        return {}
    return {d: analyze_device(snapshot, d) for d in snapshot.devices[:MAX_DEVICES]}


def _values(
    diagnosis: Diagnosis,
    simulation: Simulation | None,
    analyses: Mapping[int, DeviceAnalysis],
) -> dict[str, Any]:
    style = page_source("report/report.css")
    script = "\n".join(page_source(f"report/{name}.js") for name in SCRIPTS)
    verdicts = [f for f in diagnosis.devices if f.device == diagnosis.verdict.device]
    figures = next(iter((*verdicts, *diagnosis.devices)), None)
    return {
        "style": Markup(style),  # noqa: S704 - our own file
        "script": Markup(script),  # noqa: S704 - our own file
        "policy": page_policy(style, script),
        "d": diagnosis,
        "has_snapshot": diagnosis.case.snapshot is not None,
        "title": phrases.CAUSE_TITLES[diagnosis.verdict.cause],
        "causes": phrases.CAUSE_TITLES,
        "status_words": STATUS_WORDS,
        "phase_names": phase_words.PHASE_NAMES,
        "category_names": phase_words.CATEGORY_NAMES,
        "kept_means": phase_words.KEPT_MEANS,
        "sources": ["standard input" if s == "-" else s for s in diagnosis.case.sources],
        "messages": message_views(diagnosis),
        "markers": () if diagnosis.case.oom is None else diagnosis.case.oom.markers[:20],
        "story": story_view(diagnosis),
        "what_ifs": what_ifs(diagnosis, simulation, figures),
        "settings": setting_facts(diagnosis),
        "facts": capture_facts(diagnosis, analyses),
    }


def _environment() -> jinja2.Environment:
    environment = page_environment()
    environment.filters |= {
        "size": format_size,
        "count": format_count,
        "share": format_share,
        "location": phrases.location_text,
        "stack_line": stack_line,
        "evidence_value": phrases.evidence_value,
        "predicted": phrases.predicted_text,
        "fidelity": phrases.fidelity_text,
        "sureness": phase_words.sureness,
        "main_line": phase_words.main_line,
        "peak_sentence": phase_words.peak_sentence,
        "passes": phase_words.passes_text,
        "limits_sentence": phase_words.limits_sentence,
    }
    return environment
