"""JetStream's driver gives the same tokens with jaxkv's prefix cache."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.jetstream_prefix_cache import AXES
from examples.jetstream_prefix_cache import TinyEngine as Engine
from jaxkv import Extras, make_lru
from jaxkv.integrations.jetstream import PrefixCache, PrefixValue
from tests.integrations.test_prefix_store import state_of
from tests.rigs.jetstream_double import (
    NO_CACHE,
    Flushing,
    drive,
    num_bytes,
    shared_prompts,
)
from tests.rigs.known_kv import check_equal, known_kv, to_device
from tests.rigs.refusals import wrong_calls

POLICY = make_lru(512, 4096)  # Compiled once.
PARAMS = Engine().init_params()
BUFFERS = {
    "generated": np.zeros((5, 2, 8), np.float32),
    "index": np.zeros((1,), np.int32),
}
KNOWN_AXES = {"key": 0, "layers/0": 1, "layers/1": 2, "*": None}


def engine_cache(tokens=(), length=32, extras="", **leaves):
    """An engine's cache: KV, and buffers of another length."""
    return to_device(known_kv(tokens, length, extras) | BUFFERS) | leaves


LIKE = engine_cache()
KEY = tuple(range(16))


@pytest.fixture
def make(closing):
    """Make caches that are closed after the test."""

    def make(cache_like=LIKE, **arguments):
        defaults = {"sequence_axes": KNOWN_AXES, "block_size": 8, "extras": Extras()}
        if "num_host_blocks" not in arguments:
            defaults |= {"num_host_blocks": 512, "cache_policy": POLICY}
        return closing(PrefixCache(cache_like, **defaults | arguments))

    return make


def serve(prompts, cache=NO_CACHE, num_threads=1):
    """Answer prompts; return the tokens and the number of computed chunks."""
    return drive([Engine() for _ in range(num_threads)], PARAMS, prompts, cache)


