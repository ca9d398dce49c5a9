"""Every error that fragdoctor raises on purpose, and its exit code.

FragdoctorError
├── InputError                exit 2   the input cannot be read
│   ├── NotASnapshot          exit 2   readable, but something else
│   ├── TruncatedSnapshot     exit 2   ends in the middle
│   ├── RefusedSnapshot       exit 3   contains something that no genuine snapshot contains
│   └── LimitExceeded         exit 3   takes more than fragdoctor is willing to spend
├── ConfigError               exit 2   an option, a setting string or a configuration file
├── SimulationError           exit 2   a what-if that cannot be answered from this input
└── NativeCoreMissing         exit 2   fragdoctor is not built, or not for these sources

OutOfMemory                             raised by the allocator model, as PyTorch raises its own;
                                        not a fragdoctor error
"""

from __future__ import annotations

from os import PathLike, fspath


class FragdoctorError(Exception):
    """Base of all errors: one sentence, one hint, and the byte offset if there is one.

    Attributes:
        message: one sentence without markup; may quote input, so escape it before printing.
        hint: what to try next, or an empty string.
        offset: position in the (decompressed) input in bytes, or None.
        code: stable name for machine-readable output.
        exit_code: what the command line exits with.
    """

    code = "error"
    exit_code = 2

    def __init__(self, message: str, *, hint: str = "", offset: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.offset = offset

    @property
    def sentence(self) -> str:
        """The message, with the byte offset if there is one."""
        return self.message if self.offset is None else f"{self.message} (byte {self.offset})"

    def __str__(self) -> str:
        """Return the sentence."""
        return self.sentence


class InputError(FragdoctorError):
    """The input cannot be read."""

    code = "unreadable_input"


class NotASnapshot(InputError):  # noqa: N818 - reads as what it says
    """The input is readable but not what was expected."""

    code = "not_a_snapshot"


class TruncatedSnapshot(InputError):  # noqa: N818
    """The input ends in the middle, as when a process was killed while writing it."""

    code = "truncated_snapshot"


class RefusedSnapshot(InputError):  # noqa: N818
    """The input contains something that no genuine snapshot contains; none of it was executed."""

    code = "refused_snapshot"
    exit_code = 3


class LimitExceeded(InputError):  # noqa: N818
    """Reading further would take more memory or time than the limits allow."""

    code = "limit_exceeded"
    exit_code = 3


class ConfigError(FragdoctorError):
    """An option, an allocator setting or a configuration file is wrong.

    Programs that call ``fragdoctor.record`` see it as a traceback, which shows only the text, so
    the text includes the hint.
    """

    code = "bad_configuration"

    def __str__(self) -> str:
        """Return the sentence and what to try next."""
        return f"{self.sentence} {self.hint}".rstrip()


def unusable(verb: str, value: object, hint: str) -> ConfigError:
    """Return the error for an API function that was given a value it cannot use."""
    what = "an empty path" if value == "" else f"a value of type {type(value).__name__}"
    return ConfigError(f"{verb}() cannot use {what}.", hint=hint)


def path_text(verb: str, value: object, hint: str) -> str:
    """Return the text of a path that an API function was given.

    Raises:
        ConfigError: the value is not a path, or is empty.
    """
    text = fspath(value) if isinstance(value, str | PathLike) else None
    if not isinstance(text, str) or not text:
        raise unusable(verb, value, hint)
    return text


class SimulationError(FragdoctorError):
    """A what-if cannot be answered from this input."""

    code = "cannot_simulate"


class NativeCoreMissing(FragdoctorError, ImportError):  # noqa: N818 - reads as what it says
    """The C++ core cannot be imported: it is not built, or was built from other sources.

    Programs that import fragdoctor see it as a traceback, so its text says what to run.
    """

    code = "core_missing"

    def __str__(self) -> str:
        """Return the sentence and what to run."""
        return f"{self.sentence} {self.hint}".rstrip()


class OutOfMemory(Exception):  # noqa: N818 - PyTorch's own name for it
    """The allocator model could not serve a request, just as PyTorch could not.

    This is not a FragdoctorError: nothing is wrong with the input, and programs rehearsed on the
    model catch it as they catch ``torch.OutOfMemoryError``. The text is PyTorch's message.

    Attributes:
        requested_bytes: what the caller asked for.
        alloc_bytes: the size in the message: the segment that the driver refused.
        total_bytes: memory of the device.
        free_bytes: what the driver had left after the flush.
        allocated_bytes: memory handed out to the program.
        reserved_bytes: memory held by the allocator.
        private_free_bytes: memory cached inside private pools.
        limit_bytes: how much a memory fraction allows; None means no fraction set.
    """

    requested_bytes: int
    alloc_bytes: int = 0
    total_bytes: int = 0
    free_bytes: int = 0
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    private_free_bytes: int = 0
    limit_bytes: int | None = None

    def __init__(self, message: str, **figures: int | None) -> None:
        super().__init__(message)
        for name, n_bytes in figures.items():
            setattr(self, name, n_bytes)

    @property
    def reserved_unallocated_bytes(self) -> int:
        """Reserved memory that no live block covers."""
        return self.reserved_bytes - self.allocated_bytes
