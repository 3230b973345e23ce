"""A store by its URL."""

from __future__ import annotations

import re
import urllib.parse

from jaxkv._util import did_you_mean, shown
from jaxkv.transfer.storage.local import LocalStore
from jaxkv.transfer.storage.mooncake_store import MooncakeStore
from jaxkv.transfer.storage.redis_store import RedisStore
from jaxkv.transfer.storage.store import (
    REDIS_SCHEMES,
    BlobStore,
    memory_store,
    shown_url,
)
from jaxkv.transfer.storage.tensor_store import open_gs, open_s3

_MOST_LETTERS = 2000
_BUCKETS = ("s3", "gs")
SCHEMES = ("file", *_BUCKETS, *REDIS_SCHEMES, "mooncake", "memory")

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
# What a user meant to be a URL, or to be in a shell, and would be a folder here.
_NEARLY_URL = re.compile(
    f"({'|'.join(map(re.escape, SCHEMES))}):.*", re.DOTALL | re.IGNORECASE
)
_OF_A_SHELL = re.compile(r"[~$].*", re.DOTALL)


def open_store(url: str) -> BlobStore:
    """Open a store.

    Args:
        url: One of these:

            ``file:///PATH``, or a path: a folder. ``?mode=660`` lets its group use it.
            ``s3://BUCKET/PREFIX`` (extra ``storage``), with ``?endpoint=URL`` for what
            is not of AWS, and ``?region=NAME``.
            ``gs://BUCKET/PREFIX`` (extra ``storage``).
            ``redis://HOST:PORT``, ``rediss://``, ``unix:///SOCKET`` (extra ``redis``).
            ``redis+cluster://HOST:PORT,HOST:PORT``, ``rediss+cluster://`` (likewise).
            ``mooncake://HOST:PORT`` (extra ``mooncake``), with what `MooncakeStore`
            takes.
            ``memory://NAME``: the memory of this process.

    Raises:
        ValueError: The URL is malformed, or of no kind that there is.
        ImportError: An extra is missing.
        StoreError: The place cannot be used.

    Example:
        >>> open_store("memory://example").url
        'memory://example'
    """
    if not isinstance(url, str) or not 0 < len(url) <= _MOST_LETTERS:
        raise ValueError(
            f"storage={_shown(url)} must be a URL or the path of a folder."
        )
    if not url.isprintable() or url != url.strip():
        raise ValueError(
            f"storage={_shown(url)} must not have what cannot be printed, nor spaces "
            "around it."
        )
    check_kind(url)
    folder = folder_of(url)
    if folder is not None:
        return LocalStore(*folder)
    scheme = _scheme_of(url)
    if scheme == "memory":
        return memory_store(url.partition("://")[2])
    if scheme == "s3":
        return open_s3(url)
    if scheme == "gs":
        return open_gs(url)
    if scheme == "mooncake":
        return MooncakeStore(url)
    return RedisStore(scheme + url[len(scheme) :])


def check_kind(url: str) -> None:
    """Refuse a URL of no kind that there is, before anything is opened.

    Raises:
        ValueError: It is of no kind that there is, or the URL of a folder is malformed.
    """
    scheme = _scheme_of(url)
    if folder_of(url) is None and scheme not in SCHEMES:
        raise ValueError(
            f"storage={_shown(url)}: unknown {shown(scheme)}: "
            f"{did_you_mean(scheme, SCHEMES)}"
        )


def folder_of(url: str) -> tuple[str, int] | None:
    """Give the path of a folder, and the permissions of its files; None for no folder.

    Raises:
        ValueError: The URL is malformed.

    >>> folder_of("file:///var/cache/kv?mode=660") == ("/var/cache/kv", 0o660)
    True
    """
    scheme = _scheme_of(url)
    if scheme:
        try:
            urllib.parse.urlsplit(url)
        except ValueError:  # Which may have a password in its message.
            raise ValueError(f"storage={_shown(url)} cannot be read.") from None
        return _path_and_mode(url) if scheme == "file" else None
    if (match := _NEARLY_URL.fullmatch(url)) is not None:
        start = "file:///" if match[1].lower() == "file" else f"{match[1].lower()}://"
        raise ValueError(
            f"storage={_shown(url)} must begin with {start} to be a URL; a folder of "
            "this name is one with ./ before it."
        )
    if _OF_A_SHELL.fullmatch(url):
        raise ValueError(
            f"storage={_shown(url)} must be the path itself: ~ and variables are not "
            "replaced here; a folder of this name is one with ./ before it."
        )
    return url, 0o600


def extra_of(url: str) -> str | None:
    """Name the extra that the store of a URL needs.

    >>> extra_of("redis://localhost"), extra_of("/var/cache/kv")
    ('redis', None)
    """
    scheme = _scheme_of(url)
    if scheme in REDIS_SCHEMES:
        return "redis"
    if scheme == "mooncake":
        return "mooncake"
    return "storage" if scheme in _BUCKETS else None


def default_probe_s(url: str) -> float:
    """Say how long a request may wait for a store's answer; 0 where that costs money.

    >>> default_probe_s("/var/cache/kv"), default_probe_s("s3://bucket/kv")
    (0.005, 0.0)
    """
    return 0.0 if _scheme_of(url) in _BUCKETS else 0.005


def _shown(url: object) -> str:
    """Write a URL for a message, without secrets."""
    return shown(shown_url(url) if isinstance(url, str) else url)


def _scheme_of(url: str) -> str:
    match = _URL.fullmatch(url)
    return match[1].lower() if match else ""


def _path_and_mode(url: str) -> tuple[str, int]:
    parts = urllib.parse.urlsplit(url)
    options = urllib.parse.parse_qs(parts.query, keep_blank_values=True)
    mode = options.pop("mode", ["600"])[-1]
    is_odd = parts.netloc not in ("", "localhost") or "#" in url
    if is_odd or not parts.path or options:
        raise ValueError(
            f"storage={_shown(url)} must be file:///PATH, with ?mode=660 or the like "
            "if others than its owner may use it, and %23 for # in a name."
        )
    if not re.fullmatch(r"0?6[0-6][0-6]", mode):
        raise ValueError(
            f"storage={_shown(url)}: mode={shown(mode)} must be permissions of files "
            "such as 600 or 660."
        )
    try:
        path = urllib.parse.unquote(parts.path, errors="strict")
    except UnicodeDecodeError:
        path = ""
    if not path.isprintable() or not path:
        raise ValueError(
            f"storage={_shown(url)} must have a path that can be printed, in UTF-8."
        )
    return path, int(mode, 8)
