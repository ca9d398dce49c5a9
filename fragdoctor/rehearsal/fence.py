"""A kernel fence around a process: it, and all that it starts, can only write below a few folders.

Linux's Landlock (``linux/landlock.h``) applies to code in every language, to threads that begin
later, and to programs that are started. It does not cover modes, owners and times of files.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from collections.abc import Iterable
from typing import Final

FREE: Final = ("/dev", "/proc")
"""Where there are no files of anybody's, but programs write anyway."""
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # system calls, on every architecture
_VERSION: Final = 1  # LANDLOCK_CREATE_RULESET_VERSION
_PATH_BENEATH: Final = 1  # LANDLOCK_RULE_PATH_BENEATH
_NO_NEW_PRIVILEGES: Final = 38  # PR_SET_NO_NEW_PRIVS, without which nothing may be restricted
_WRITE_FILE: Final = 1 << 1
_TRUNCATE: Final = 1 << 14
_REMOVE_AND_MAKE: Final = sum(1 << bit for bit in range(4, 13))
_REFER: Final = 1 << 13  # moving files between folders
_WITH_REFER, _WITH_TRUNCATE = 2, 3  # versions that introduced these rights


def restrict_writes(folders: Iterable[str]) -> str:
    """Let this thread, and what it starts, change only what is below some folders.

    This cannot be undone.

    Returns:
        why there is no fence, or "" if there is one.
    """
    if not sys.platform.startswith("linux"):
        return "only Linux can do that"
    libc = ctypes.CDLL(None, use_errno=True)
    version = libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION))
    if version < 1:
        return f"this kernel has no Landlock ({os.strerror(ctypes.get_errno())})"
    access = _WRITE_FILE | _REMOVE_AND_MAKE
    access |= _REFER if version >= _WITH_REFER else 0
    access |= _TRUNCATE if version >= _WITH_TRUNCATE else 0
    rules = struct.pack("=Q", access)  # struct landlock_ruleset_attr
    fd = libc.syscall(_CREATE_RULESET, rules, ctypes.c_size_t(len(rules)), ctypes.c_uint32(0))
    if fd < 0:
        return os.strerror(ctypes.get_errno())
    try:
        for folder in folders:
            _allow(libc, fd, folder, access)
        is_done = not libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) and not libc.syscall(
            _RESTRICT_SELF, fd, ctypes.c_uint32(0)
        )
    finally:
        os.close(fd)
    return "" if is_done else os.strerror(ctypes.get_errno())


def _allow(libc: ctypes.CDLL, ruleset: int, folder: str, access: int) -> None:
    try:
        parent = os.open(folder, os.O_PATH | os.O_CLOEXEC)
    except OSError:  # no such folder, so nothing can be written below it
        return
    try:
        rule = struct.pack("=Qi", access, parent)  # struct landlock_path_beneath_attr
        libc.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, rule, ctypes.c_uint32(0))
    finally:
        os.close(parent)
