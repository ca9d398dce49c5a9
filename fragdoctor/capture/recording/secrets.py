"""Secrets in a command line: a bundle is passed around, so their values stay out of it."""

from __future__ import annotations

import re
from collections.abc import Sequence

MASK = "***"

_WORD = r"key|token(?!iz)|secret|passw|passphrase|pwd|auth(?!or(?!iz))|credential"
_SECRET = re.compile(_WORD, re.IGNORECASE)
_ALWAYS = re.compile(r"secret|passw|passphrase|pwd", re.IGNORECASE)
_OPTION = re.compile(r"--?[A-Za-z][\w.-]{0,100}")
_ASSIGNED = re.compile(r"([+~-]{0,2}[A-Za-z_][\w.-]{0,100})(=|:\s?)(?!//)(.+)", re.DOTALL)
_INSIDE = re.compile(rf"([\w.-]{{0,60}}(?:{_WORD})[\w.-]{{0,60}}[\"']?\s{{0,3}}[:=]\s{{0,3}}[\"']?)"
                     r"([^\s\"',;&}]{1,4000})", re.IGNORECASE)  # fmt: skip
_IN_URL = re.compile(r"(\w{1,20}://[^/@\s:]{0,200}:)[^/@\s]{1,400}(?=@)")
_COUNT = re.compile(r"\d{1,7}(?:\.\d{0,6})?")
"""A number such as that of ``--max-tokens 512``; a password may be one too."""


def masked(words: Sequence[str]) -> list[str]:
    """Return the words of a command with the values of secrets replaced by ``***``.

    A secret is the value of an option or an assignment whose name contains key, token, secret,
    password, passwd, pwd, passphrase, auth or credential, whatever the case (``--api-key X``,
    ``--api_key=X``, ``HF_TOKEN=X``, also within a word), and the password in an address
    (``https://user:password@host``). Numbers of keys and tokens are none (``--max-tokens 512``).
    """
    found: list[str] = []
    option = ""
    for word in words:
        if option and not _OPTION.fullmatch(word):
            found.append(_hidden(option, word))
            option = ""
            continue
        option = word if _OPTION.fullmatch(word) and _SECRET.search(word) else ""
        whole = _ASSIGNED.fullmatch(word)
        if whole is not None and _SECRET.search(whole.group(1)):
            name, sign, value = whole.groups()
            found.append(name + sign + _hidden(name, value))
        else:
            inner = _INSIDE.sub(lambda m: m.group(1) + _hidden(m.group(1), m.group(2)), word)
            found.append(_IN_URL.sub(r"\1" + MASK, inner))
    return found


def _hidden(name: str, value: str) -> str:
    return value if _COUNT.fullmatch(value) and not _ALWAYS.search(name) else MASK
