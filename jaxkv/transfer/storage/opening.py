"""A store by its URL."""

from __future__ import annotations

from jaxkv.transfer.storage.local import LocalStore
from jaxkv.transfer.storage.redis_store import RedisStore
from jaxkv.transfer.storage.store import BlobStore, memory_store
from jaxkv.transfer.storage.store_url import SCHEMES, StoreUrl, registered_store
from jaxkv.transfer.storage.tensor_store import open_gs, open_s3


def open_store(text: str) -> BlobStore:
    """Open the store of a URL or a folder's path (docs/storage.md has their forms).

    ValueError: the URL is malformed. ImportError: an extra is missing. StoreError: the
    place cannot be used.
    """
    url = StoreUrl.parse(text)
    if url.is_folder:
        return LocalStore(url.path, url.mode)
    if url.scheme == "memory":
        return memory_store(url.path)
    if url.is_bucket:
        return open_s3(url) if url.scheme == "s3" else open_gs(url)
    if url.scheme in SCHEMES:
        return RedisStore(url)
    entry = registered_store(url.scheme)
    assert entry is not None
    store: BlobStore = entry.load()(url)
    return store
