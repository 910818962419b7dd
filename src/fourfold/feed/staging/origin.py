"""Origin: where the files of a data set are: a folder, or a URL of what `fsspec` reads (http, s3, gs, …).

permanent  an error that another attempt cannot mend, such as a file that is missing; all others are retried
Law: an origin that is unreachable for a while changes when bytes arrive, and nothing else.
"""

import logging
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from fourfold.environment.known_waits import waiting_for
from fourfold.words.errors import DataError, Problem

log = logging.getLogger("fourfold")

Result = TypeVar("Result")
PERMANENT_ERRORS = (
    *(DataError, FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError),
    *(ImportError, NotImplementedError, TypeError, ValueError, LookupError, AttributeError, MemoryError),
)
PACKAGES = {
    "http": "'fourfold[http]'",
    "https": "'fourfold[http]'",
    "s3": "'fourfold[s3]'",
    "gs": "gcsfs",
    "az": "adlfs",
}
HTTP = ("http://", "https://")
CREDENTIALS = re.compile(r"//[^/\s]*@")  # in a URL
SILENT_SECONDS = 20.0  # of an attempt: without a byte; a transfer may take any time. S3's package has 15
RETRIED_STATUS = (408, 425, 429)  # of HTTP: of the errors that are the client's, those that pass


@dataclass(frozen=True)
class Backoff:
    """How long to wait between attempts, in seconds: twice as long each time, up to `longest`, `give_up` in all."""

    first: float = 0.5
    longest: float = 30.0
    give_up: float = 900.0

    def delays(self) -> Iterator[float]:
        """The delays, each shortened at random by up to a half, so that ranks do not all come back at once."""
        begin, total, delay = time.monotonic(), 0.0, self.first
        while max(total, time.monotonic() - begin) < self.give_up:  # attempts take time too
            yield delay * random.uniform(0.5, 1.0)
            total += delay
            delay = min(2 * delay, self.longest)


class Origin(Protocol):
    """The files of one data set, by name."""

    @property
    def url(self) -> str:
        """For people: without a password."""
        ...

    def read(self, name: str, start: int, stop: int) -> bytes:
        """The bytes [start, stop) of a file. Raises DataError if it has fewer, or if the origin gives up."""
        ...

    def read_up_to(self, name: str, max_bytes: int) -> bytes:
        """A whole file of unknown size. Raises DataError if it has more bytes, or if the origin gives up."""
        ...


class FolderOrigin:
    """A folder of this host, or of a file system that is mounted."""

    def __init__(self, folder: Path, *, backoff: Backoff | None = None) -> None:
        self._folder, self._backoff = folder, backoff or Backoff()
        self.url = str(folder)

    def read(self, name: str, start: int, stop: int) -> bytes:
        return check_length(self._read_range(name, start, stop), name, start, stop, self.url)

    def read_up_to(self, name: str, max_bytes: int) -> bytes:
        return check_size(self._read_range(name, 0, max_bytes + 1), name, max_bytes, self.url)

    def _read_range(self, name: str, start: int, stop: int) -> bytes:
        return retry(lambda: _read_file(self._folder / name, start, stop), f"{self.url}/{name}", self._backoff)


def _read_file(path: Path, start: int, stop: int) -> bytes:
    """The bytes [start, stop) of a file, or those that it has of them."""
    content = b""
    with path.open("rb", buffering=0) as file:
        count = min(stop, os.fstat(file.fileno()).st_size) - start
        while len(content) < count and (more := os.pread(file.fileno(), count - len(content), start + len(content))):
            content = content + more if content else more
    return content


class RemoteOrigin:
    """What fsspec reads under a URL. Safe to use from several threads, and after a fork."""

    def __init__(self, url: str, *, backoff: Backoff | None = None, **options: Any) -> None:
        """Raises DataError for a URL that fsspec does not know."""
        if "?" in url:
            need = "the URL of a folder, to which names of files are added"
            raise DataError(Problem(f"{without_password(url)}?…", need, "the URL without its query"))
        self._given, self._options, self._backoff = url, options, backoff or Backoff()
        self.url = without_password(url)
        self._lock, self._opened = threading.Lock(), (0, None, "")
        retry(self._open, self.url, self._backoff)  # some file systems, such as ftp, connect

    def read(self, name: str, start: int, stop: int) -> bytes:
        return check_length(self._read_range(name, start, stop), name, start, stop, self.url)

    def read_up_to(self, name: str, max_bytes: int) -> bytes:
        return check_size(self._read_range(name, 0, max_bytes + 1), name, max_bytes, self.url)

    def _read_range(self, name: str, start: int, stop: int) -> bytes:
        """Bytes of a file; more of them, or others, of a server that does not answer range requests."""

        def attempt() -> bytes:
            file_system, root = self._open()
            if root.startswith(HTTP):
                return _read_http(file_system, f"{root}/{name}", start, stop)
            return file_system.cat_file(f"{root}/{name}", start=start, end=stop)

        return retry(attempt, f"{self.url}/{name}", self._backoff)

    def _open(self) -> tuple[Any, str]:
        with self._lock:
            process, file_system, root = self._opened
            if process != os.getpid():  # its threads and connections are those of the process that made it
                file_system, root = _open_url(self._given, self._options)
                self._opened = os.getpid(), file_system, root
        return file_system, root


