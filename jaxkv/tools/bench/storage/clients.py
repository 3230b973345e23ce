"""Plain calls of a store's own client library, beside which the store stands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from jaxkv.transfer.storage import BlobStore, StoreError
from jaxkv.transfer.storage.mooncake_store import MooncakeStore
from jaxkv.transfer.storage.redis_store import RedisStore
from jaxkv.transfer.storage.store_url import StoreUrl

Blocks: TypeAlias = Sequence[NDArray[np.uint8]]


class Client(NamedTuple):
    """A client, as a program of a few lines would use it.

    Attributes:
        prepare: Called with the blocks before the time is taken.
        write: Writes them under names.
        read: Reads what has these names.
        close: Ends it.
    """

    prepare: Callable[[Blocks], None]
    write: Callable[[Sequence[str], Blocks], None]
    read: Callable[[Sequence[str]], None]
    close: Callable[[], None]


def client_of(
    store: BlobStore, url: str, num_blocks: int, block_bytes: int, num_at_once: int
) -> Client | None:
    """Make a client of a store's library; None for those that have no such side.

    Args:
        store: The store.
        url: Its URL, with user and password.
        num_blocks: Blocks that are written, and read.
        block_bytes: Bytes of a block.
        num_at_once: Blocks of a call, where one takes several.

    Raises:
        StoreError: The store cannot be reached.
    """
    if isinstance(store, RedisStore) and not store.is_cluster:
        return _redis(url)
    if isinstance(store, MooncakeStore):
        return _mooncake(store.client(), num_blocks, block_bytes, num_at_once)
    return None


def _redis(url: str) -> Client:
    """One value a call, on one connection."""
    import redis

    client = redis.Redis.from_url(StoreUrl.parse(url).text)

    def write(names: Sequence[str], blocks: Blocks) -> None:
        for name, block in zip(names, blocks, strict=True):
            client.set(name, block.data)

    def read(names: Sequence[str]) -> None:
        for name in names:
            client.get(name)

    return Client(lambda blocks: None, write, read, client.close)


def _mooncake(
    client: Any, num_blocks: int, block_bytes: int, num_at_once: int
) -> Client:
    """Several objects a call, from and into memory that the client knows."""
    memory = np.zeros((num_blocks, block_bytes), np.uint8)
    addresses = [int(row.ctypes.data) for row in memory]
    _check(client.register_buffer(addresses[0], memory.nbytes))

    def prepare(blocks: Blocks) -> None:
        np.copyto(memory, blocks)

    def call(names: Sequence[str], move: Callable[..., list[int]]) -> None:
        for first in range(0, num_blocks, num_at_once):
            part = slice(first, first + num_at_once)
            sizes = [block_bytes] * len(names[part])
            for code in move(names[part], addresses[part], sizes):
                _check(code)

    return Client(
        prepare,
        lambda names, _: call(names, client.batch_put_from),
        lambda names: call(names, client.batch_get_into),
        lambda: client.unregister_buffer(addresses[0]),
    )


def _check(code: int) -> None:
    if code < 0:
        raise StoreError("other", f"Mooncake fails (code {code})")
