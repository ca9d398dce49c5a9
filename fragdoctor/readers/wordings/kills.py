"""Processes that were killed: by the kernel, a container engine, Slurm, or with signal 9."""

from __future__ import annotations

import re
from typing import Final

from fragdoctor.readers.log import Stream
from fragdoctor.readers.wordings.base import Fields, Wording
from fragdoctor.readers.wordings.base import host_wording as _host

_SUB_KIND: Final = "oom-killer"


def _alone(fields: Fields, match: re.Match[str], stream: Stream) -> Fields | None:
    """Keep a bare "Killed" that is a line of its own, as a shell prints it."""
    is_alone = not stream.before(match.start()) and not stream.after(match.end())
    return fields if is_alone else None


def _kill(variant: str, literal: str, pattern: str, back: int = 0) -> Wording:
    return _host(variant, _SUB_KIND, literal, pattern, back, group="kill")


WORDINGS: Final = (
    _kill("exit-code", "exitcode:-9", r"\(?exitcode:-9(?!\d)\)?", 1),
    _kill("exit-code", "signal9", r"signal9\(sigkill\)"),
    _kill("exit-code", "exitstatus-9", r"(?:non-zero)?exitstatus-9(?!\d)", 8),
    _kill("exit-code", "exitcode-9", r"exitcode-9(?!\d)"),
    _kill(
        "exit-code",
        "137",
        r"(?:exit(?:ed|s)?(?:with)?(?:exit)?(?:code|status)|(?:exit)?(?:code|status)|exited)"
        r"[:=(]{0,2}\"?137(?!\d)",
        24,
    ),
    _kill("sigkill", "sigkill:9", r"diedwith<?signals\.sigkill:9", 18),
    _kill(
        "sigkill",
        "sigkill",
        r"(?:died|killed|terminated|receivedsignal|exited)(?:with|by|on|due|to|the)?(?:signal)?"
        r":?\(?(?:<?signals\.)?sigkill",
        34,
    ),
    _kill(
        "kernel",
        "killedprocess",
        r"(?:outofmemory|memorycgroupoutofmemory):?killedprocess\d{1,9}",
        26,
    ),
    _kill("kernel", "oom-kill:constraint", r"oom-kill:constraint"),
    _kill("kernel", "invokedoom-killer", r"invokedoom-killer"),
    _kill("slurm", "killevent", r"oom[-_]killevent", 4),
    _kill("slurm", "oomkilled", r"oomkilled"),
    _host("killed", _SUB_KIND, "killed", r"killed", group="kill", refine=_alone),
    _kill("killed", "killed", r"line\d{1,6}:\d{1,9}killed", 24),
    _kill("killed", "killed", r"\[\d{1,3}\][+-]?(?:\d{1,9})?killed", 16),
)
