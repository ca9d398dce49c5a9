"""The page that takes files, in a real browser: dropped, pasted, refused."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from served import served

from fragdoctor.cli.pages import Shown, opened
from fragdoctor.cli.view import Viewer
from fragdoctor.model.case import Overrides
from fragdoctor.report.page.page import render_drop_page

pytestmark = pytest.mark.slow
SAMPLES = Path(__file__).parents[2] / "sample_snapshots"


@pytest.fixture
def page(chromium):
    front = Shown(render_drop_page().encode())
    with served(Viewer(front, opener=partial(opened, Overrides()))) as server:
        shown = chromium.open(server.address)
        shown.until("!!window.fragdoctor")
        yield shown
        assert not [said for said in shown.complaints() if "400 (Bad Request)" not in said]
        shown.close()


def drop(page, name: str, data: bytes) -> None:
    page.evaluate(
        f"(() => {{ const d = new DataTransfer();"
        f"d.items.add(new File([new Uint8Array({list(data)})], {json.dumps(name)}));"
        "window.dispatchEvent(new DragEvent('drop', {dataTransfer: d, cancelable: true})); })()"
    )


def arrives(page, expression: str) -> None:
    """Wait for a page that the shown one leads to: what is asked while it changes is lost."""
    for _ in range(20):
        try:
            page.until(f"location.pathname.endsWith('/1/') && !!({expression})")
        except RuntimeError as e:
            assert "navigated" in str(e) or "context" in str(e), e  # noqa: PT017
        else:
            return


def test_dropped_snapshot_opens_in_the_explorer(page):
    drop(page, "small_holes_oom.pickle", (SAMPLES / "small_holes_oom.pickle").read_bytes())

    arrives(page, "document.querySelector('#explorer canvas')")


def test_pasted_message_is_diagnosed(page):
    text = json.dumps((SAMPLES / "fragmentation_oom.txt").read_text("utf-8"))
    page.evaluate(
        f"(() => {{ const d = new DataTransfer(); d.setData('text/plain', {text});"
        "window.dispatchEvent(new ClipboardEvent('paste', {clipboardData: d})); })()"
    )

    arrives(page, "document.querySelector('h1')")
    assert "500.00 MiB requested" in page.evaluate("document.querySelector('h1').textContent")


def test_refusal_is_said_on_the_page_and_may_be_hostile(page):
    drop(page, "<img src=x onerror=window.pwned=1>.pickle", bytes(50))

    page.until("document.getElementById('state').textContent.includes('is binary data')")
    assert page.evaluate("typeof window.pwned") == "undefined"
