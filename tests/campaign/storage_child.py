"""An engine of the campaign that writes to a store until it is killed.

All lives of a seed are of one model and share some prompts. Each writes a line for
every few steps: how many there were so far, block reads compared, blocks stored and
loaded.
"""

import collections
import itertools
import os
import random
import sys
import time

import jax

from jaxkv.transfer.storage import local
from tests.campaign.paged import PagedEngine, no_notes
from tests.campaign.storage import busy_setup, hear_the_store
from tests.campaign.users import PLAIN

NUM_STORIES, STORY_TOKENS = 6, 40
STEPS_PER_LINE = 8
PAUSE_S = 0.003


def write_slowly(file, blob):
    """Write a header, and some time later the rest, so that a kill falls in between."""
    for piece in blob:
        os.write(file, piece)
        time.sleep(PAUSE_S)


def live(folder, cache, log, seed, life, num_steps=None):
    """Be one of the engines that share a store.

    Args:
        folder: The store.
        cache: Where compiled programs are kept from life to life.
        log: The file for its lines, or for what went wrong.
        seed: Of the model and of the prompts.
        life: Its number.
        num_steps: When to end, and to look for leaks; None to go on for ever.
    """
    with open(log, "w", buffering=1, encoding="utf-8") as out:
        sys.stderr = out
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_compilation_cache_dir", str(cache))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        local._write_all = write_slowly
        setup = busy_setup(random.Random(seed), str(folder), 4000, write="through")
        counts, rng = collections.Counter(), random.Random(f"{seed}/{life}")
        engine = PagedEngine(setup, rng, counts, no_notes)
        shared = random.Random(f"{seed}/stories")
        engine.stories = [
            (shared.choices(range(3), k=min(STORY_TOKENS, setup.max_tokens)), PLAIN)
            for _ in range(NUM_STORIES)
        ]
        hear_the_store(engine)
        steps = itertools.count(1) if num_steps is None else range(1, num_steps + 1)
        for number in steps:
            engine.step()
            if number % STEPS_PER_LINE == 0:
                engine.check()
                stats = engine.scheduler.stats
                numbers = counts["block reads compared"], stats.num_storage_stored
                print(number, *numbers, stats.num_storage_loaded, file=out)
        engine.settle()
        engine.storage.close()
