"""Pages of the documentation that the package itself knows: commands, rules and the glossary.

``mkdocs build`` calls ``on_files`` and gets a page a command and a page a rule. Run as a program
this writes ``docs/glossary.md``, which is kept in the repository so that it can be read there.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

from fragdoctor.cli.commands import whole_group
from fragdoctor.report.base import RenderOptions, render
from fragdoctor.report.views.explain import THEMES, find
from fragdoctor.rules.registry import RULES

GLOSSARY = Path(__file__).resolve().parents[1] / "docs" / "glossary.md"


def glossary() -> str:
    """Return the glossary of ``fragdoctor explain TERM``."""
    return files("fragdoctor.report").joinpath("glossary.md").read_text("utf-8")


def command_pages() -> dict[str, str]:
    """Return a page for each command, with its help, and their list."""
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
    """Return a page for each rule, from its docstring, and their list by theme."""
    pages, lines = {}, ["# Rules"]
    for rule in RULES:
        text = render("explain", "markdown", find(rule.code), RenderOptions())
        pages[f"rules/{rule.code}.md"] = text
    for prefix, theme in THEMES.items():
        lines += ["", f"## {theme}", ""]
        lines += [
            f"- [{rule.code} {rule.name}]({rule.code}.md): {rule.summary}"
            for rule in RULES
            if rule.code.startswith(prefix)
        ]
    return {**pages, "rules/index.md": "\n".join(lines) + "\n"}


def on_files(found: Any, config: Any) -> Any:
    """Add the pages to those in ``docs/``; called by mkdocs."""
    from mkdocs.structure.files import File

    for path, text in {**command_pages(), **rule_pages()}.items():
        found.append(File.generated(config, path, content=text))
    return found


if __name__ == "__main__":
    GLOSSARY.write_text(glossary(), encoding="utf-8")
