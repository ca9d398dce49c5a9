"""Parameters of commands: dataclasses whose fields are declared as options, flags and arguments.

An option is named after its field (``max_peak``: ``--max-peak``), unless the declaration names it.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Final,
    Literal,
    NamedTuple,
    TypeVar,
    dataclass_transform,
    get_type_hints,
)

from fragdoctor.cli.exit import FINDINGS, OK
from fragdoctor.errors import ConfigError
from fragdoctor.model.finding import Finding, Severity
from fragdoctor.report.base import DocumentFormat, ReportFormat
from fragdoctor.units import Amount, parse_amount, parse_size

if TYPE_CHECKING:
    from fragdoctor.model.case import Overrides

_Options = TypeVar("_Options")
DECLARED: Final = "declared"

INPUT: Final = "Input"
PROGRAM: Final = "The program"
CURE: Final = "Cure"
TRAINING: Final = "Training"
SEVERAL_GPUS: Final = "Several GPUs"
INFERENCE: Final = "Inference"
SHAPE: Final = "A model without a config.json"
REHEARSAL: Final = "A rehearsal in place of formulas"
SEVERAL_RANKS: Final = "Several ranks"
GATE: Final = "Gate"
OUTPUT: Final = "Output"
GENERAL: Final = "General"
HEADINGS: Final = (
    *("Options", SHAPE, TRAINING, SEVERAL_GPUS, INFERENCE, REHEARSAL),
    *(PROGRAM, CURE, INPUT, SEVERAL_RANKS, GATE, OUTPUT, GENERAL),
)
"""Headings of options in a command's help; the first is for options without a group."""


class Declared(NamedTuple):
    """A parameter: the spellings of an option, or None for an argument; ``...`` is no default."""

    names: tuple[str, ...] | None
    default: Any
    more: Mapping[str, Any]

    def made(self, field_name: str) -> Any:
        """Return the parameter in typer's form; the name of its field names the option."""
        import typer  # not before: a command line without options does not need it

        if self.names is None:
            return typer.Argument(**self.more)
        return typer.Option(*(self.names or (f"--{field_name.replace('_', '-')}",)), **self.more)


def option(
    metavar: str | None, text: str, *names: str, default: Any = None, group: str = "", **more: Any
) -> Any:
    """Declare an option that takes a value; ``metavar`` is None if the type says enough.

    Args:
        metavar: the kind of value, in capitals, which also says how it is read (``_PARSERS``).
        text: its line of help.
        names: its spellings, if not the name of its field.
        default: the value if the option is not given.
        group: its heading in the help.
        more: further arguments of ``typer.Option``.
    """
    if metavar in _PARSERS:
        more.setdefault("parser", _PARSERS[metavar])
    more |= {"metavar": metavar, "help": text, "rich_help_panel": group or None}
    return Declared(names, default, more)


def flag(text: str, *names: str, group: str = "") -> Any:
    """Declare a flag; arguments as for :func:`option`."""
    return option(None, text, *names, default=False, group=group)


