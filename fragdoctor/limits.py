"""Limits on what one input may cost, each with its reason."""

from __future__ import annotations

from msgspec import Struct

from fragdoctor.units import GIB, MIB


class Limits(Struct, frozen=True):
    """Upper limits; memory and time grow with the bytes read, never with a number in the file.

    Attributes:
        max_input_bytes: bytes read after decompression. Genuine files of long runs reach a few
            GB; a compression bomb stops here.
        max_expansion: decompressed bytes per compressed byte, beyond ``free_expansion_bytes``.
            Snapshots and logs compress to about 1/20, seldom below 1/40.
        free_expansion_bytes: decompressed bytes that any compressed input may have.
        max_depth: nesting of containers. Genuine snapshots nest 6 deep.
        max_string_bytes: size of a string. The longest genuine ones are file names and annotations.
        max_text_bytes: size of a log or a message, which is read whole.
        max_json_bytes: size of statistics in one JSON document, which is parsed whole and then
            takes 20 to 30 times its size. A device takes 5 KB. JSON lines are not limited.
        max_devices: number of devices that are in use. PyTorch numbers devices with a signed byte.
        max_unknown_keys: distinct unknown key paths kept by name; others are only counted.
    """

    max_input_bytes: int = 64 * GIB
    max_expansion: int = 200
    free_expansion_bytes: int = 8 * MIB
    max_depth: int = 16
    max_string_bytes: int = 16 * MIB
    max_text_bytes: int = 1 * GIB
    max_json_bytes: int = 64 * MIB
    max_devices: int = 128
    max_unknown_keys: int = 200


DEFAULT_LIMITS = Limits()
