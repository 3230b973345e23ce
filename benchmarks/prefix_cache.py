"""Bytes held and prefill saved by a prefix cache of blocks, next to whole prompts.

Fifty prompts with shared beginnings go through a driver with JetStream's calls, over a
small transformer with chunked prefill: without a cache, with jaxkv's `PrefixCache`, and
with one that keeps whole caches as JetStream's does (`WholePrefixCache`, a stand-in of
ours), each with room for everything and with `--host-bytes`. Every answer has to be the
same. Bytes are on the host: held in the end, and set aside for it. Prefill work
is counted in chunks, each one call of the engine's `prefill`. Nothing is timed: how
fast a stand-in is says nothing of JetStream.

    python benchmarks/prefix_cache.py [--prompts N] [--host-bytes BYTES] [--json FILE]
"""

from __future__ import annotations

import collections
import dataclasses
import threading
from typing import Any

import jax
import numpy as np

from common import make_parser, show_machine, write_figures
from examples.jetstream_prefix_cache import AXES
from examples.jetstream_prefix_cache import TinyEngine as Engine
from jaxkv import Extras
from jaxkv._util import parse_bytes
from jaxkv.integrations.jetstream import Key, PrefixCache, PrefixValue
from tests.rigs.jetstream_double import (
    NO_CACHE,
    Flushing,
    common_length,
    drive,
    num_bytes,
    shared_prompts,
)

BLOCK_SIZE = 8


class WholePrefixCache:
    """JetStream's cache: whole caches on the host, evicted by LRU."""

    def __init__(self, host_bytes: int):
        self.host_bytes = host_bytes
        self.held_bytes = 0
        self._values: collections.OrderedDict[Key, PrefixValue] = (
            collections.OrderedDict()
        )
        self._lock = threading.Lock()

    def contains(self, key: Key) -> bool:
        """Whether a cache that is held begins with a prompt."""
        with self._lock:
            return any(
                common_length(key, held_key) == len(key) for held_key in self._values
            )

    def save(self, key: Key, value: PrefixValue) -> bool:
        """Keep a cache, and evict others to make room for it."""
        value = dataclasses.replace(value, prefix_size_bytes=num_bytes(value.prefix))
        with self._lock:
            if key in self._values or value.prefix_size_bytes > self.host_bytes:
                return False
            self.held_bytes += value.prefix_size_bytes
            while self.held_bytes > self.host_bytes:
                _, old = self._values.popitem(last=False)
                self.held_bytes -= old.prefix_size_bytes
            on_host = jax.tree.map(np.array, value.prefix)
            self._values[key] = dataclasses.replace(value, prefix=on_host)
            return True

    def load(
        self, key: Key, min_common_prefix_key_length: int | None = None
    ) -> PrefixValue | None:
        """Return the cache that has the most in common with a prompt."""
        with self._lock:
            best: Key = max(
                self._values,
                key=lambda held_key: common_length(key, held_key),
                default=(),
            )
            common = key[: common_length(key, best)]
            if len(common) < max(min_common_prefix_key_length or 0, 1):
                return None
            self._values.move_to_end(best)
            prefix = jax.device_put(self._values[best].prefix)
            return dataclasses.replace(self._values[best], prefix=prefix, tokens=common)


def serve(prompts: list[tuple[int, ...]], cache: Any) -> tuple[list[list[int]], int]:
    """Answer prompts; give the tokens and the chunks that were computed."""
    engine = Engine()
    return drive([engine], engine.init_params(), prompts, cache)


def num_distinct_blocks(prompts: list[tuple[int, ...]]) -> int:
    """Count the blocks of whole chunks, those that prompts share once."""
    chunk = Engine.prefill_chunk_size
    ends = [range(BLOCK_SIZE, len(p) // chunk * chunk + 1, BLOCK_SIZE) for p in prompts]
    return len(
        {
            p[:end]
            for p, block_ends in zip(prompts, ends, strict=True)
            for end in block_ends
        }
    )


def measure(num_prompts: int, host_bytes: int) -> list[dict[str, object]]:
    """Serve the prompts in every way; one row for each."""
    prompts = shared_prompts(num_prompts)
    expected, num_chunks = serve(prompts, NO_CACHE)
    rows: list[dict[str, object]] = [
        {"cache": "none", "room": None, "held": 0, "set_aside": 0, "chunks": num_chunks}
    ]
    for room in (None, host_bytes):
        size: dict[str, Any] = {"host_bytes": room}
        if room is None:
            size = {"num_host_blocks": num_distinct_blocks(prompts)}
        like, sizes = Engine().init_cache(), {"block_size": BLOCK_SIZE} | size
        with PrefixCache(like, extras=Extras(), sequence_axes=AXES, **sizes) as blocks:
            answers, num_chunks = serve(prompts, Flushing(blocks))
            held = blocks.store.held_bytes, blocks.store.host_bytes
        whole = WholePrefixCache(1 << 62 if room is None else room)
        answers_whole, num_chunks_whole = serve(prompts, whole)
        if not answers == answers_whole == expected:
            raise AssertionError("a prefix cache has changed an answer")
        held_whole = whole.held_bytes, room or whole.held_bytes
        for name, (in_use, set_aside), chunks in (
            ("blocks (jaxkv)", held, num_chunks),
            ("whole prefixes", held_whole, num_chunks_whole),
        ):
            rows.append(
                {
                    "cache": name,
                    "room": room,
                    "held": in_use,
                    "set_aside": set_aside,
                    "chunks": chunks,
                }
            )
    return rows


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--prompts", type=int, default=50, help="how many (50)")
    parser.add_argument(
        "--host-bytes",
        type=parse_bytes,
        default="512KiB",
        help="the small room (512KiB)",
    )
    args = parser.parse_args()
    rows = measure(args.prompts, args.host_bytes)
    prompts = shared_prompts(args.prompts)
    settings = {
        "prompts": args.prompts,
        "prompt_tokens": sum(map(len, prompts)),
        "block_size": BLOCK_SIZE,
        "chunk_tokens": Engine.prefill_chunk_size,
        "cache_tokens": Engine.max_prefill_length,
        "cache_bytes": num_bytes(Engine().init_cache()),
        "host_bytes": args.host_bytes,
    }
    where = show_machine()
    print(*(f"{key} {value}" for key, value in settings.items()), sep=", ")
    for row in rows:
        room = "unlimited" if row["room"] is None else f"{row['room']} bytes"
        print(
            f"{row['cache']:15} room {room:12}: {row['held']:>8} bytes held of "
            f"{row['set_aside']:>8}, {row['chunks']:>4} chunks computed"
        )
    write_figures(args.json, {"machine": where, "settings": settings, "rows": rows})


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main()