def test_fifty_prompts_get_the_same_tokens_from_one_copy_of_each_block(make):
    prompts = shared_prompts(50)
    expected, chunks_without = serve(prompts)
    assert len({tuple(answer) for answer in expected}) > 25, "all answers are alike"
    cache = make(Engine().init_cache(), sequence_axes=AXES)
    answers, num_chunks = serve(prompts, Flushing(cache))
    assert answers == expected
    # Whole chunks are saved; new chunks, and the last token, are computed.
    chunk, saved, num_needed = Engine.prefill_chunk_size, {()}, 0
    for prompt in prompts:
        num_saved = max(n for n in range(0, len(prompt), chunk) if prompt[:n] in saved)
        num_needed += -(-(len(prompt) - num_saved) // chunk)
        full = len(prompt) // chunk * chunk
        saved |= {prompt[:end] for end in range(8, full + 1, 8)}
    assert num_chunks == num_needed < 0.6 * chunks_without
    assert cache.store.held_bytes == (len(saved) - 1) * cache.store.block_bytes


def test_four_prefill_threads_get_the_same_tokens_from_a_small_store(make):
    prompts = shared_prompts(24, seed=1)
    expected, _ = serve(prompts)
    cache = make(
        Engine().init_cache(),
        sequence_axes=AXES,
        num_host_blocks=24,
        cache_policy="arc",
        max_pending_saves=2,
    )
    for _ in range(2):
        answers, _ = serve(prompts, cache, num_threads=4)
        assert answers == expected
    cache.store.flush()
    stats = cache.store.stats
    assert cache.store.held_bytes <= 24 * cache.store.block_bytes
    assert stats.num_evicted > 0
    assert stats.num_host_hit_tokens > 0
    assert (stats.num_dropped_failed, stats.num_loads_failed) == (0, 0)


def value_of(tokens, prefix=None):
    tokens = tuple(tokens)
    prefix = engine_cache(tokens) if prefix is None else prefix
    return PrefixValue(prefix, tokens, len(tokens), 32, num_bytes(prefix), None)


def keep(cache, tokens, prefix=None, **epoch):
    """Save a value, and wait until it is held."""
    saved = cache.save(tokens, value_of(tokens, prefix), **epoch)
    cache.store.flush()
    return saved


def check_value(value, tokens, extras=""):
    """Check that a value equals the saved one, with zeros after its tokens."""
    wanted = known_kv(tokens[: value.true_length], 32, extras, rubbish=False) | BUFFERS
    check_equal(value.prefix, wanted)
    assert value.tokens == tuple(tokens[: value.true_length])


def test_the_cache_answers_as_jetstreams_documentation_says(make):
    cache = make()
    key = tuple(range(40, 64))
    assert not cache.contains(key)
    assert cache.load(key) is None
    assert keep(cache, key) is True
    assert cache.contains(key)
    assert cache.contains(key[:16])
    assert not cache.contains(key[:3])
    assert not cache.contains((*key, *range(8)))
    hit = cache.load((*key, 1, 2), min_common_prefix_key_length=16)
    assert (hit.tokens, hit.true_length, hit.padded_length) == (key, 24, 32)
    assert hit.prefix_size_bytes == num_bytes(hit.prefix)
    assert hit.device["key"] == value_of(key).prefix["key"].sharding
    check_value(hit, key)
    parting = (*key[:20], 0, 0, 0, 0)
    check_value(cache.load(parting), key)
    assert cache.load(parting).tokens == key[:16]
    assert cache.load(parting, min_common_prefix_key_length=17) is None
    # The returned arrays may be donated.
    for leaf in jax.tree.leaves(hit.prefix):
        leaf.delete()
    check_value(cache.load(key), key)
    assert not cache.save(key[:5], value_of(key[:5])), "less than a block"
    assert cache.save(key[:13], value_of(key[:13]))
    assert cache.errors == {}


def test_a_cache_of_another_device_comes_back_where_the_first_was(make):
    cache, key, devices = make(), tuple(range(16)), jax.devices()
    assert keep(cache, key, jax.device_put(engine_cache(key), devices[1]))
    hit = cache.load(key)
    assert {leaf.device for leaf in jax.tree.leaves(hit.prefix)} == {devices[0]}
    check_value(hit, key)


def test_prompts_have_the_keys_of_the_adapter_of_their_cache(make):
    extras = Extras(cache_salt="s", lora_name="a")
    cache = make(extras=extras)
    assert keep(cache, KEY) is True
    assert cache.store.contains(KEY, extras)
    assert not cache.store.contains(KEY)


def test_kv_of_old_weights_is_not_kept_by_a_driver_that_passes_no_epoch(make, caplog):
    """The prompt was loaded before, a shorter one after the weights changed."""
    cache = make()
    old = engine_cache(KEY, extras="old weights")
    assert cache.load(KEY) is None
    cache.store.clear()
    assert cache.load(KEY[:8], epoch=1) is None
    assert keep(cache, KEY, old) is False
    assert keep(cache, KEY, old, epoch=0) is False
    assert (cache.load(KEY, epoch=1), cache.store.held_bytes) == (None, 0)
    assert cache.load(KEY) is None
    assert cache.errors == {"save": 1, "load": 1}
    assert "epoch=None must be a number, since clear() was called" in caplog.text
    assert keep(cache, KEY, epoch=1) is True
    check_value(cache.load(KEY, epoch=1), KEY)


@pytest.mark.parametrize(
    "leaf",
    [
        {"index": jnp.full((1,), 4, jnp.int32)},
        {"generated": jnp.full((5, 2, 8), jnp.nan)},
        {"generated": jnp.full((5, 2, 8), -0.0)},
    ],
)
def test_a_state_of_the_first_prompt_is_never_served_to_another(make, leaf, caplog):
    """A leaf without a sequence axis may be the state after the whole prompt."""
    cache = make()
    assert keep(cache, KEY, engine_cache(KEY, **leaf)) is True, "not known yet"
    assert (cache.load(KEY[:8]), cache.load(KEY)) == (None, None)
    assert f"'{next(iter(leaf))}' has no sequence axis, but is not zero" in caplog.text
    assert cache.store.stats.num_dropped_failed == 2
    assert keep(cache, KEY) is True
    check_value(cache.load(KEY), KEY)


def test_axes_of_maxtexts_names_are_known(make):
    kv = jnp.zeros((2, 16, 2, 1, 4))
    layer = {
        "cached_prefill_key": kv,
        "cached_prefill_value": kv,
        "cache_prefill_segment_id": jnp.zeros((2, 1, 16), jnp.int32),
        "cached_ar_key": kv,
        "cache_ar_index": jnp.zeros((2, 1), jnp.int32),
    }
    for layers in (layer, jax.tree.map(lambda leaf: leaf[0], layer)):
        cache = PrefixCache(
            {"decoder": {"layers": layers}},
            block_size=8,
            num_host_blocks=4,
            extras=Extras(),
        )
        axes = {
            path.removeprefix("decoder/layers/"): a for path, a in cache._axes.items()
        }
        assert axes == {
            "cached_prefill_key": -4,
            "cached_prefill_value": -4,
            "cache_prefill_segment_id": -1,
        }
        cache.close()


WRONG_ARGUMENTS = [
    ({"num_host_blocks": None}, ValueError, "num_host_blocks=None and host_bytes"),
    ({"num_host_blocks": 0}, ValueError, "num_host_blocks=0 must be at least 1"),
    ({"block_size": 0}, ValueError, "block_size"),
    ({"cache_policy": "lur"}, ValueError, "did you mean lru"),
    ({"extras": "alice"}, TypeError, "extras='alice' must be a jaxkv.Extras"),
    ({"sequence_axes": 1}, TypeError, "sequence_axes=1 must be patterns of paths"),
    ({"sequence_axes": {"*": "1"}}, TypeError, "{'.': '1'} in sequence_axes must"),
    ({"sequence_axes": {"k*": 0}}, ValueError, "no pattern of sequence_axes matches"),
    ({"sequence_axes": {"*": 3}}, ValueError, r"axis 3 of '.' in sequence_axes must"),
    ({"sequence_axes": {"*": None}}, ValueError, "has a sequence axis; pass sequence"),
    ({"sequence_axes": {"*": 0}}, ValueError, "must be a pool with one token per bl"),
    ({"cache_like": {}}, ValueError, "has a sequence axis; pass sequence_axes"),
    ({"cache_like": [3]}, TypeError, "'0' must be a jax.Array or .* not <class 'int'>"),
    (
        {"cache_like": {"a/key": LIKE["key"], "a": {"key": LIKE["key"]}}},
        ValueError,
        "two leaves of the cache have the same path",
    ),
]


def test_wrong_arguments_are_refused(make):
    for argument, error, message in WRONG_ARGUMENTS:
        with pytest.raises(error, match=message):
            make(**{"num_host_blocks": 8} | argument)
    # Without a word about adapters, KV of one would be served under another.
    with pytest.raises(TypeError, match="extras"):
        PrefixCache(LIKE, block_size=8, num_host_blocks=8, sequence_axes=KNOWN_AXES)


OTHER_SHAPE = engine_cache(KEY, generated=jnp.zeros((6, 2, 8)))
IN_NUMPY = jax.tree.map(np.array, engine_cache(KEY))
LONG = tuple(range(100_000, 110_000))
REFUSED = [
    (LONG, value_of(LONG[1:], engine_cache()), "begin with the key, (100000, 1"),
    (KEY, value_of(KEY, prefix=[jnp.zeros(32)]), "must have the structure"),
    (KEY, value_of(KEY, prefix=OTHER_SHAPE), "'generated' must be float32[5, 2, 8]"),
    (KEY, value_of(KEY, engine_cache(KEY, 64)), "template for 32"),
    (KEY, value_of(KEY, prefix=IN_NUMPY), "must be a jax.Array outside jit"),
    (KEY, None, "NoneType"),
]


def test_a_cache_that_save_cannot_take_is_logged_once_and_counted(make, caplog):
    cache = make()
    keep(cache, KEY)
    held = cache.store.held_bytes
    for number, (key, value, message) in enumerate(REFUSED):
        caplog.clear()
        for count in (1, 2, 3):
            assert cache.save(key, value) is False
            assert cache.errors == {"save": 3 * number + count}
        (record,) = [entry for entry in caplog.records if "save()" in entry.message]
        assert record.levelname == "ERROR"
        assert record.exc_info
        assert message in record.message
        assert len(record.message) < 500, "not all tokens are shown"
        assert cache.store.held_bytes == held
        check_value(cache.load(KEY), KEY)


def test_invalid_calls_are_counted_as_errors_and_change_nothing(make):
    cache = make()
    keep(cache, KEY)
    value, epoch = value_of(KEY), {"epoch": (0, None)}
    calls = {
        "load": {"key": (KEY,), "min_common_prefix_key_length": (0, None, 10**30)}
        | epoch,
        "contains": {"key": (KEY,)},
        "save": {"key": (KEY,), "value": (value,)} | epoch,
    }
    values = {
        "prefix": (value.prefix,),
        "tokens": (KEY,),
        "true_length": (16, 10**30),
    }
    wrong = [
        (getattr(cache, name), arguments)
        for name in calls
        for _, arguments in wrong_calls(calls[name])
    ]
    wrong += [
        (cache.save, {"key": KEY, "value": types.SimpleNamespace(**fields)})
        for _, fields in wrong_calls(values)
    ]
    before = state_of(cache.store)
    for num_errors, (call, arguments) in enumerate(wrong, 1):
        assert not call(**arguments)
        assert sum(cache.errors.values()) == num_errors, (call, arguments)
        assert state_of(cache.store) == before, (call, arguments)


def test_each_cause_of_errors_is_logged_once_whatever_its_message(make, caplog):
    cache = make()
    cache.close()
    for n in range(3):
        key = (n, *KEY)
        assert (cache.load(key), cache.contains(key)) == (None, False)
        assert cache.save(key, value_of(key)) is False
    assert cache.errors == dict.fromkeys(("load", "contains", "save"), 3)
    logged = [record.message.split("()")[0] for record in caplog.records]
    assert sorted(logged) == sorted(cache.errors)
