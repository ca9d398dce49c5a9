"""One browser for all tests of the page; skipped where none is installed."""

from __future__ import annotations

import pytest

from browser.chromium import Chromium, find_chromium
from fragdoctor.report.base import RenderOptions, render


@pytest.fixture(scope="session")
def chromium(tmp_path_factory):
    program = find_chromium()
    if program is None:
        pytest.skip("no Chromium is installed")
    browser = Chromium(program, tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture
def open_page(chromium, tmp_path):
    """Return a function that renders a diagnosis and opens it."""
    opened = []

    def open_(diagnosis, **options):
        path = tmp_path / f"page-{len(opened)}.html"
        path.write_text(render("analyze", "html", diagnosis, RenderOptions()), "utf-8")
        page = chromium.page(path, **options)
        opened.append(page)
        return page

    yield open_
    for page in opened:
        page.evaluate("localStorage.clear()")
        page.close()
