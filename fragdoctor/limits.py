"""Bounds on what one input may cost, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass

from fragdoctor.units import GIB, MIB


@dataclass(frozen=True, slots=True)
class Limits:
    """Upper bounds; memory and time grow with bytes read, never with a number in the file.

    Attributes:
        max_input_bytes: bytes read after decompression. Genuine files of long runs reach a few
            GB; a compressed bomb stops here.
        max_expansion: decompressed bytes per compressed byte, looked at past the first 64 MiB.
            Snapshots compress to about 1/20, seldom below 1/100.
        max_depth: nesting of containers. Genuine snapshots nest 6 deep.
        max_string_bytes: one string. The longest genuine ones are file names and annotations.
        max_text_bytes: a log or a message, read whole.
        max_unknown_keys: distinct unknown key paths kept by name; further ones are counted only.
    """

    max_input_bytes: int = 64 * GIB
    max_expansion: int = 1000
    max_depth: int = 16
    max_string_bytes: int = 16 * MIB
    max_text_bytes: int = 1 * GIB
    max_unknown_keys: int = 200


DEFAULT_LIMITS = Limits()
