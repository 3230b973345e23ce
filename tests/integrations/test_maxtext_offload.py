"""`MaxTextOffload` with a fake engine: loaded KV equals computed KV."""

import random
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import Extras, Namespace
from jaxkv.integrations import maxtext_guards
from jaxkv.integrations.maxtext import MaxTextOffload
from jaxkv.keys.hashing import NO_EXTRAS
from tests.integrations.test_prefix_store import state_of
from tests.rigs.fake_maxtext import (
    LENGTH,
    SLOTS,
    Engine,
    kv_of,
    leaf_groups,
    make_cache,
)
from tests.rigs.refusals import WRONG, check_refusals

CHUNK = 4


class ExistingPrefix(NamedTuple):
    cache: object
    common_prefix_tokens: jax.Array


class PrefillEngine:
    """Computes KV that depends on the token alone, and checks the KV of its prefix."""

    config = SimpleNamespace(prefill_chunk_size=CHUNK, use_chunked_prefill=True)

    def __init__(self, layout):
        self.layout = layout
        self.num_computed = 0
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        self.prefill_kv_cache_shardings = jax.tree.map(
            lambda _: device, make_cache(layout, 1)
        )

    def _nnx_init_cache_dict(self):
        return jax.tree.map(jnp.asarray, make_cache(self.layout, 1))

    def prefill(self, *, params, existing_prefix, padded_tokens, true_length):
        assert params == "params"
        assert padded_tokens.shape == (CHUNK,)
        before = []
        cache = make_cache(self.layout, 1)
        if existing_prefix is not None:
            before = existing_prefix.common_prefix_tokens.tolist()
            cache = jax.tree.map(np.array, existing_prefix.cache)
        tokens = [*before, *padded_tokens[:true_length].tolist()]
        assert len(tokens) <= LENGTH
        for number, leaves in leaf_groups(cache):
            stack = leaves["cache_ar_index"].shape[:-1]
            wanted = np.arange(LENGTH) < len(before)
            assert (leaves["cache_prefill_segment_id"][..., 0, :] == wanted).all()
            leaves["cache_prefill_segment_id"][..., 0, : len(tokens)] = 1
            for which, name in enumerate(("key", "value")):
                rows = leaves[f"cached_prefill_{name}"]
                for row, token in enumerate(tokens):
                    kv = kv_of(token, number, which, stack)
                    if row < len(before):
                        np.testing.assert_array_equal(rows[..., row, :, 0, :], kv)
                    rows[..., row, :, 0, :] = kv
        self.num_computed += true_length
        return {"cache": jax.tree.map(jnp.asarray, cache)}, tokens


@pytest.fixture
def make(closing, monkeypatch):
    """Make an engine and its offload, without MaxText."""
    monkeypatch.setattr(maxtext_guards, "guard_chunked_prefill", lambda: False)
    monkeypatch.setattr(maxtext_guards, "guard_stub_results", lambda: False)
    monkeypatch.setattr(maxtext_guards, "find_prefix_class", lambda: ExistingPrefix)

    def make(layout, block_size=CHUNK, **arguments):
        engine = PrefillEngine(layout)
        namespace = Namespace("made up", "0", "float32", layout, block_size)
        arguments = {"num_host_blocks": 64} | arguments
        return engine, closing(MaxTextOffload(engine, namespace=namespace, **arguments))

    return make


@pytest.mark.parametrize("block_size", [3, 8])
def test_only_new_tokens_are_computed(make, block_size):
    engine, offload = make("mixed", block_size)
    rng = random.Random(block_size)
    for turn in range(3):
        prompt, epoch = [rng.randrange(1, 9) for _ in range(7)], offload.store.epoch
        assert offload.prefill("params", prompt, epoch=epoch).num_tokens == 0
        offload.store.flush()
        longer = [*prompt, *(20 + turn for _ in range(4))]
        engine.num_computed = 0
        done = offload.prefill("params", longer, epoch=epoch)
        # Full blocks of the first prompt, cut to whole chunks.
        kept = 7 // block_size * block_size // CHUNK * CHUNK
        assert (done.num_tokens, engine.num_computed) == (kept, 11 - kept)
        assert done.result == longer
        offload.store.clear()


def test_a_clear_in_the_middle_of_a_prefill_keeps_nothing_of_it(make):
    engine, offload = make("mixed")
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    compute = engine.prefill

    def compute_and_clear(**arguments):
        offload.store.clear("1")
        return compute(**arguments)

    engine.prefill = compute_and_clear
    assert offload.prefill("params", prompt).num_tokens == 0
    offload.store.flush()
    assert (offload.store.held_bytes, offload.store.stats.num_dropped_reset) == (0, 2)
    epoch = offload.store.epoch
    assert offload.resume(prompt, epoch=epoch) == (None, 0)
    del engine.prefill
    offload.prefill("params", prompt, epoch=epoch)
    offload.store.flush()
    assert offload.resume(prompt, epoch=epoch).num_tokens == 8


