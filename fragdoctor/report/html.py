"""A document as one self-contained HTML file: no network, no framework, a strict policy.

Every string from an input is hostile. Text reaches the page only through ``markup``, which escapes
it. The policy names the file's own style and script by hash and allows nothing else, so even
markup that slipped through could not run or load anything. Charts are drawn from numbers only.
"""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Final

from markupsafe import Markup
from msgspec import Struct

from fragdoctor.report.base import RenderOptions
from fragdoctor.report.document import ReportDocument
from fragdoctor.report.html_blocks import EVERYTHING, blocks, content, section
from fragdoctor.report.markup import Child, ours, tag

ASSETS: Final = Path(__file__).parent / "assets"
FOOT: Final = (
    "Written by fragdoctor. This file is complete in itself: it loads nothing and sends nothing."
)


class Parts(Struct, frozen=True, kw_only=True):
    """What a kind of page adds to the frame that all pages share.

    Attributes:
        script: its script; without one the page works as it is.
        style: its style, on top of that of all reports.
        may_ask: whether the script may query the server that the page came from.
        has_menu: whether the bar at the top links to the sections.
        link: one more link in that menu.
        tools: what stands at the right of the bar.
        middle: what stands between the answer and the sections.
        end: what stands after the sections.
        data: what stands before the script.
    """

    script: str = ""
    style: str = ""
    may_ask: bool = False
    has_menu: bool = True
    link: Child = None
    tools: Child = None
    middle: Child = None
    end: Child = None
    foot: str = FOOT
    data: Child = None


def render(document: ReportDocument, options: RenderOptions) -> str:
    """Return the document as a page without any script; it always includes everything."""
    del options
    return page(document, Parts())


def page(document: ReportDocument, parts: Parts) -> str:
    """Return a document as a page of the kind that the parts make."""
    style = source("report.css") + parts.style
    script = tag("script", ours(parts.script)) if parts.script else None
    body = tag(
        "body",
        tag("a", "Skip to the answer", class_="skiplink", href="#answer"),
        _bar(document, parts),
        tag("main", _answer(document), parts.middle, _sections(document), parts.end, class_="wrap"),
        tag("footer", parts.foot, class_="wrap"),
        parts.data,
        script,
        class_=None if script else "no-js",
    )
    head = _head(document.title, style, policy(style, parts.script, may_ask=parts.may_ask))
    return f"<!DOCTYPE html>\n{tag('html', head, body, lang='en')}\n"


def _head(title: str, style: str, allowed: str) -> Markup:
    named = {
        "viewport": "width=device-width, initial-scale=1",
        "referrer": "no-referrer",
        "color-scheme": "light dark",
        "generator": "fragdoctor",
    }
    return tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=allowed),
        [tag("meta", name=name, content=said) for name, said in named.items()],
        tag("title", title, " \u2013 fragdoctor"),
        tag("link", rel="icon", href="data:,"),
        tag("style", ours(style)),
    )


def _bar(document: ReportDocument, parts: Parts) -> Markup:
    label = "Change between light and dark"
    theme = tag("button", "Theme", type="button", class_="quiet js", id="theme", aria_label=label)
    tools = tag(
        "div",
        parts.tools,
        theme if parts.script else None,
        [
            tag(
                "label",
                tag("input", type="checkbox", id=f"to-{name.lower()}"),
                f" {name}",
                class_=f"box to-{name.lower()}",
            )
            for name in ("Dark", "Light")
        ],
        class_="tools",
    )
    menu = _menu(document, parts.link) if parts.has_menu else tag("nav")
    mark = tag("span", "fragdoctor", class_="mark")
    return tag("header", tag("div", mark, menu, tools, class_="wrap bar"), class_="top")


def _menu(document: ReportDocument, link: Child) -> Markup:
    shown = [s for s in document.sections if s.only(EVERYTHING)]
    named = [(s.id, s.title) for s in shown if s.id and s.title and not s.is_folded]
    folded = [(s.id, "Details") for s in shown if s.is_folded][:1]
    links = [tag("a", title, href=f"#{name}") for name, title in (*named, *folded)]
    answer = tag("a", "Answer", href="#answer")
    return tag("nav", answer, link, links, aria_label="Sections")


def _answer(document: ReportDocument) -> Markup:
    figures = [
        tag(
            "div",
            tag("dt", one.name),
            tag("dd", one.value),
            tag("dd", one.note, class_="from") if one.note else None,
        )
        for one in document.figures
    ]
    said = tag(
        "div",
        tag("h1", content(document.headline)),
        tag("div", blocks(document.lead, document.title)),
        tag("dl", figures, class_="key-figures") if figures else None,
        class_="said",
    )
    kicker = tag("p", document.kicker, class_="over") if document.kicker else None
    tone = f"answer tone-{document.tone.value}" if document.tone else "answer"
    return tag("section", kicker, said, id="answer", class_=tone)


def _sections(document: ReportDocument) -> tuple[Child, Markup]:
    opened = [section(s) for s in document.sections if not s.is_folded]
    folded = [section(s) for s in document.sections if s.is_folded]
    return opened, tag("div", folded, class_="folds")


def policy(style: str, script: str = "", *, may_ask: bool = False) -> str:
    """Return the content security policy: allow this style and this script, by hash, nothing else.

    A page that may ask can also reach the server that it came from.
    """
    scripts = f"'{_hash(script)}'" if script else "'none'"
    asks = "connect-src 'self'; " if may_ask else ""
    return (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src {scripts}; "
        f"{asks}img-src data:; base-uri 'none'; form-action 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    )


def source(name: str) -> str:
    """Return one of our styles or scripts, such as ``page/main.js``."""
    return (ASSETS / name).read_text("utf-8")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode('ascii')}"
