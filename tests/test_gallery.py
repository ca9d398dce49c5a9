"""The gallery of the documentation says what fragdoctor says of its recordings."""

from __future__ import annotations

from types import SimpleNamespace

import docs_pages
import gallery
import pytest

from fragdoctor.rules.registry import RULES


@pytest.fixture(scope="module")
def shown() -> list[gallery.Shown]:
    return [*gallery.gallery()]


def test_pages_are_what_is_said_today_or_run_tools_gallery(shown):
    kept = {path.name: path.read_text("utf-8") for path in gallery.FOLDER.iterdir()}

    assert kept == gallery.texts(shown)


def test_gallery_has_twelve_kinds_and_each_its_cause_and_cure(shown):
    assert len({one.kind.name for one in shown}) == 12
    assert all(one.cause and one.cure for one in shown)


def test_pages_of_the_menu_are_those_of_its_folders():
    menu = docs_pages._menu([{"Rules": "rules/"}, {"Failures": "gallery/"}, "index.md"])

    rules, failures = menu[0]["Rules"], menu[1]["Failures"]
    assert rules == ["rules/index.md", *(f"rules/{rule.code}.md" for rule in RULES)]
    assert set(failures) == {f"gallery/{path.name}" for path in gallery.FOLDER.iterdir()}
    assert failures[0] == "gallery/index.md"
    assert menu[2] == "index.md"


@pytest.mark.parametrize(("url", "up", "files"), [("", "", ""), ("gallery/leak/", "../../", "../")])
def test_page_is_framed_and_rules_are_linked(url, up, files):
    page = SimpleNamespace(url=url, file=SimpleNamespace(src_uri=f"{url[:-5]}leak.md"))

    shown = docs_pages.on_page_markdown("`FD401` `FD000`\n<!-- page: leak -->\n", page)

    assert f'data-src="{up}gallery/leak.page.html"' in shown
    assert f"[`FD401`]({files}rules/FD401.md) `FD000`" in shown
    assert "<!--" not in shown