def under(heading: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return :func:`option` and :func:`flag` for options under a heading of the help."""
    return partial(option, group=heading), partial(flag, group=heading)


def argument(metavar: str, text: str, *, default: Any = ..., **more: Any) -> Any:
    """Declare an argument; arguments as for :func:`option`."""
    return Declared(None, default, more | {"metavar": metavar, "help": text})


@dataclass_transform(frozen_default=True, kw_only_default=True)
def taken(kind: type[_Options]) -> type[_Options]:
    """Make a class of declared parameters a frozen dataclass with keyword-only fields."""
    for name in kind.__annotations__:
        declared = getattr(kind, name)
        default = MISSING if declared.default is ... else declared.default
        setattr(kind, name, field(default=default, metadata={DECLARED: declared}))
    return dataclass(frozen=True, kw_only=True)(kind)


def command_taking(call: Callable[[Any], int]) -> Callable[..., int]:
    """Return a command whose parameters are the fields of a function's argument."""
    kind = next(iter(get_type_hints(call).values()))
    return command_with(parameters_of(kind), lambda **values: call(kind(**values)))


def command_with(
    parameters: Sequence[inspect.Parameter], call: Callable[..., int]
) -> Callable[..., int]:
    """Return a command with these parameters that passes their values to a function by name."""

    def command(**values: Any) -> int:
        for name, value in values.items():
            if isinstance(value, float) and math.isnan(value):  # which no range excludes
                raise _refused(f"The value of --{name.replace('_', '-')} is not a number.")
        return call(**values)

    command.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": int}
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


def parameters_of(kind: type) -> list[inspect.Parameter]:
    """Return the fields of a class of options as parameters: arguments, then own, then inherited.

    Fields of nearer base classes come first.
    """
    hints, declared = get_type_hints(kind), {f.name: f for f in fields(kind)}
    bases = [vars(base).get("__annotations__", ()) for base in kind.__mro__]
    nearest_first = dict.fromkeys(name for names in bases for name in names)
    order = sorted(
        (declared[name] for name in nearest_first),
        key=lambda f: f.metadata[DECLARED].names is not None,
    )
    return [
        inspect.Parameter(
            f.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if f.default is MISSING else f.default,
            annotation=Annotated[hints[f.name], f.metadata[DECLARED].made(f.name)],
        )
        for f in order
    ]


FailOn = Literal["warning", "error"]
"""The lowest severity of findings that makes the exit code 1."""


def size(text: str | int) -> int:
    """Return the bytes of an option such as ``24GiB``; a number in a configuration has no unit."""
    value: int = _parsed(parse_size, str(text))
    if value == 0:
        raise _refused("0 bytes is not a size. Write for example 24GiB.")
    return value


def _refused(why: str) -> Exception:
    import typer

    return typer.BadParameter(why)


def _parsed(parse: Callable[[str], Any], text: str) -> Any:
    """Return what a text means, refusing it in the way of the command line."""
    try:
        return parse(text)
    except ConfigError as e:
        raise _refused(f"{e.message} {e.hint}") from e


def size_or_factor(text: str | float) -> int | float:
    """Return the bytes of an option such as ``24GiB``, or the factor of an option like ``1.2x``."""
    factor = re.fullmatch(r"([0-9]{1,3}(?:\.[0-9]{1,6})?)\s*[xX]", str(text))
    if factor is None:
        return text if isinstance(text, float) else size(text)
    if float(factor[1]) == 0:
        raise _refused("0x is not a capacity. Write for example 1.2x.")
    return float(factor[1])


def amount(text: str | float | Amount) -> Amount:
    """Return the ``Amount`` of an option such as ``70GiB`` or ``5%``."""
    found: Amount = text if isinstance(text, Amount) else _parsed(parse_amount, str(text))
    return found


def version_text(text: str) -> str:
    """Return a PyTorch version such as ``2.12.1`` or ``2.4``, without its local part."""
    release = text.strip().removeprefix("v").split("+", 1)[0]
    numbers = release.split(".")
    if not 2 <= len(numbers) <= 4 or not all(n.isascii() and n.isdigit() for n in numbers[:2]):
        raise _refused(f"{text!r} is not a PyTorch version. Write for example 2.12.1.")
    return release


_PARSERS: Final[Mapping[str | None, Callable[[Any], Any]]] = {
    "SIZE": size, "SIZE|%": amount, "SIZE|FACTORx": size_or_factor
}  # fmt: skip
"""Kind of value -> the function that reads it."""

FORMAT: Final = option(
    None, "Choose the output format", "--format",
    default="text", group=OUTPUT, show_default=True,
)  # fmt: skip
REPORTS: Final = option(
    "FORMAT=FILE", "Write another report to a file; may be repeated", group=OUTPUT
)
OUTPUT_FILE: Final = option("FILE", "Write the report to a file", "-o", "--output", group=OUTPUT)
FORCE: Final = flag("Overwrite the output file if it exists", group=OUTPUT)
QUIET: Final = flag(
    "Print the answer and the cure only; nothing with -o", "-q", "--quiet", group=OUTPUT
)
VERBOSE: Final = flag(
    "Print everything: checklist, stacks, all rows", "--full", "-v", "--verbose", group=OUTPUT
)
NO_COLOR: Final = flag("Print without color, as NO_COLOR does", group=OUTPUT)
FAIL_ON: Final = option(None, "Exit with 1 on findings this severe", group=GATE)
CAPACITY: Final = option(
    "SIZE", "Set what PyTorch can have: device less context and other processes", group=INPUT
)
DEVICE_SIZE: Final = option("SIZE", "Set the size of the GPU, if no input says it", group=INPUT)
DEVICE: Final = option("N", "Look at one GPU only", group=INPUT, min=0)
CONTINUE_WITH: Final = option(
    "SNAPSHOT",
    "Use another recording of the program (a rehearsal, a healthy run) to tell how this one "
    "would have continued",
    group=INPUT,
)
MEMORY_FRACTION: Final = option(
    "F", "Set the process's memory fraction, 0 to 1", group=INPUT, min=0.0, max=1.0
)
TORCH_VERSION: Final = option("X", "Set the PyTorch version", group=INPUT, parser=version_text)
IS_MODULE: Final = flag("Run a module, as python -m does", "-m", "--module", group=PROGRAM)


@taken
class ReportOutput:
    """The destination and look of a report."""

    output: Path | None = OUTPUT_FILE
    force: bool = FORCE
    quiet: bool = QUIET
    no_color: bool = NO_COLOR


@taken
class EstimateOutput(ReportOutput):
    """The destination and format of the answer of an estimate or a packing."""

    output_format: DocumentFormat = FORMAT


@taken
class FullOutput(ReportOutput):
    """The destination and look of a report that can say more on request."""

    verbose: bool = VERBOSE


@taken
class CaseOptions(FullOutput):
    """What is known about a case besides its inputs, and the destination of its report."""

    capacity: int | None = DEVICE_SIZE
    device: int | None = DEVICE
    memory_fraction: float | None = MEMORY_FRACTION
    torch_version: str | None = TORCH_VERSION
    path_map: list[str] | None = option(
        "RECORDED=HERE",
        "Find sources that were recorded under another path: /workspace=src",
        group=INPUT,
    )

    def overrides(self) -> Overrides:
        """Return the known facts in the form that a case takes."""
        from fragdoctor.model.case import Overrides

        return Overrides(
            capacity_bytes=self.capacity,
            device=self.device,
            memory_fraction=self.memory_fraction,
            torch_version=self.torch_version,
            batch_size=getattr(self, "batch", None),
        )


@taken
class DiagnosisOptions(CaseOptions):
    """What is known about a case to diagnose, its report, and the findings that exit with 1."""

    output_format: ReportFormat = FORMAT
    fail_on: FailOn | None = FAIL_ON

    def exit_code(self, findings: Iterable[Finding]) -> int:
        """Return 1 if a finding is at least as severe as ``--fail-on``, else 0."""
        if self.fail_on is None:
            return OK
        threshold = int(Severity[self.fail_on.upper()])
        return FINDINGS if any(f.severity >= threshold for f in findings) else OK
