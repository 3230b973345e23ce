"""Random users of `PrefixStore`.

What is found has to be the KV of a beginning of the prompt, bit for bit, of the same
adapter and salt and of the current weights; and where there was room and nothing
failed, all that was saved has to be found. The weights change at any moment, also while
prompts are computed.
"""

import threading

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import Namespace
from jaxkv.integrations.prefix_store import PrefixStore
from tests.campaign import truth
from tests.campaign.setups import POLICIES
from tests.campaign.users import EXTRAS, PLAIN, random_prompt
from tests.transfer import faults

LENGTH = 64
SEQUENCE_AXES = {"key": 0, "layers": 1}


def kv_of(tokens, extras, weights, filler):
    digest, raw = truth.start(weights, extras), []
    for place, token in enumerate(tokens):
        items = [item for item in extras.multimodal if item.offset == place]
        digest = truth.extend(digest, token, items)
        raw.append(truth.rows(digest, 0, 1)[0, :28])
    raw += [np.full(28, filler, np.uint8)] * (LENGTH - len(raw))
    table = np.stack(raw)
    return {
        "key": table[:, :16].reshape(LENGTH, 2, 8).copy(),
        "layers": table[:, 16:]
        .copy()
        .view(np.uint16)
        .reshape(LENGTH, 3, 2)
        .transpose(1, 0, 2)
        .copy(),
    }


class FailingLoads:
    def __init__(self, engine):
        self._engine = engine
        self.fails = False

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def load(self, pool, host_ids, device_ids):
        if self.fails:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: by design")
        return self._engine.load(pool, host_ids, device_ids)


class Store:
    """`PrefixStore`, as `PrefixUser` calls it."""

    def __init__(self, block_size, weights, **options):
        like = jax.tree.map(jnp.asarray, kv_of([], PLAIN, 0, 0))
        self.store = PrefixStore(
            like,
            namespace=Namespace("campaign", weights, "bytes", "rows", block_size),
            sequence_axis=SEQUENCE_AXES,
            **options,
        )
        self.extras = (PLAIN, *EXTRAS)
        self.clear, self.flush = self.store.clear, self.store.flush
        self.close = self.store.close

    def save(self, tokens, extras, kv, epoch):
        self.store.save(tokens, kv, extras=extras, epoch=epoch)

    def load(self, tokens, extras, epoch):
        hit = self.store.load(tokens, extras, epoch=epoch)
        return None if hit is None else (hit.num_tokens, hit.kv)

    def contains(self, tokens, extras):
        return self.store.contains(tokens, extras)


class PrefixUser:
    """A driver that saves and loads prompts at random."""

    def __init__(self, rng, counts, note):
        self.rng, self.counts, self.note = rng, counts, note
        self.block_size = rng.choice((4, 8))
        self.is_roomy = rng.random() < 0.5
        policy, mode = rng.choice(POLICIES), rng.choice(("fused", "staged"))
        options = {
            "cache_policy": policy,
            "mode": mode,
            "num_host_blocks": 4000 if self.is_roomy else rng.choice((5, 20, 60)),
            "extent_bytes": rng.choice((None, self.block_size * 28 * 3)),
        }
        note(f"{self.block_size=} {options=}")
        self.weights = 0
        self.stories, self.saved, self.unsure = [], [], False
        self.computing = []  # Prompts, with their weights and epoch.
        self.cache = Store(self.block_size, str(self.weights), **options)
        store = self.cache.store
        store._engine = self.loads = FailingLoads(store._engine)

    def run(self, num_steps):
        try:
            for _ in range(num_steps):
                self.counts["steps"] += 1
                self.step()
            self.flush()
            if self.counts["saves failed"]:
                faults.recover(jax.tree.map(jnp.asarray, kv_of([], PLAIN, 0, 0)))
        finally:
            self.cache.close()

    def step(self):
        rng = self.rng
        chance = rng.random()
        if chance < 0.02:
            self.change_weights()
        elif chance < 0.05:
            self.flush()
        elif chance < 0.1:
            self.load_from_many_threads()
        elif chance < 0.45 or not self.stories:
            self.save()
        else:
            self.load(*self.prompt())

    def prompt(self):
        tokens, extras = random_prompt(self.rng, self.stories, LENGTH)
        if extras not in self.cache.extras:
            extras = PLAIN
        return tokens, extras

    def save(self):
        """Compute a prompt, others meanwhile, or begin with new weights meanwhile."""
        tokens, extras = self.prompt()
        self.stories = [*self.stories[-12:], (tokens, extras)]
        prompt = tokens, extras, self.weights, self.cache.store.epoch
        if self.rng.random() < 0.5:
            self.load(tokens, extras)
        if self.rng.random() < 0.1:
            self.change_weights()
        if self.rng.random() < 0.5:
            self.computing.append(prompt)
            prompt = self.computing.pop(self.rng.randrange(len(self.computing)))
        self.save_computed(*prompt)

    def save_computed(self, tokens, extras, weights, epoch):
        kv = kv_of(tokens, extras, weights, self.rng.randrange(256))
        kv = jax.tree.map(jnp.asarray, kv)
        self.counts["saves"] += 1
        if self.rng.random() < 0.01:
            kv = faults.broken(kv)
            self.unsure = True
            self.counts["saves failed"] += 1
        self.note(f"save {tokens} {extras} {weights=} {epoch=}")
        self.cache.save(tokens, extras, kv, epoch)
        if weights == self.weights:
            self.saved.append((tokens, extras))
        else:
            self.counts["saves outdated"] += 1

    def load(self, tokens, extras):
        self.loads.fails = self.rng.random() < 0.05
        hit = self.cache.load(tokens, extras, self.cache.store.epoch)
        self.counts["loads"] += 1
        self.note(f"load {tokens} {extras}: {hit and hit[0]}")
        if self.loads.fails:
            assert hit is None, "a load that failed has found something"
            self.counts["loads failed"] += 1
            self.saved = []  # What was asked for is forgotten.
        self.loads.fails = False
        if hit is not None:
            self.compare(tokens, extras, *hit)

    def compare(self, tokens, extras, num_tokens, kv):
        assert 0 < num_tokens <= len(tokens), num_tokens
        assert num_tokens % self.block_size == 0, num_tokens
        wanted = kv_of(tokens[:num_tokens], extras, self.weights, 0)
        for name, array in wanted.items():
            if not np.array_equal(np.asarray(kv[name]), array):
                raise AssertionError(f"wrong bytes in {name} of {tokens} {extras}")
        self.counts["block reads compared"] += num_tokens // self.block_size

    def load_from_many_threads(self):
        prompts = [self.prompt() for _ in range(4)]
        hits = [None] * 4

        def load(place):
            hits[place] = self.cache.load(*prompts[place], self.cache.store.epoch)

        threads = [
            threading.Thread(target=load, args=(n,)) for n in range(len(prompts))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.counts["loads"] += len(prompts)
        for prompt, answer in zip(prompts, hits, strict=True):
            if answer is not None:
                self.compare(*prompt, *answer)

    def change_weights(self):
        """Invalidate all prefixes, also the ones in flight."""
        self.weights += 1
        self.cache.clear(str(self.weights))
        self.saved, self.unsure = [], False
        self.counts["weights changed"] += 1
        self.note("clear")

    def flush(self):
        self.cache.flush()
        if self.is_roomy and not self.unsure:
            for tokens, extras in self.saved:
                if len(tokens) >= self.block_size:
                    assert self.cache.contains(tokens, extras), (tokens, extras)
        self.saved, self.unsure = [], False
