"""Commands for typer: their help in groups, their formats, and how they are loaded."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any, Final, cast

import typer
from typer.core import TyperCommand, TyperGroup

from fragdoctor.cli.exit import say
from fragdoctor.cli.front_page import COMMANDS, FRONT_PAGE, Command
from fragdoctor.cli.options import GENERAL, HEADINGS, command_taking
from fragdoctor.errors import ConfigError

FORMATS_OF_SUFFIXES: Final = (
    (".html", "html"),
    (".htm", "html"),
    (".speedscope.json", "speedscope"),
    (".json", "json"),
    (".json", "trace"),
    (".md", "markdown"),
    (".txt", "text"),
    (".sarif", "sarif"),
    (".xml", "junit"),
    (".csv", "csv"),
    (".pickle", "snapshot"),
)
"""File name suffix -> format; the first match that the command supports counts."""


# typer has its own copy of click, older versions use the package: get the base through typer.
_UsageError: Final = cast("type[Exception]", typer.BadParameter.__mro__[1])

_NEAR: Final = 0.75
"""How alike a slip of the fingers and the option are; --batch-size and --batch are less alike."""

USUAL: Final = {"estimate": {"--lora": "16"}}
"""Command -> option -> the number that it has if none follows it."""


class _Group(TyperGroup):
    """The command ``fragdoctor`` itself, whose help is the front page."""

    def get_help(self, ctx: Any) -> str:  # noqa: ARG002 - typer's signature
        """Return the front page."""
        return FRONT_PAGE.rstrip("\n")


class _Command(TyperCommand):
    """A command that derives the format from its report's name, and says what it wrote."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Leave options that follow another program's command to that command."""
        if self.name == "rehearse":
            from fragdoctor.rehearsal.programs import takes_options

            first = self._first_word(args)
            if first < len(args) and takes_options(args[first]):
                args = [*args[:first], "--", *args[first:]]
        for option, usual in USUAL.get(self.name or "", {}).items():
            for i in [i for i, word in enumerate(args) if word == option][::-1]:
                if not args[i + 1 : i + 2] or not args[i + 1][:1].isdigit():
                    args = [*args[: i + 1], usual, *args[i + 1 :]]
        try:
            return super().parse_args(ctx, [*args])  # it takes them out
        except _UsageError as e:
            error: Any = e
            error.ctx = error.ctx or ctx
            if type(e).__name__ == "NoSuchOption":
                error.said = self._elsewhere(error, args)
            raise

    def _elsewhere(self, error: Any, args: list[str]) -> str:
        """Say what an unknown option is besides: another way to write one, or another command's."""
        words = [word for word in args if word.startswith(error.option_name)]
        option = words[0].partition("=")[0] if words else error.option_name
        error.option_name, error.message = option, f"No such option: {option}"
        error.possibilities = ()
        value = option.removeprefix("--")
        for known in self.params:
            if value in getattr(known.type, "choices", ()):
                return f"Write {known.opts[0]} {value}."
            if f"-{option}" in known.opts:
                return f"Write -{option}."
        commands = whole_group().commands.items()
        others = [name for name, c in commands if any(option in p.opts for p in c.params)]
        own = [name for known in self.params for name in known.opts if name.startswith("--")]
        if not others and (near := get_close_matches(option, own, n=1, cutoff=_NEAR)):
            return f"Did you mean {near[0]}?"
        more = " and others" if len(others) > 3 else ""
        return f"{option} is an option of {', '.join(others[:3])}{more}." if others else ""

    def _first_word(self, args: list[str]) -> int:
        """Return the index of the first word that is neither an option nor its value."""
        options: list[Any] = [p for p in self.params if p.param_type_name == "option"]
        valued = {name for option in options if not option.is_flag for name in option.opts}
        first = 0
        while first < len(args) and args[first].startswith("-"):
            first += 2 if args[first] in valued else 1
        return first

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, then the options in groups."""
        arguments = [p for p in self.params if p.param_type_name == "argument"]
        options: list[Any] = [p for p in self.get_params(ctx) if p not in arguments]
        for option in options:
            if isinstance(option.default, int) and not option.default:  # 0 means unset
                option.show_default = False
        groups = [(heading, [o for o in options if _heading(o) == heading]) for heading in HEADINGS]
        for heading, group in (("Arguments", arguments), *groups):
            records = [record for p in group if (record := p.get_help_record(ctx)) is not None]
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)

    def invoke(self, ctx: Any) -> Any:
        """Run the command; return its exit code."""
        given = ctx.get_parameter_source("output_format")
        if given is not None and given.name != "COMMANDLINE":
            self._format_from_name(ctx, is_chosen=given.name != "DEFAULT")
        code = super().invoke(ctx)
        if "output_format" in ctx.params and not ctx.params.get("quiet"):
            written = [(ctx.params["output_format"], ctx.params.get("output"))]
            written += [
                (r.partition("=")[0], r.partition("=")[2]) for r in ctx.params.get("report") or ()
            ]
            for form, name in written:
                if name is not None and os.path.isfile(name):  # noqa: PTH113 - never raises
                    say(f"Wrote {name} ({form})")
        return code

    def _format_from_name(self, ctx: Any, *, is_chosen: bool) -> None:
        output = Path(str(ctx.params.get("output") or ""))
        option: Any = next(p for p in self.params if p.name == "output_format")
        known = [(s, name) for s, name in FORMATS_OF_SUFFIXES if name in option.type.choices]
        named = [name for suffix, name in known if output.name.lower().endswith(suffix)]
        if named:
            ctx.params["output_format"] = named[0]
        elif output.suffix and not is_chosen:
            suffixes = dict.fromkeys(suffix for suffix, _ in known)
            raise ConfigError(
                f"fragdoctor {self.name} writes no {output.suffix} files.",
                hint=f"Name the file {', '.join(suffixes)}, or choose with --format: "
                f"{', '.join(option.type.choices)}.",
            )


def _heading(option: Any) -> str:
    """Return an option's heading in the help; typer's own ``--help`` has none."""
    if "--help" in option.opts:
        return GENERAL
    return getattr(option, "rich_help_panel", None) or HEADINGS[0]


def add(app: typer.Typer, command: Command) -> None:
    """Load a command and add it: the function in its module with the command's name.

    The function takes a class of options, unless the module has a ready ``command``.
    """
    name = command.name.replace("-", "_")
    module = import_module(f"fragdoctor.cli.{name}")
    call: Callable[..., int] = vars(module).get("command") or command_taking(vars(module)[name])
    app.command(
        command.name,
        cls=_Command,
        help=command.text,
        epilog=f"\b\nExamples:\n  {command.example}\n  {command.other_example}{command.note}",
        context_settings={"allow_interspersed_args": command.may_mix_options},
    )(call)


def group_of(names: Collection[str]) -> Any:
    """Return the command ``fragdoctor`` with some of its commands, loading no others."""
    app = typer.Typer(
        name="fragdoctor",
        cls=_Group,
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )
    for command in COMMANDS:
        if command.name in names:
            add(app, command)
    app.callback()(_root)
    return typer.main.get_command(app)


def whole_group() -> Any:
    """Return the command ``fragdoctor`` with all of its commands."""
    return group_of([command.name for command in COMMANDS])


def _root() -> None:
    """Keep commands under one name even when there is only one."""
