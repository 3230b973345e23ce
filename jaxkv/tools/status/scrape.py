"""A page of metrics, read over HTTP in Prometheus' text format.

The page may come from anything that listens: its bytes, its time and its values are
bounded before they are kept.
"""

from __future__ import annotations

import contextlib
import http.client
import re
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from typing import NamedTuple, TypeAlias
from urllib.parse import urlsplit

from jaxkv._util import shown, shown_name
from jaxkv.tools.usage import CommandError, UsageError

TIMEOUT_S = 5.0  # For the whole answer
MAX_BYTES = 16 << 20
_MAX_LINE = 8192
_MIN_VALUE, _MAX_VALUE = 1e-12, 1e18
_SAMPLE = re.compile(
    r"((?:jaxkv|vllm):\w+)(?:\{(.*)\})?[ \t]+([-+.\w]+)(?:[ \t]+-?\d+)?", re.ASCII
)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

Samples: TypeAlias = Mapping[str, Mapping[tuple[tuple[str, str], ...], float]]
"""Values from 0 to 1e18, by metric and by sorted labels."""


class NoAnswerError(CommandError):
    """An engine that has not answered, or something else that has."""


class Page(NamedTuple):
    """The samples of jaxkv's and vLLM's metrics."""

    time_s: float  # When it was read, in seconds since some moment.
    samples: Samples


def full_url(text: str) -> str:
    """Complete the address of an engine's metrics.

    >>> full_url("9400"), full_url("host:9400/")
    ('http://127.0.0.1:9400/metrics', 'http://host:9400/metrics')
    """
    url = f"127.0.0.1:{text}" if text.isdecimal() else text
    url = url if "://" in url else f"http://{url}"
    try:
        split = urlsplit(url)
        host = (split.hostname or "").encode("idna")  # Raises if no host has the name.
        is_valid = split.scheme in ("http", "https") and bool(host)
        _ = split.port  # Raises if it is not a port.
    except ValueError:
        is_valid = False
    if is_valid and "@" in split.netloc:
        raise UsageError("URL: give it without user and password: they are not sent")
    if not is_valid or not (url.isascii() and url.isprintable()) or " " in url:
        raise UsageError(
            f"URL: {shown(text)} must be the address of an engine's metrics, such as "
            "http://127.0.0.1:9400/metrics, HOST:PORT or PORT"
        )
    return url if split.path.strip("/") else f"{url.rstrip('/')}/metrics"


def read_page(url: str) -> Page:
    """Read an engine's metrics; raise NoAnswerError with the reason if it cannot."""
    answer, sockets = Future[bytes](), list[socket.socket]()

    def read() -> None:
        try:
            answer.set_result(_read(url, sockets))
        except Exception as error:
            answer.set_exception(error)

    # A server may drip: every byte comes in time, and the answer never ends.
    threading.Thread(target=read, name="jaxkv status", daemon=True).start()
    try:
        raw = answer.result(TIMEOUT_S)
    except (OSError, http.client.HTTPException, ValueError) as error:
        place = urlsplit(url).netloc
        raise NoAnswerError(_reason(place, error, bool(sockets))) from error
    finally:
        for guard in sockets:
            with contextlib.suppress(OSError), guard:
                guard.shutdown(socket.SHUT_RDWR)
    page = parse(raw.decode("utf-8", "replace"), time.monotonic())
    if not raw.endswith(b"\n") and b"\n" in raw:
        raise NoAnswerError(f"{url} answers with a page that ends within a line")
    if not any(name.startswith("jaxkv:") for name in page.samples):
        num = len(raw.splitlines())
        raise NoAnswerError(
            f"{url} is not a jaxkv engine: none of the {num:,} lines in its answer is "
            "a value of a metric that begins with jaxkv:"
        )
    return page


def parse(text: str, time_s: float) -> Page:
    """Read a page in Prometheus' text format; other lines are skipped."""
    samples: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for line in text.split("\n"):
        match = _SAMPLE.fullmatch(line.rstrip()) if len(line) <= _MAX_LINE else None
        if match is None:
            continue
        with contextlib.suppress(ValueError):
            value = float(match[3])
            if value == 0 or _MIN_VALUE <= value <= _MAX_VALUE:
                labels = tuple(sorted(_LABEL.findall(match[2] or "")))
                samples.setdefault(match[1], {})[labels] = value
    return Page(time_s, samples)


def _read(url: str, sockets: list[socket.socket]) -> bytes:
    """Read an answer, which must be complete, uncompressed and from the URL itself."""
    split = urlsplit(url)
    is_https, host = split.scheme == "https", split.hostname or ""
    address = host, split.port or (443 if is_https else 80)
    target = f"{split.path}?{split.query}" if split.query else split.path
    # A proxy of the environment would not reach this machine's loopback.
    connection = http.client.HTTPConnection(*address)
    with (
        socket.create_connection(address, TIMEOUT_S) as plain,
        contextlib.closing(connection),
    ):
        sockets.append(plain.dup())  # TLS takes over the descriptor.
        connection.sock = plain
        if is_https:
            context = ssl.create_default_context()
            connection.sock = context.wrap_socket(plain, server_hostname=host)
        connection.request("GET", target, headers={"Accept": "text/plain"})
        with connection.getresponse() as answer:
            coding = answer.getheader("Content-Encoding")
            raw = b"" if coding else answer.read(MAX_BYTES + 1)
    fault = ""
    if answer.status != http.client.OK:
        fault = f"{answer.status} {shown_name(answer.reason)}: give the URL of the "
        fault += "engine's metrics, with its path"
    elif coding:
        fault = f"in {shown(coding)}, not plain text"
    elif len(raw) > MAX_BYTES:
        fault = f"with over {MAX_BYTES >> 20} MiB: give the URL of one engine's metrics"
    elif answer.length:
        raise http.client.IncompleteRead(raw, answer.length)
    if fault:
        raise NoAnswerError(f"{url} answers {fault}")
    return raw


def _reason(place: str, error: Exception, is_connected: bool) -> str:
    match error:
        case TimeoutError() if is_connected:
            why = (
                f"accepts connections but has not answered for {TIMEOUT_S:g} s: the "
                "engine is stopped or hangs"
            )
        case TimeoutError():
            why = f"cannot be reached within {TIMEOUT_S:g} s"
        case ConnectionRefusedError():
            return (
                f"nothing listens at {place}: the engine has ended or was killed, or "
                "its metrics are at another port"
            )
        case ConnectionResetError() | http.client.RemoteDisconnected():
            why = (
                "closed the connection: the engine has ended or was killed, or it is "
                "not a jaxkv engine"
            )
        case http.client.IncompleteRead():
            why = "closed the connection before the end of its page"
        case http.client.BadStatusLine():
            why = "does not answer in HTTP: it is not a jaxkv engine"
        case socket.gaierror():
            why = f"is an unknown host ({error.strerror})"
        case _:
            cause = getattr(error, "strerror", None) or shown(error)
            why = f"cannot be read ({cause})"
    return f"{place} {why}"