@pytest.mark.parametrize("num_prompt", [2, 6])
def test_a_request_belongs_to_the_epoch_that_each_call_is_given(make, num_prompt):
    """Also if the prompt is too short to be resumed, and another was loaded since."""
    _, offload = make("mixed")
    engine = Engine("mixed")
    engine.insert(0, num_prompt)
    for _ in range(6):
        engine.step()
    tokens, state = [*engine.lists[0], 999], engine.state()
    prompt = tokens[:num_prompt]
    prefix = offload.prefill("params", prompt).prefix
    offload.store.flush()
    offload.store.clear("1")
    offload.resume(prompt, epoch=1)
    for call in (
        lambda **epoch: offload.resume(prompt, **epoch),
        lambda **epoch: offload.prefill("params", prompt, **epoch),
        lambda **epoch: offload.save_prefix(prompt, prefix, **epoch),
        lambda **epoch: offload.save_slot(tokens, state, 0, **epoch),
    ):
        with pytest.raises(ValueError, match="epoch=None must be a number, since cle"):
            call()
    assert offload.prefill("params", prompt, epoch=0).num_tokens == 0
    assert offload.save_prefix(prompt, prefix, epoch=0) == 0
    assert offload.save_slot(tokens, state, 0, epoch=0) == 0
    offload.store.flush()
    assert offload.store.held_bytes == 0
    num_saved = len(tokens) // CHUNK * CHUNK
    assert offload.save_slot(tokens, state, 0, epoch=1) == num_saved
    offload.store.flush()
    assert offload.resume([*tokens, 7], epoch=0) == (None, 0)
    assert offload.resume([*tokens, 7], epoch=1).num_tokens == num_saved


def test_a_request_resumes_from_its_generated_tokens(make):
    prefill_engine, offload = make("mixed")
    engine = Engine("mixed")
    engine.insert(0, 2)
    for _ in range(4):
        engine.step()
    engine.insert(1, 3)
    for _ in range(6):  # Around the ring, which has seven rows.
        engine.step()
    tokens = engine.lists[1]
    assert offload.save_slot([*tokens, 999], engine.state(), 1) == 8
    offload.store.flush()
    done = offload.prefill("params", [*tokens, 999, 1000])
    assert done.num_tokens == 8
    assert prefill_engine.num_computed == 3
    salted = offload.resume([*tokens, 999], Extras(cache_salt="another"))
    assert salted == (None, 0)


def test_a_slot_of_other_lengths_keeps_nothing_and_is_counted(make):
    _, offload = make("scanned")
    engine = Engine("scanned")
    engine.insert(0, 4)
    offload.save_slot(range(1, 10), engine.state(), 0)
    offload.store.flush()
    assert offload.store.stats.num_dropped_failed == 2
    assert offload.resume(range(1, 10)) == (None, 0)


def test_the_last_token_is_always_computed(make):
    cache = jax.tree.map(jnp.asarray, make_cache("scanned", 1))
    engine, offload = make("scanned", cache_like=cache)  # Replaces the engine's shapes.
    assert offload.store.max_tokens == LENGTH
    offload.prefill("params", range(1, 9))
    offload.store.flush()
    engine.num_computed = 0
    assert offload.prefill("params", range(1, 9)).num_tokens == 4
    assert engine.num_computed == 4


def test_a_refused_engine_leaves_maxtext_unchanged(make, monkeypatch):
    applied = []
    monkeypatch.setattr(
        maxtext_guards, "guard_chunked_prefill", lambda: applied.append(1)
    )
    decode_cache = jax.tree.map(jnp.asarray, make_cache("scanned", 3))
    with pytest.raises(ValueError, match="has 3 slots"):
        make("scanned", cache_like=decode_cache)
    with monkeypatch.context() as patch:
        patch.delattr(PrefillEngine, "_nnx_init_cache_dict")
        with pytest.raises(ValueError, match="load its parameters first"):
            make("scanned")
    monkeypatch.setattr(PrefillEngine, "config", SimpleNamespace(quantize_kvcache=True))
    with pytest.raises(ValueError, match="quantize_kvcache=True must be False"):
        make("scanned")
    assert not applied


def test_prompts_and_slots_that_cannot_be_are_refused(make, monkeypatch):
    _, offload = make("scanned")
    state = Engine("scanned").state()
    for tokens in ([], range(LENGTH + 1)):
        with pytest.raises(ValueError, match="must have between 1 and 12"):
            offload.prefill("params", tokens)
    with pytest.raises(ValueError, match=r"slot=3 must be in \[0, 3\)"):
        offload.save_slot([1, 2], state, SLOTS)
    with pytest.raises(ValueError, match="tokens is empty"):
        offload.save_slot([], state, 0)
    prompt = [1, 2, 3, 4, 5, 6]
    prefix = offload.prefill("params", prompt).prefix
    tokens = {"tokens": (prompt,), "extras": (NO_EXTRAS,), "epoch": (0, None)}
    calls = {
        "resume": tokens,
        "prefill": tokens | {"params": ("params", *WRONG)},
        "save_prefix": tokens | {"prefix": (prefix,)},
        "save_slot": tokens | {"decode_state": (state,), "slot": (0,)},
    }
    for name, arguments in calls.items():
        call = getattr(offload, name)
        check_refusals(call, arguments, lambda: state_of(offload.store))
    for cache in WRONG:
        with pytest.raises((TypeError, ValueError), match="cache"):
            offload.save_prefix(prompt, {"cache": cache})
    windows = SimpleNamespace(sliding_window_size=8)
    monkeypatch.setattr(PrefillEngine, "config", windows)
    with pytest.raises(ValueError, match="sliding_window_size=8 must be 0"):
        offload.save_slot([1, 2], state, 0)
