"""``fragdoctor.check``: the gate for continuous integration, without a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from os import PathLike, fspath
from typing import TYPE_CHECKING, Final

from fragdoctor.errors import ConfigError, InputError, path_text
from fragdoctor.model.case import Overrides
from fragdoctor.model.finding import Severity
from fragdoctor.units import Amount, parse_amount, parse_size

if TYPE_CHECKING:
    from fragdoctor.gate.judgement import CheckReport, FileJudgement, Gate


def check(  # noqa: PLR0913 - the options of one gate, all by keyword
    paths: str | PathLike[str] | Sequence[str | PathLike[str]],
    *,
    max_peak: str | int | None = None,
    max_stranded: str | int | None = None,
    max_retries: int | None = None,
    min_headroom: str | int | None = None,
    fits_on: str | int | None = None,
    no_growth: bool = False,
    baseline: str | PathLike[str] | None = None,
    select: Sequence[str] = (),
    ignore: Sequence[str] = (),
    fail_on: str = "error",
    capacity_bytes: int | None = None,
) -> CheckReport:
    """Return which files stay within their budgets, and why the others do not.

    Args:
        paths: snapshots, messages and statistics, or directories and patterns of them.
        max_peak: limit for active memory: bytes, ``"70GiB"``, or ``"90%"`` of the capacity.
        max_stranded: limit for free memory that live blocks strand; ``"5%"`` of reserved memory.
        max_retries: limit for allocations that flush the cache first.
        min_headroom: smallest allowed capacity above the peak of active memory.
        fits_on: how much PyTorch can have on a device on which the run must fit, by replay.
        no_growth: demand that no memory grows step by step.
        baseline: a file from ``--write-baseline``: only what got worse fails.
        select: prefixes of the codes of rules to check; empty means all rules.
        ignore: prefixes of the codes of rules not to check.
        fail_on: ``error`` or ``warning``.
        capacity_bytes: size of the device, if the inputs do not say.

    Returns:
        The report; its ``exit_code`` is the command's.

    Raises:
        ConfigError: an option does not have such a value, or there is nothing to check.
    """
    from fragdoctor.gate.baseline import load_baseline  # noqa: PLC0415 - numpy is heavy
    from fragdoctor.gate.budgets import Budgets  # noqa: PLC0415
    from fragdoctor.gate.judgement import Gate, report, rule_codes  # noqa: PLC0415

    if fail_on.upper() not in ("ERROR", "WARNING"):
        raise ConfigError(f"fail_on is {fail_on!r}.", hint="Give error or warning.")
    budgets = Budgets(
        _amount(max_peak),
        _amount(max_stranded),
        max_retries,
        _amount(min_headroom),
        _size(fits_on),
        no_growth,
    )
    gate = Gate(
        budgets=budgets,
        fail_on=Severity[fail_on.upper()],
        select=rule_codes(select),
        ignore=rule_codes(ignore),
        baseline=None if baseline is None else load_baseline(fspath(baseline)),
    )
    is_one = isinstance(paths, str | bytes | PathLike)
    several = paths if isinstance(paths, Iterable) and not is_one else [paths]
    names = [path_text("check", path, _OF_RUNS) for path in several]
    if not names:
        raise ConfigError("check() was given nothing.", hint=_OF_RUNS)
    return report(judge_files(names, gate, Overrides(capacity_bytes=capacity_bytes)), gate)


_OF_RUNS: Final = "Give it paths of snapshots, messages or statistics."


def judge_files(
    names: Sequence[str],
    gate: Gate,
    overrides: Overrides,
    each: Callable[[Sequence[str]], Iterable[str]] = iter,
) -> list[FileJudgement]:
    """Return the judgment of every input; an unreadable input does not stop the others.

    Args:
        names: files, directories and patterns.
        gate: the gate that judges them.
        overrides: what the user states about all of them.
        each: yields the files one by one; shows progress.
    """
    from fragdoctor.gate.judgement import FileJudgement  # noqa: PLC0415 - numpy is heavy
    from fragdoctor.inputs.folders import expand  # noqa: PLC0415

    paths, missing = expand(names)
    judged = [_judge(path, gate, overrides, len(paths)) for path in each(paths)]
    return [*judged, *(FileJudgement(name, error=error) for name, error in missing)]


def _judge(name: str, gate: Gate, overrides: Overrides, n_files: int) -> FileJudgement:
    from fragdoctor.diagnosis.pipeline import diagnose as run  # noqa: PLC0415 - numpy is heavy
    from fragdoctor.gate.judgement import FileJudgement, judge  # noqa: PLC0415
    from fragdoctor.inputs.cases import read_case  # noqa: PLC0415

    try:
        case = read_case([name], overrides)
    except InputError as e:
        return FileJudgement(name, error=e)
    except OSError as e:
        unread = InputError(f"{name} cannot be read: {e.strerror or e}.")
        return FileJudgement(name, error=unread)
    if case.holds_nothing:
        remark = "no out-of-memory message and no statistics in this text"
        return FileJudgement(name, remark=remark, is_judged=False)
    return judge(name, run(case), gate, n_files)


def _amount(value: str | int | None) -> Amount | None:
    if value is None or isinstance(value, str):
        return None if value is None else parse_amount(value)
    return Amount(n_bytes=value)


def _size(value: str | int | None) -> int | None:
    return parse_size(value) if isinstance(value, str) else value
