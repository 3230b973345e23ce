"""A store by its URL."""

from __future__ import annotations

import re
import urllib.parse

from jaxkv._util import did_you_mean, shown
from jaxkv.transfer.storage.local import LocalStore
from jaxkv.transfer.storage.redis_store import RedisStore
from jaxkv.transfer.storage.store import BlobStore, memory_store
from jaxkv.transfer.storage.tensor_store import open_gs, open_s3

_MOST_LETTERS = 2000
SCHEMES = ("file", "s3", "gs", "redis", "rediss", "unix", "memory")

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://(.*)", re.DOTALL)


def open_store(url: str) -> BlobStore:
    """Open a store.

    Args:
        url: One of these:

            ``file:///PATH``, or a path: a folder. ``?mode=660`` lets its group use it.
            ``s3://BUCKET/PREFIX`` (extra ``storage``), with ``?endpoint=URL`` for what
            is not of AWS, and ``?region=NAME``.
            ``gs://BUCKET/PREFIX`` (extra ``storage``).
            ``redis://HOST:PORT``, ``rediss://``, ``unix:///SOCKET`` (extra ``redis``).
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
        raise ValueError(f"storage={shown(url)} must be a URL or the path of a folder.")
    if not url.isprintable():
        raise ValueError(f"storage={shown(url)} must not have what cannot be printed.")
    match = _URL.fullmatch(url)
    if not match:
        return LocalStore(url)
    scheme, rest = match[1].lower(), match[2]
    if scheme == "file":
        return _open_local(url)
    if scheme == "memory":
        return memory_store(rest)
    if scheme == "s3":
        return open_s3(url)
    if scheme == "gs":
        return open_gs(url)
    if scheme in ("redis", "rediss", "unix"):
        return RedisStore(url)
    raise ValueError(
        f"storage={shown(url)}: unknown {shown(scheme)}: "
        f"{did_you_mean(scheme, SCHEMES)}"
    )


def _open_local(url: str) -> LocalStore:
    parts = urllib.parse.urlsplit(url)
    options = urllib.parse.parse_qs(parts.query, keep_blank_values=True)
    mode = options.pop("mode", ["600"])[-1]
    if parts.netloc not in ("", "localhost") or not parts.path or options:
        raise ValueError(
            f"storage={shown(url)} must be file:///PATH, with ?mode=660 or the like "
            "if others than its owner may use it."
        )
    if not re.fullmatch(r"0?6[0-6][0-6]", mode):
        raise ValueError(
            f"storage={shown(url)}: mode={shown(mode)} must be permissions of files "
            "such as 600 or 660."
        )
    return LocalStore(urllib.parse.unquote(parts.path), int(mode, 8))
