"""An engine of the campaign that writes to a store until it is killed.

All lives of a seed are of one model and keep asking some shared prompts. Each writes a
line for every few steps: how many there were so far, block reads compared, blocks
stored and loaded. It also records the begin and the end of each write to the store.
"""

import collections
import contextlib
import functools
import itertools
import os
import random
import socket
import sys
import time

import jax

from jaxkv.transfer.storage import local
from tests.campaign.paged import PagedEngine, no_notes
from tests.campaign.storage import await_listing, busy_setup
from tests.campaign.users import PLAIN

NUM_STORIES, STORY_TOKENS = 6, 40
STEPS_PER_LINE = 8
PAUSE_S = 0.003
BEGUN, ENDED = b"(", b")"


def live(url, cache, log, seed, life, num_steps=None):
    with open(log, "w", buffering=1, encoding="utf-8") as out:
        sys.stderr = out
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_compilation_cache_dir", str(cache))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        record_writes(f"{log}.writes")
        setup = busy_setup(random.Random(seed), url, 4000, write="through")
        counts, rng = collections.Counter(), random.Random(f"{seed}/{life}")
        engine = Sharing(setup, rng, counts, no_notes)
        shared = random.Random(f"{seed}/stories")
        stories = [
            (shared.choices(range(3), k=min(STORY_TOKENS, setup.max_tokens)), PLAIN)
            for _ in range(NUM_STORIES)
        ]
        await_listing(engine)
        steps = itertools.count(1) if num_steps is None else range(1, num_steps + 1)
        for number in steps:
            if number % STEPS_PER_LINE == 1:
                engine.stories = [*stories, *engine.stories[-3:]]
            engine.step()
            if number % STEPS_PER_LINE == 0:
                engine.check()
                stats = engine.scheduler.stats
                numbers = counts["block reads compared"], stats.num_storage_stored
                print(number, *numbers, stats.num_storage_loaded, file=out)
        engine.settle()
        engine.storage.close()


class Sharing(PagedEngine):
    """An engine that keeps its weights, as all that share them do."""

    def change_weights(self):
        self.wants_new_weights = False


def record_writes(path):
    """Record when writes to a store begin and end, and slow them down."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def told(write):
        @functools.wraps(write)
        def tell(*args):
            os.write(file, BEGUN)
            try:
                return write(*args)
            finally:
                os.write(file, ENDED)

        return tell

    send = socket.socket.sendall

    @told
    def send_slowly(sock, data):
        half = len(data) // 2
        for piece in (data[:half], data[half:]):
            send(sock, piece)
            time.sleep(PAUSE_S)

    def send_all(sock, data):
        (send_slowly if b"SET" in bytes(data[:32]) else send)(sock, data)

    local.write_all = told(write_slowly)
    with contextlib.suppress(ImportError):
        import jaxkv_mooncake

        jaxkv_mooncake._put = told(jaxkv_mooncake._put)
    socket.socket.sendall = send_all  # To Redis.


def write_slowly(file, blob):
    """Write a header, and some time later the rest, so that a kill falls in between."""
    for piece in blob:
        os.write(file, piece)
        time.sleep(PAUSE_S)
