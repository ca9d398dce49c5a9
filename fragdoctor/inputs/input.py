"""One name of a command line as an input: what it is, and its bytes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from fragdoctor.errors import InputError, LimitExceeded
from fragdoctor.inputs.bundles import is_bundle
from fragdoctor.inputs.classify import Kind, Wanted, classify, something_else
from fragdoctor.inputs.source import ByteStream, open_source, shown
from fragdoctor.limits import DEFAULT_LIMITS
from fragdoctor.units import format_size

STDIN: Final = "-"


@dataclass(frozen=True, slots=True)
class Input:
    """What a name leads to, looked at; see ``open_input``.

    Attributes:
        name: as it was given: a path, a URL, or ``-``; hostile text.
        kind: what it is, by its first bytes; ``BUNDLE`` and ``FOLDER`` by what lies in it.
    """

    name: str
    kind: Kind
    _stream: ByteStream | None = None

    @property
    def shown(self) -> str:
        """What it is called for people: hostile text, without passwords."""
        return shown(self.name)

    @property
    def stream(self) -> ByteStream:
        """Its unpacked bytes, from the first one on; a bundle and a folder have none."""
        if self._stream is None:
            raise self.is_not(Wanted.SNAPSHOT)
        return self._stream

    def read_all(self) -> bytes:
        """Return a text whole, up to the limit.

        Raises:
            LimitExceeded: it is longer.
        """
        return read_text(self.stream, self.shown)

    def is_not(self, wanted: Wanted) -> InputError:
        """Return the error for an input that is something else than what was wanted."""
        return something_else(self.shown, self.kind, wanted)


@contextmanager
def open_input(name: str) -> Iterator[Input]:
    """Open a name and look at what it leads to; the bytes looked at are still to be read.

    Raises:
        InputError: there is nothing of that name, or it cannot be read.
    """
    if name != STDIN and is_bundle(name):
        yield Input(name, Kind.BUNDLE)
    elif name != STDIN and os.path.isdir(name):  # noqa: PTH112 - never raises, unlike Path
        yield Input(name, Kind.FOLDER)
    else:
        with open_source(name) as stream:
            yield Input(name, classify(stream.head), stream)


def kind_of(path: str) -> Kind | None:
    """Return what lies at a path; None where it cannot be looked at."""
    try:
        with open_input(path) as found:
            return found.kind
    except (InputError, OSError):
        return None


def read_text(stream: ByteStream, name: str) -> bytes:
    """Return a stream of text whole, up to the limit.

    Raises:
        LimitExceeded: it is longer.
    """
    limit = DEFAULT_LIMITS.max_text_bytes
    data = bytearray()
    while chunk := stream.read(1 << 20):
        data += chunk
        if len(data) > limit:
            raise LimitExceeded(
                f"{name} is longer than {format_size(limit)}.",
                hint="Cut the part around the failure out of it.",
            )
    return bytes(data)
