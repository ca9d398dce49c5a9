"""Options that mean the same in every command, and commands made from dataclasses of options."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, fields
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer
from typer.models import ArgumentInfo

from fragdoctor.errors import ConfigError
from fragdoctor.frozen import frozen
from fragdoctor.units import Amount, parse_amount, parse_size

_Options = TypeVar("_Options")


def command_of(kind: type[_Options], call: Callable[[_Options], int]) -> Callable[..., int]:
    """Return a command whose parameters are the fields of a dataclass.

    These are annotated as typer's parameters are; ``call`` does what the command does.
    """
    return command_with(parameters_of(kind), lambda **values: call(kind(**values)))


def command_with(
    parameters: Sequence[inspect.Parameter], call: Callable[..., int]
) -> Callable[..., int]:
    """Return a command with these parameters, which calls a function with their values by name."""

    def command(**values: Any) -> int:
        return call(**values)

    command.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": int}
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


def parameters_of(kind: type) -> list[inspect.Parameter]:
    """Return the fields of a dataclass as parameters: arguments, its own, then inherited ones.

    The nearer the class that has a field, the sooner it comes.
    """
    hints = get_type_hints(kind, include_extras=True)
    found = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=_default(field),
            annotation=hints[field.name],
        )
        for field in fields(kind)
    ]
    level = {
        name: i
        for i, base in reversed([*enumerate(kind.__mro__)])
        for name in vars(base).get("__annotations__", ())
    }
    return sorted(found, key=lambda p: (not isinstance(_info(p), ArgumentInfo), level[p.name]))


def _default(field: Field[Any]) -> Any:
    return inspect.Parameter.empty if field.default is MISSING else field.default


def _info(parameter: inspect.Parameter) -> Any:
    return parameter.annotation.__metadata__[0]


if TYPE_CHECKING:
    from fragdoctor.model.case import Overrides


def option(name: str, metavar: str, text: str, **more: Any) -> Any:
    """Return an option that takes a value: how it is written, what it takes, its line of help."""
    return typer.Option(name, metavar=metavar, help=text, **more)


class ReportFormat(StrEnum):
    """Formats of a diagnosis: the keys of ``report.base.FORMATS``."""

    TEXT = "text"
    JSON = "json"
    MARKDOWN = "markdown"
    HTML = "html"
    GITHUB = "github"
    SARIF = "sarif"
    JUNIT = "junit"


class DocumentFormat(StrEnum):
    """Formats that every command has."""

    TEXT = "text"
    JSON = "json"
    MARKDOWN = "markdown"
    HTML = "html"


class FailOn(StrEnum):
    """From which severity on findings make the exit code 1."""

    WARNING = "warning"
    ERROR = "error"


def size(text: str | int) -> int:
    """Return the bytes of an option such as ``24GiB``; a number of a configuration has no unit."""
    try:
        value = parse_size(str(text))
    except ConfigError as e:
        raise typer.BadParameter(f"{e.message} {e.hint}") from e
    if value == 0:
        raise typer.BadParameter("0 bytes is no size. Write for example 24GiB.")
    return value


def size_or_factor(text: str | float) -> int | float:
    """Return the bytes of an option such as ``24GiB``, or the factor of one such as ``1.2x``."""
    factor = re.fullmatch(r"([0-9]{1,3}(?:\.[0-9]{1,6})?)\s*[xX]", str(text))
    if factor is None:
        return text if isinstance(text, float) else size(text)
    if float(factor[1]) == 0:
        raise typer.BadParameter("0x is no capacity. Write for example 1.2x.")
    return float(factor[1])


def amount(text: str | float | Amount) -> Amount:
    """Return the ``Amount`` of an option such as ``70GiB`` or ``5%``."""
    if isinstance(text, Amount):
        return text
    try:
        return parse_amount(str(text))
    except ConfigError as e:
        raise typer.BadParameter(f"{e.message} {e.hint}") from e


def version_text(text: str) -> str:
    """Return a PyTorch version such as ``2.12.1`` or ``2.4``, without its local part."""
    release = text.strip().removeprefix("v").split("+", 1)[0]
    numbers = release.split(".")
    if not 2 <= len(numbers) <= 4 or not all(n.isascii() and n.isdigit() for n in numbers[:2]):
        raise typer.BadParameter(f"{text!r} is not a PyTorch version. Write for example 2.12.1.")
    return release


Format = Annotated[
    ReportFormat, typer.Option("--format", help="Choose the output format", show_default=True)
]
DocumentFormats = Annotated[
    DocumentFormat, typer.Option("--format", help="Choose the output format", show_default=True)
]
Reports = Annotated[
    list[str] | None,
    option("--report", "FORMAT=FILE", "Write a further report to a file; may be repeated"),
]
Output = Annotated[
    Path | None,
    typer.Option("-o", "--output", metavar="FILE", help="Write the report to a file"),
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite the output file if it exists")]
Quiet = Annotated[
    bool,
    typer.Option("-q", "--quiet", help="Print the answer and the cure only; nothing with -o"),
]
Verbose = Annotated[
    bool,
    typer.Option("--full", "-v", "--verbose", help="Print everything: checklist, stacks, all rows"),
]
PathMap = Annotated[
    list[str] | None,
    option(
        "--path-map",
        "RECORDED=HERE",
        "Find sources that were recorded under another path: /workspace=src",
    ),
]
NoColor = Annotated[bool, typer.Option("--no-color", help="Print without colour, as NO_COLOR does")]
FailOnOption = Annotated[
    FailOn | None, typer.Option("--fail-on", help="Exit with 1 on findings this severe")
]
ExitZero = Annotated[bool, typer.Option("--exit-zero", help="Exit with 0 whatever was found")]
Capacity = Annotated[
    int | None,
    option(
        "--capacity",
        "SIZE",
        "Set what PyTorch can have: device less context and other processes",
        parser=size,
    ),
]
DeviceSize = Annotated[
    int | None,
    option("--capacity", "SIZE", "Set the size of the GPU, where no input says it", parser=size),
]
Request = Annotated[
    int | None, option("--request", "SIZE", "Set the size that was refused", parser=size)
]
Batch = Annotated[
    int | None,
    option("--batch", "N", "Set the present batch size: advice then names another", min=1),
]
Device = Annotated[int | None, option("--device", "N", "Look at one GPU only", min=0)]
ContinueWith = Annotated[
    str | None,
    option(
        "--continue-with",
        "SNAPSHOT",
        "Take from another recording of the program (a rehearsal, a healthy run) how this one "
        "would have gone on",
    ),
]
MemoryFraction = Annotated[
    float | None,
    option("--memory-fraction", "F", "Set the process's memory fraction, 0 to 1", min=0.0, max=1.0),
]
TorchVersion = Annotated[
    str | None, option("--torch-version", "X", "Set the PyTorch version", parser=version_text)
]
Gpus = Annotated[
    list[str] | None,
    option("--gpu", "NAME|SIZE", "Ask for a GPU: a100-40g, h100, 24GiB; repeatable"),
]
OneGpu = Annotated[
    list[str] | None, option("--gpu", "NAME|SIZE", "Choose the GPU: a100-40g, h100, 24GiB")
]
"""A list, so that a second one is refused and not silently preferred."""

Headroom = Annotated[
    int | None,
    option(
        "--headroom",
        "SIZE",
        "Keep so much of the GPU free; a twentieth of it otherwise",
        parser=size,
    ),
]
CudaContext = Annotated[
    int | None,
    option("--context", "SIZE", "Set what the CUDA context of one process takes", parser=size),
]
Explain = Annotated[bool, typer.Option("--explain", help="Show formulas, values and sources")]


@frozen(kw_only=True)
class ReportOutput:
    """Where a report goes, and how it looks."""

    output: Output = None
    force: Force = False
    quiet: Quiet = False
    no_color: NoColor = False


@frozen(kw_only=True)
class EstimateOutput(ReportOutput):
    """Where the answer of an estimate or a packing goes, and in which form."""

    output_format: DocumentFormats = DocumentFormat.TEXT


@frozen(kw_only=True)
class FullOutput(ReportOutput):
    """The same of a report that has more to say on request."""

    verbose: Verbose = False


@frozen(kw_only=True)
class CaseOptions(FullOutput):
    """What is known of a case beside its inputs, and where the report on it goes."""

    capacity: DeviceSize = None
    device: Device = None
    memory_fraction: MemoryFraction = None
    torch_version: TorchVersion = None
    exit_zero: ExitZero = False
    path_map: PathMap = None

    def overrides(self) -> Overrides:
        """Return what is known, as a case takes it."""
        from fragdoctor.model.case import Overrides

        return Overrides(
            capacity_bytes=self.capacity,
            request_bytes=getattr(self, "request", None),
            device=self.device,
            memory_fraction=self.memory_fraction,
            torch_version=self.torch_version,
            batch_size=getattr(self, "batch", None),
        )
