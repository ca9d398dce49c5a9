"""Pages of the documentation made from other sources: commands, rules, terms, notebook, changes.

This gives ``mkdocs build`` a page for each command, rule and term from the package, the notebook
with its outputs, the changes by version, links to these, their places in the menu, and the
gallery's interactive pages. Run as a program, this writes ``docs/glossary.md``, which is kept in
the repository so that people can read it there.
"""

from __future__ import annotations

import json
import re
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from gallery import KINDS, gallery

from fragdoctor.cli.commands import whole_group
from fragdoctor.report.base import RenderOptions, render
from fragdoctor.report.views.explain import THEMES, GlossaryTerm, find, terms
from fragdoctor.rules.registry import RULES

ROOT: Final = Path(__file__).resolve().parents[1]
GLOSSARY: Final = ROOT / "docs" / "glossary.md"
_RULE: Final = re.compile(rf"`({'|'.join(rule.code for rule in RULES)})`")
_HEADING: Final = re.compile(r"^##(?=#* )", re.MULTILINE)
_SCREEN: Final = re.compile(r"<!-- page: ([a-z-]+) -->")


def glossary() -> str:
    """Return the glossary of ``fragdoctor explain TERM``."""
    return files("fragdoctor.report").joinpath("glossary.md").read_text("utf-8")


def command_pages() -> dict[str, str]:
    """Return a page with the help of each command, and a page that lists the commands."""
    group = whole_group()
    pages, rows = {}, []
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        context = command.make_context(
            f"fragdoctor {name}", [], resilient_parsing=True, terminal_width=100
        )
        shown = command.get_help(context).rstrip()
        pages[f"commands/{name}.md"] = f"# fragdoctor {name}\n\n```text\n{shown}\n```\n"
        rows.append(f"- [`fragdoctor {name}`]({name}.md): {command.help}")
    pages["commands/index.md"] = "# Commands\n\n" + "\n".join(rows) + "\n"
    return pages


def rule_pages() -> dict[str, str]:
    """Return a page from each rule's docstring, and a page that lists the rules by theme."""
    pages, lines = {}, ["# Rules"]
    for rule in RULES:
        text = render("explain", "markdown", find(rule.code), RenderOptions())
        # A page starts with a top-level heading.
        pages[f"rules/{rule.code}.md"] = _HEADING.sub("#", text)
    for prefix, theme in THEMES.items():
        lines += ["", f"## {theme}", ""]
        lines += [
            f"- [{rule.code} {rule.name}]({rule.code}.md): {rule.summary}"
            for rule in RULES
            if rule.code.startswith(prefix)
        ]
    return {**pages, "rules/index.md": "\n".join(lines) + "\n"}


def term_pages() -> dict[str, str]:
    """Return a page for each term in the glossary, and a page that lists the terms."""
    pages = {}
    for term in terms():
        also = [f"Also: {', '.join(term.also)}."] if term.also else []
        see = [f"See: {', '.join(_linked(name) for name in term.see)}."] if term.see else []
        paragraphs = [f"# {term.name}", f"**{term.short}**", term.text, *also, *see]
        pages[f"terms/{_slug(term)}.md"] = "\n\n".join(filter(None, paragraphs)) + "\n"
    rows = [
        f"- [{term.name}]({_slug(term)}.md): {term.short}"
        for term in sorted(terms(), key=lambda term: term.name.lower())
    ]
    listed = [glossary().split("\n## ")[0].strip(), "\n".join(rows)]
    return {"terms/index.md": "\n\n".join(listed) + "\n", **{p: pages[p] for p in sorted(pages)}}


def _slug(term: GlossaryTerm) -> str:
    return re.sub(r"\W+", "-", term.name.lower())


def _linked(name: str) -> str:
    (term,) = find(name).terms
    return f"[{name}]({_slug(term)}.md)"


def notebook_page() -> str:
    """Return the notebook as a page with its texts, its code, and the outputs of its cells."""
    notebook = json.loads((ROOT / "docs" / "notebook.ipynb").read_text("utf-8"))
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else _fenced(source, "python"))
        parts += [_shown(output) for output in cell.get("outputs", ())]
    return "\n\n".join(parts) + "\n"


def _fenced(text: str, language: str) -> str:
    return f"```{language}\n{text.rstrip()}\n```"


def _shown(output: dict[str, Any]) -> str:
    data = output.get("data", {})
    if "text/html" in data:
        # A blank line would end the HTML.
        in_one_line = re.sub(r"\s*\n\s*", " ", "".join(data["text/html"]))
        return f'<div class="output">{in_one_line}</div>'
    return _fenced("".join(output.get("text") or data["text/plain"]), "text")


def versions_page(repository: str) -> str:
    """Return the changes in each version, with a link to the releases if one is known."""
    changes = (ROOT / "CHANGELOG.md").read_text("utf-8").replace("](docs/", "](")
    if not repository:
        return changes
    place = f"[All versions and their files]({repository.rstrip('/')}/releases)"
    return changes.replace("# Changelog\n", f"# Changelog\n\n{place}\n", 1)


@cache
def _made() -> dict[str, str]:
    return {**command_pages(), **rule_pages(), **term_pages(), "notebook.md": notebook_page()}


def _menu(entries: Any) -> Any:
    """Return the menu's entries with each folder (``commands/``) replaced by its list of pages."""
    if isinstance(entries, list):
        return [_menu(entry) for entry in entries]
    if isinstance(entries, dict):
        return {name: _menu(entry) for name, entry in entries.items()}
    if not entries.endswith("/"):
        return entries
    written = ("gallery/index.md", *(f"gallery/{kind.name}.md" for kind in KINDS))
    pages = [page for page in (*_made(), *written) if page.startswith(entries)]
    return sorted(pages, key=lambda page: not page.endswith("/index.md"))


def on_config(config: Any) -> Any:
    """Fill the menu; called by mkdocs."""
    config["nav"] = _menu(config["nav"])
    return config


def on_files(found: Any, config: Any) -> Any:
    """Add the generated pages to those in ``docs/``; called by mkdocs."""
    from mkdocs.structure.files import File

    screens = {f"gallery/{one.kind.name}.page.html": one.page for one in gallery()}
    versions = {"versions.md": versions_page(config["repo_url"] or "")}
    for path, text in {**_made(), **versions, **screens}.items():
        found.append(File.generated(config, path, content=text))
    return found


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Embed the interactive pages that a page asks for, and link rules; called by mkdocs."""
    up = "../" * page.url.count("/")

    def frame(match: re.Match[str]) -> str:
        place = f"{up}gallery/{match[1]}.page.html"
        return (
            f'<iframe class="sample" data-src="{place}" title="The page of fragdoctor" '
            'loading="lazy"></iframe>\n\n'
            f'<a href="{place}">Open it alone</a>: one file, which loads and sends nothing.'
        )

    up_files = "../" * page.file.src_uri.count("/")
    markdown = markdown.replace("](notebook.ipynb)", "](notebook.md)")
    linked = _RULE.sub(lambda m: f"[{m[0]}]({up_files}rules/{m[1]}.md)", markdown)
    return _SCREEN.sub(frame, linked)


if __name__ == "__main__":
    GLOSSARY.write_text(glossary(), encoding="utf-8")