def open_origin(place: str | os.PathLike[str], *, backoff: Backoff | None = None, **options: Any) -> Origin:
    """The origin at a path or a URL; `options` are those of fsspec's file system, such as `anon=True` of s3.

    Raises DataError if there is none, or a package is missing.
    """
    text = os.fspath(place)
    if "://" in text and not text.startswith("file://"):
        return RemoteOrigin(text, backoff=backoff, **options)
    folder = Path(text.removeprefix("file://"))
    if not folder.is_dir():
        raise DataError(Problem(f"{folder}, which is no folder", "a folder, or a URL such as s3://bucket/data"))
    return FolderOrigin(folder, backoff=backoff)


def _open_url(url: str, options: dict[str, Any]) -> tuple[Any, str]:
    try:
        import fsspec

        file_system, root = fsspec.core.url_to_fs(url, **_with_timeouts(url.partition("://")[0], options))
    except ImportError as error:
        protocol = url.partition("://")[0]
        attempt = f"pip install {PACKAGES[protocol]}" if protocol in PACKAGES else ""
        raise DataError(Problem(str(error), f"the package that reads {protocol}://", attempt)) from None
    except ValueError as error:
        raise DataError(Problem(f"{without_password(url)}: {error}", "a URL that fsspec knows")) from None
    return file_system, str(root).rstrip("/")


def _read_http(file_system: Any, url: str, start: int, stop: int) -> bytes:
    """At most one byte more than the range has, whatever the server sends: fsspec would read all of it."""
    from fsspec.asyn import sync

    headers = {**file_system.kwargs.get("headers", {}), "Range": f"bytes={start}-{stop - 1}"}

    async def read() -> bytes:
        session = await file_system.set_session()
        async with session.get(file_system.encode_url(url), **file_system.kwargs | {"headers": headers}) as response:
            if response.status == 404:
                raise FileNotFoundError(url)
            response.raise_for_status()
            content = bytearray()
            while part := await response.content.read(stop - start + 1 - len(content)):
                content += part
            return bytes(content)

    content: Any = b"" if start == stop else sync(file_system.loop, read)
    return content


def _with_timeouts(protocol: str, options: dict[str, Any]) -> dict[str, Any]:
    """The options, and where they name none the limits of what by default waits for minutes, or for ever."""
    if protocol in ("az", "abfs", "abfss"):
        return {"connection_timeout": SILENT_SECONDS, "read_timeout": SILENT_SECONDS, **options}
    if protocol not in ("http", "https", "gs", "gcs"):
        return options
    import aiohttp

    timeout = aiohttp.ClientTimeout(sock_connect=SILENT_SECONDS, sock_read=SILENT_SECONDS)
    if protocol in ("gs", "gcs"):
        return {"requests_timeout": timeout, **options}
    return {**options, "client_kwargs": {"timeout": timeout} | options.get("client_kwargs", {})}


def check_length(content: bytes, name: str, start: int, stop: int, where: str) -> bytes:
    """The content. Raises DataError unless it is as long as the range [start, stop)."""
    if len(content) == stop - start:
        return content
    got = f"{len(content)} bytes of {name} for the range {start} to {stop}"
    if len(content) > stop - start:
        raise DataError(Problem(got, "a server that answers range requests", "one that does (nginx, S3)"), where=where)
    raise DataError(Problem(got, f"{stop - start}: the file is shorter than its manifest says"), where=where)


def check_size(content: bytes, name: str, max_bytes: int, where: str) -> bytes:
    """The content. Raises DataError if it is longer than the file may be."""
    if len(content) > max_bytes:
        raise DataError(Problem(f"{name} of {len(content)} bytes or more", f"at most {max_bytes}"), where=where)
    return content


def retry(
    attempt: Callable[[], Result],
    what: str,
    backoff: Backoff,
    *,
    may_pass: Callable[[Exception], bool] | None = None,
) -> Result:
    """What `attempt` returns. Errors that may pass are logged, and it is called again. Raises DataError.

    `may_pass`: whether another attempt may succeed after an error; None: all but permanent ones.
    """
    delays, begin = backoff.delays(), time.monotonic()
    with waiting_for(what) as say:
        while True:
            try:
                return attempt()
            except Exception as error:
                got = f"{what}: {_first_line(error)}"
                if not (may_pass or _may_pass)(error):
                    if isinstance(error, DataError):
                        raise
                    raise DataError(Problem(got, "a readable file")) from error
                delay = next(delays, None)
                if delay is None:
                    got = f"{got}, for {time.monotonic() - begin:.0f} s"
                    raise DataError(Problem(got, "an origin that can be reached")) from error
                say(got)
                log.warning(f"{got}; again in {delay:.1f} s")
                time.sleep(delay)


def _may_pass(error: Exception) -> bool:
    status = getattr(error, "status", None)  # of aiohttp, for an answer that is an error
    is_answer = error.__cause__ is None  # else one that aiohttp could not read, to which it gives status 400
    if is_answer and isinstance(status, int) and 400 <= status < 500:
        return status in RETRIED_STATUS
    return not isinstance(error, PERMANENT_ERRORS)


def _first_line(error: Exception) -> str:
    text, name = str(error).strip(), type(error).__name__
    if not text and error.__cause__ is not None:  # of fsspec, which names a timeout and leaves out of what
        text = str(error.__cause__).strip()
    text = CREDENTIALS.sub("//", text)
    if "/" in text and " " not in text:  # the URL of a missing file, and nothing else
        text = f"{name}: {text}"
    return text.splitlines()[0][:200] if text else name


def without_password(url: str) -> str:
    """The URL without the name and password in front of its host, and without its query, which may hold a token."""
    scheme, separator, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}{separator}{host.rpartition('@')[2]}{slash}{path.partition('?')[0]}".rstrip("/")
