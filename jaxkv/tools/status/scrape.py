"""A page of metrics, read over HTTP in Prometheus' text format."""

from __future__ import annotations

import contextlib
import http.client
import re
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias
from urllib.parse import urlsplit

from jaxkv._util import shown
from jaxkv.tools.usage import CommandError, UsageError

TIMEOUT_S = 5.0
_MAX_BYTES = 64 << 20
# A value that is not finite is no sample.
_SAMPLE = re.compile(
    r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (-?\d\S*)(?: \d+)?$", re.MULTILINE
)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
# A proxy of the environment does not reach this machine's loopback.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))

Samples: TypeAlias = Sequence[tuple[Mapping[str, str], float]]
"""The samples of a metric: labels and value."""


class NoAnswerError(CommandError):
    """An engine that has not answered, or something else that has."""


class Page(NamedTuple):
    """The samples of all metrics, by name."""

    time_s: float  # When it was read, in seconds since some moment.
    samples: Mapping[str, Samples]


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
    place = urlsplit(url).netloc
    request = urllib.request.Request(url, headers={"Accept": "text/plain"})
    try:
        with _OPENER.open(request, timeout=TIMEOUT_S) as answer:
            text = answer.read(_MAX_BYTES).decode("utf-8", "replace")
    except urllib.error.HTTPError as error:
        raise NoAnswerError(
            f"{url} answers {error.code} {error.reason}: give the URL of the engine's "
            "metrics, with its path"
        ) from error
    except (OSError, http.client.HTTPException) as error:
        raise NoAnswerError(_reason(place, error)) from error
    page = parse(text, time.monotonic())
    if not any(name.startswith("jaxkv:") for name in page.samples):
        raise NoAnswerError(
            f"{url} is not a jaxkv engine: of the {len(page.samples)} metrics in its "
            "answer, none begins with jaxkv:"
        )
    return page


def parse(text: str, time_s: float) -> Page:
    """Read a page in Prometheus' text format; other lines are skipped."""
    samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    for name, labels, value in _SAMPLE.findall(text):
        with contextlib.suppress(ValueError):
            sample = dict(_LABEL.findall(labels)), float(value)
            samples.setdefault(name, []).append(sample)
    return Page(time_s, samples)


def _reason(place: str, error: Exception) -> str:
    is_connected = not isinstance(error, urllib.error.URLError)
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    match cause:
        case ConnectionRefusedError():
            return (
                f"nothing listens at {place}: the engine has ended or was killed, or "
                "its metrics are at another port"
            )
        case TimeoutError() if is_connected:
            return (
                f"{place} accepts connections but has not answered for {TIMEOUT_S:g} "
                "s: the engine is stopped or hangs"
            )
        case TimeoutError():
            return f"{place} cannot be reached within {TIMEOUT_S:g} s"
        case ConnectionResetError() | http.client.RemoteDisconnected():
            return (
                f"{place} closed the connection: the engine has ended or was killed, "
                "or it is not a jaxkv engine"
            )
        case http.client.BadStatusLine():
            return f"{place} does not answer in HTTP: it is not a jaxkv engine"
        case socket.gaierror():
            return f"{place}: unknown host ({cause.strerror})"
    return f"{place} cannot be read ({getattr(cause, 'strerror', None) or cause})"
