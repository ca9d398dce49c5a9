"""The elements that the page's scripts fill: the explorer, its switch, the place to drop files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from markupsafe import Markup

from fragdoctor.report.markup import Child, tag

WITHOUT_GRAPHICS: Final = (
    tag(
        "noscript",
        tag(
            "p",
            "The graphics need JavaScript; every figure is in the tables as well.",
            class_="none",
        ),
    ),
    tag(
        "p",
        "The graphics could not be drawn in this browser; every figure is in the tables as well.",
        class_="none",
        id="trouble",
        hidden=True,
    ),
)
"""What is said where no script runs."""


def explorer(graphics: Mapping[str, str]) -> Markup:
    """Return the place of all graphics; ``graphics`` says for each what stands there without it."""

    def graphic(name: str) -> Child:
        return (
            tag("div", class_="graphic", id=f"{name}-graphic", hidden=True),
            tag("p", graphics[name], class_="none", id=f"{name}-none", hidden=True),
        )

    def titled(title: str, name: str, note: str = "") -> Child:
        unit = [" ", tag("span", note, class_="unit")] if note else None
        return [tag("h3", title, unit), graphic(name)]

    unit = tag("span", class_="unit", id="timeline-unit")
    controls = tag(
        "div", class_="controls", id="explorer-bar", role="group", aria_label="Explorer controls"
    )
    panel = tag(
        "aside",
        class_="panel",
        id="explorer-panel",
        aria_label="What is held, and the chosen block",
    )
    note = "the same requests replayed under other settings"
    return tag(
        "section",
        tag("div", tag("h2", "Explorer ", unit), controls, class_="head"),
        tag("div", tag("div", graphic("timeline")), panel, class_="stage"),
        titled("What if", "whatif", note) if "whatif" in graphics else None,
        tag(
            "div",
            tag("div", titled("Segments", "map")),
            tag("div", titled("Events", "events")),
            class_="stage",
        ),
        titled("Who holds it", "icicle"),
        titled("Blocks", "blocks"),
        id="explorer",
        class_="explorer",
    )


def device_switch(labels: Mapping[str, str]) -> Markup:
    """Return the buttons that choose what the explorer shows."""
    buttons = [
        tag("button", label, type="button", data_show=key, aria_pressed="false")
        for key, label in labels.items()
    ]
    return tag(
        "div", buttons, class_="switch js", id="devices", role="group", aria_label="What is shown"
    )


def drop_area() -> Markup:
    """Return the place that takes files and pasted messages."""
    files = tag("input", type="file", id="files", multiple=True, hidden=True)
    return tag(
        "section",
        tag("p", tag("strong", "Drop files here"), ", or paste a message."),
        tag("p", tag("button", "Choose files", type="button", id="choose"), files),
        tag("p", id="state", class_="none", role="status"),
        id="drop",
        class_="drop",
        tabindex=0,
        aria_label="Drop files here",
    )
