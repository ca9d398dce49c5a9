"""``fragdoctor init-ci``: a file that makes a code host rehearse every change."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Final

from fragdoctor.cli import console, options
from fragdoctor.cli.exit import OK, say
from fragdoctor.errors import ConfigError
from fragdoctor.installed import requirement

GITHUB: Final = Path(".github/workflows/gpu-memory.yml")
GITLAB: Final = Path(".gitlab/gpu-memory.yml")


@options.taken
class InitCiOptions:
    """What to check, and where."""

    words: list[str] = options.argument(
        "SCRIPT [-- ARGS]...",
        "The script to rehearse, or with -m a module; its own arguments follow --",
    )
    is_module: bool = options.IS_MODULE
    gitlab: bool = options.flag("Write a file for GitLab; else for GitHub")
    fits_on: str = options.option(
        "SIZE", "Fail where PyTorch needs more", default="24GiB", parser=str
    )
    gpu_runner: str | None = options.option(
        "LABELS", "Record on runners with these labels too, and check that: self-hosted,gpu"
    )
    install: str | None = options.option(
        "SPEC", "Install this with pip; else what this copy was installed from"
    )
    output: Path | None = options.option(
        "FILE", "Write another file", "-o", "--output", group=options.OUTPUT
    )
    force: bool = options.FORCE


def init_ci(chosen: InitCiOptions) -> int:
    """Write the file, and say what comes next."""
    options.size(chosen.fits_on)
    target = chosen.output or (GITLAB if chosen.gitlab else GITHUB)
    text = workflow(chosen, target)
    if chosen.output is None:
        target.parent.mkdir(parents=True, exist_ok=True)
    console.write_report(text, target, force=chosen.force)
    included = ("Add to .gitlab-ci.yml:", "include:", f"  - local: {target}")
    committed = ("Commit it; the next pull request is rehearsed.",)
    say(f"Wrote {target}", *(included if chosen.gitlab else committed))
    return OK


def workflow(chosen: InitCiOptions, target: Path) -> str:
    """Return the text of the file.

    Raises:
        ConfigError: a word cannot be written into such a file, or the script does not exist.
    """
    script, *args = chosen.words
    if not chosen.is_module and not Path(script).is_file():
        raise ConfigError(f"{script} does not exist.", hint="Run it at the root of the repository.")
    package = chosen.install or requirement()
    if package is None:
        raise ConfigError(
            "This fragdoctor was installed from a folder, which the CI machine does not have.",
            hint="Say what pip installs there: --install git+https://HOST/OWNER/fragdoctor@COMMIT",
        )
    for word in (*chosen.words, package, chosen.gpu_runner or "", str(target)):
        # Both hosts replace such words with values before a shell sees them.
        if not word.isprintable() or "${{" in word:
            raise ConfigError(
                f"{word!r} cannot be used in a workflow.", hint="Put it into a script of its own."
            )
    labels = [label.strip() for label in (chosen.gpu_runner or "").split(",")]
    if not all(label.replace("-", "").replace("_", "").replace(".", "").isalnum() or not label
               for label in labels):  # fmt: skip
        raise ConfigError(
            f"{chosen.gpu_runner!r} is not a list of labels.", hint="Write self-hosted,gpu"
        )
    start = ["-m", script] if chosen.is_module else [script]
    program = shlex.join([*start, "--", *args] if args else start)
    values = {
        "FILE": str(target),
        "OPTIONS": shlex.join(["--fits-on", chosen.fits_on]),
        "PROGRAM": program,
        "RUN": shlex.join([*(["-m"] if chosen.is_module else ["--"]), script, *args]),
        "PACKAGE": shlex.quote(package),
        "RUNNER": f"[{', '.join(labels)}]",
    }
    kept = {
        "gpu": chosen.gpu_runner is not None,
        "requirements": Path("requirements.txt").is_file(),
        "project": Path("pyproject.toml").is_file() or Path("setup.py").is_file(),
        "cache": Path("requirements.txt").is_file() or Path("pyproject.toml").is_file(),
    }
    return _filled(
        "gitlab" if chosen.gitlab else "github", values, [k for k, v in kept.items() if v]
    )


def _filled(name: str, values: Mapping[str, str], kept: Collection[str]) -> str:
    """Return a template filled with values, keeping only the chosen optional parts."""
    from importlib.resources import files

    text = files("fragdoctor.gate").joinpath(f"workflows/{name}.yml").read_text(encoding="utf-8")
    lines: list[str] = []
    is_kept: Sequence[bool] = [True]
    for line in text.splitlines():
        if line.startswith("#if "):
            is_kept = [*is_kept, line.removeprefix("#if ") in kept]
        elif line == "#end":
            is_kept = is_kept[:-1]
        elif all(is_kept):
            for key, value in values.items():
                line = line.replace(f"@{key}@", value)  # noqa: PLW2901 - filled in
            lines.append(line)
    return "\n".join(lines) + "\n"
