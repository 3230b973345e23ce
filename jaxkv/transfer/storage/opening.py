"""A store by its URL."""

from __future__ import annotations

from jaxkv.transfer.storage.local import LocalStore
from jaxkv.transfer.storage.mooncake_store import MooncakeStore
from jaxkv.transfer.storage.redis_store import RedisStore
from jaxkv.transfer.storage.store import BlobStore, memory_store
from jaxkv.transfer.storage.store_url import BUCKET_SCHEMES, StoreUrl
from jaxkv.transfer.storage.tensor_store import open_gs, open_s3


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
    place = StoreUrl.parse(url)
    if place.is_folder:
        return LocalStore(place.path, place.mode)
    if place.scheme == "memory":
        return memory_store(place.text.partition("://")[2])
    if place.scheme == "s3":
        return open_s3(url)
    if place.scheme == "gs":
        return open_gs(url)
    if place.scheme == "mooncake":
        return MooncakeStore(url)
    return RedisStore(url)


def default_probe_s(url: str) -> float:
    """Return how long a request may wait for a store; 0 where that costs money.

    Raises:
        ValueError: The URL is malformed.

    >>> default_probe_s("/var/cache/kv"), default_probe_s("s3://bucket/kv")
    (0.005, 0.0)
    """
    return 0.0 if StoreUrl.parse(url).scheme in BUCKET_SCHEMES else 0.005
