"""Open URLs as byte streams and list them through fsspec, which is loaded on first use.

Nothing here searches for URLs: only a name given by the user leads to the network. A file on a web
server is read from start to end in one request, a file in an object store in large blocks.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, Final, cast

from fragdoctor.errors import ConfigError, InputError, TruncatedSnapshot
from fragdoctor.lazy import regex
from fragdoctor.units import MIB

# Scheme -> what to install if its file system cannot be loaded. Other schemes, such as reference://
# and zip://, do more with a file than hand out its bytes, and are refused.
SCHEMES: Final = {
    "http": "aiohttp",
    "https": "aiohttp",
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
    "hf": "huggingface_hub",
    "oss": "ossfs",
    "hdfs": "pyarrow",
    "webhdfs": "requests",
    "sftp": "paramiko",
    "ssh": "paramiko",
    "ftp": "fsspec",
    "file": "fsspec",
    "memory": "fsspec",
}
_WEB: Final = ("http", "https")
_BLOCK_BYTES: Final = 8 * MIB
_CONNECT_S: Final = 15
_SILENCE_S: Final = 60  # longest wait for the next byte; a large file may take hours in total
_SECRET: Final = regex(
    r"((?:X-Amz|X-Goog)-(?:Signature|Credential|Security-Token)|Signature|AWSAccessKeyId"
    r"|GoogleAccessId|sig|token|access_token|api_key|key)=[^&#]+",
    re.IGNORECASE,
)
_LOGIN: Final = regex(r"^([a-z0-9+-]+://)[^/@]*@", re.IGNORECASE)
_INSTALL: Final = "Run: pip install 'fragdoctor[remote]'"


def is_remote(name: str) -> bool:
    """Return whether a name is a URL."""
    scheme, mark, _ = name.partition("://")
    return bool(mark) and scheme.replace("+", "").replace("-", "").isalnum()


def scheme_of(name: str) -> str:
    """Return the scheme of a URL, in lower case."""
    return name.partition("://")[0].lower()


def without_secrets(name: str) -> str:
    """Return a URL that is safe to show, without login, signature and token."""
    if not is_remote(name):
        return name
    address, mark, query = _LOGIN.sub(r"\1", name).partition("?")
    return address + mark + _SECRET.sub(r"\1=...", query)


def has_pattern(url: str) -> bool:
    """Return whether a URL is a pattern; in a web URL a question mark starts the query instead."""
    place = url.partition("?")[0] if scheme_of(url) in _WEB else url
    return any(c in place for c in ("*[" if scheme_of(url) in _WEB else "*?["))


def open_remote(url: str) -> BinaryIO:
    """Open a URL for reading from start to end.

    Raises:
        InputError: the file does not exist, may not be read, or cannot be reached.
        ConfigError: fsspec, or a package that it needs for this scheme, is not installed.
    """
    scheme = scheme_of(url)
    with _sentences(url):
        if scheme in _WEB:  # giving a size saves the extra request that asks for it
            raw = _file_system(url).open(url, "rb", block_size=0, size=1)
        else:
            raw = _file_system(url).open(url, "rb", block_size=_BLOCK_BYTES)
        return cast("BinaryIO", _RemoteFile(raw, url))


def list_remote(url: str, *, most: int) -> list[str]:
    """Return the files that match a pattern or lie in a folder, sorted; [] if there are none.

    For a folder on a web server, only the folder's own page of links is read.

    Raises:
        InputError: the listing is not available.
        ConfigError: the listing has more than ``most`` files, or a package is not installed.
    """
    with _sentences(url):
        system = _file_system(url)
        if has_pattern(url):
            found = system.glob(url)
        elif scheme_of(url) in _WEB:
            found = [e["name"] for e in system.ls(url, detail=True) if e["type"] == "file"]
        else:
            found = system.find(url)
    if len(found) > most:
        raise ConfigError(
            f"{without_secrets(url)} holds more than {most} files.",
            hint="Look at some of them at a time.",
        )
    return sorted(_url(scheme_of(url), str(path)) for path in found)


def is_remote_folder(url: str) -> bool:
    """Return whether a URL is a folder, by a slash at its end or by asking an object store.

    Raises:
        InputError: the store cannot be reached.
    """
    if url.endswith("/"):
        return True
    if scheme_of(url) in _WEB:
        return False
    with _sentences(url):
        return bool(_file_system(url).isdir(url))


def _url(scheme: str, path: str) -> str:
    return (
        path if is_remote(path) else f"{scheme}://{path.lstrip('/') if scheme != 'file' else path}"
    )


def _file_system(url: str) -> Any:
    scheme = scheme_of(url)
    if scheme not in SCHEMES:
        raise InputError(
            f"fragdoctor cannot read {scheme}:// URLs.",
            hint=f"It reads {', '.join(f'{s}://' for s in ('s3', 'gs', 'abfs', 'https'))} and "
            "others; or copy the file here.",
        )
    import fsspec  # type: ignore[import-untyped]

    options: dict[str, Any] = {}
    if scheme in _WEB:
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=_SILENCE_S)
        options["client_kwargs"] = {"timeout": timeout}
    return fsspec.filesystem(scheme, **options)


class _RemoteFile(io.RawIOBase):
    """A file opened by fsspec, with errors turned into sentences for the user."""

    def __init__(self, raw: Any, url: str) -> None:
        self._raw = raw
        self._url = url

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return scheme_of(self._url) not in _WEB

    def seek(self, offset: int, whence: int = 0) -> int:
        with _sentences(self._url):
            return int(self._raw.seek(offset, whence))

    def tell(self) -> int:
        return int(self._raw.tell())

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        with _sentences(self._url):
            data = self._raw.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._raw.close()
        super().close()


@contextmanager
def _sentences(url: str) -> Iterator[None]:
    """Turn errors of fsspec and the libraries below it into one sentence."""
    try:
        yield
    except (InputError, ConfigError, MemoryError):
        raise
    except ImportError as e:
        raise _missing(url, e) from e
    except Exception as e:  # a dozen libraries, each with its own errors
        raise _explained(url, e) from e


def _missing(url: str, error: ImportError) -> InputError:
    package = SCHEMES.get(scheme_of(url), "fsspec")
    is_extra = package in ("aiohttp", "fsspec") or (error.name or "") == "fsspec"
    name = "fsspec" if (error.name or "") == "fsspec" else package
    hint = _INSTALL if is_extra else f"Run: pip install {package}"
    return InputError(f"{scheme_of(url)}:// cannot be read without {name}.", hint=hint)


def _explained(url: str, error: Exception) -> InputError:
    """Return the sentence for an error by its class names, since the classes may not be loaded."""
    shown = without_secrets(url)
    names = {kind.__name__ for kind in type(error).__mro__}
    status = getattr(error, "status", None)
    for kinds, statuses, sentence, hint in _ANSWERS:
        if names & kinds or status in statuses:
            return InputError(sentence.format(shown), hint=hint)
    if "ClientPayloadError" in names or "IncompleteRead" in names:
        return TruncatedSnapshot(
            f"{shown} broke off while it was read.", hint="Try again; the server stopped early."
        )
    if isinstance(status, int):
        return InputError(f"{shown} cannot be read: the server answered {status}.")
    reason = getattr(error, "strerror", None) or type(error).__name__
    return InputError(f"{shown} cannot be read: {reason}.", hint="Check the URL and the network.")


_ANSWERS: Final = (
    ({"FileNotFoundError"}, (404,), "{} does not exist.", "Check the URL."),
    (
        {"NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError"},
        (),
        "{} cannot be read: there are no credentials.",
        "Set them up for the server, as with AWS_PROFILE or GOOGLE_APPLICATION_CREDENTIALS.",
    ),
    (
        {"PermissionError"},
        (401, 403),
        "{} may not be read: access is denied.",
        "Check the credentials.",
    ),
    (
        {"ClientConnectorError", "ConnectionError", "EndpointConnectionError", "FSTimeoutError"}
        | {"ServerTimeoutError", "TimeoutError"},
        (),
        "The server of {} cannot be reached.",
        "Check the URL and the network.",
    ),
)
"""Class names of errors, and status codes of servers, with the sentence and hint for each."""
