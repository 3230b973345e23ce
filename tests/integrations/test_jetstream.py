"""JetStream's driver gives the same tokens with jaxkv's prefix cache."""

import asyncio
import concurrent.futures
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import Extras, make_lru
from jaxkv.integrations.jetstream import PrefixCache, PrefixValue
from jaxkv.integrations.jetstream_adapters import AdapterWatch
from jaxkv.integrations.prefix_blocks import compare_shapes, find_sequence_axes
from jaxkv.integrations.prefix_store import PrefixStore
from jaxkv.transfer.storage import StoreError
from tests.integrations.test_prefix_store import state_of
from tests.rigs.jetstream_double import (
    NO_CACHE,
    AdapterStore,
    Engine,
    Flushing,
    drive,
    num_bytes,
    shared_prompts,
)
from tests.rigs.known_kv import check_equal, known_kv, to_device
from tests.rigs.refusals import check_refusals, wrong_calls

POLICY = make_lru(512, 4096)  # Compiled once.
PARAMS = Engine().init_params()


@pytest.fixture
def make(closing):
    """Make caches that are closed after the test."""

    def make(**arguments):
        size = {"num_host_blocks": 512, "cache_policy": POLICY}
        if "num_host_blocks" in arguments:
            size = {}
        return closing(
            PrefixCache(**{"block_size": 8, "extras_of": None} | size | arguments)
        )

    return make


def serve(prompts, cache=NO_CACHE, num_threads=1):
    """Answer prompts; return the tokens and the number of computed chunks."""
    return drive([Engine() for _ in range(num_threads)], PARAMS, prompts, cache)


def test_fifty_prompts_get_the_same_tokens_from_one_copy_of_each_block(make):
    prompts = shared_prompts(50)
    expected, chunks_without = serve(prompts)
    assert len({tuple(answer) for answer in expected}) > 25, "all answers are alike"
    cache, chunk = make(), Engine.prefill_chunk_size
    answers, num_chunks = serve(prompts, Flushing(cache))
    assert answers == expected
    # Whole chunks are saved; new chunks, and the last token, are computed.
    saved, num_needed = {()}, 0
    for prompt in prompts:
        num_saved = max(n for n in range(0, len(prompt), chunk) if prompt[:n] in saved)
        num_needed += -(-(len(prompt) - num_saved) // chunk)
        full = len(prompt) // chunk * chunk
        saved |= {prompt[:end] for end in range(8, full + 1, 8)}
    assert num_chunks == num_needed < 0.6 * chunks_without
    assert cache.held_bytes == (len(saved) - 1) * cache.store.block_bytes


def test_four_prefill_threads_get_the_same_tokens_from_a_small_store(make):
    prompts = shared_prompts(24, seed=1)
    expected, _ = serve(prompts)
    cache = make(num_host_blocks=24, cache_policy="arc", max_pending_saves=2)
    for _ in range(2):
        answers, _ = serve(prompts, cache, num_threads=4)
        assert answers == expected
    cache.flush()
    assert cache.held_bytes <= 24 * cache.store.block_bytes
    assert cache.stats.num_evicted > 0
    assert cache.stats.num_host_hit_tokens > 0
    assert (cache.stats.num_dropped_failed, cache.stats.num_loads_failed) == (0, 0)


BUFFERS = {
    "generated": np.zeros((5, 2, 8), np.float32),
    "index": np.full((1,), 3, np.int32),
}


def engine_cache(tokens=(), padded_length=32, **leaves):
    """An engine's cache: KV, and buffers of another length."""
    return to_device(known_kv(tokens, padded_length) | BUFFERS) | leaves


def value_of(tokens, padded_length=32, prefix=None):
    tokens = tuple(tokens)
    prefix = engine_cache(tokens, padded_length) if prefix is None else prefix
    return PrefixValue(
        prefix, tokens, len(tokens), padded_length, num_bytes(prefix), None
    )


def keep(cache, tokens, prefix=None):
    """Save a value, and wait until it is held."""
    saved = cache.save(tokens, value_of(tokens, prefix=prefix))
    cache.flush()
    return saved


def check_value(value, tokens):
    """Check that a value equals the saved one, with zeros after its tokens."""
    wanted = known_kv(tokens[: value.true_length], 32, rubbish=False) | BUFFERS
    check_equal(value.prefix, wanted)
    assert value.tokens == tuple(tokens[: value.true_length])


def test_the_cache_answers_as_jetstreams_documentation_says(make):
    cache = make()
    key = tuple(range(40, 64))
    assert not cache.contains(key)
    assert cache.load(key) is None
    assert "0 of 24 tokens hit" in cache.gen_statistic_str()
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
    device = jax.devices()[1]
    moved = cache.load(key, device=device)
    assert all(leaf.device == device for leaf in jax.tree.leaves(moved.prefix))
    check_value(moved, key)
    # The returned arrays may be donated.
    for leaf in jax.tree.leaves(hit.prefix):
        leaf.delete()
    check_value(cache.load(key), key)
    text = cache.gen_statistic_str()
    assert "blocks of 8 tokens: 3 stored, 0 evicted" in text
    assert f"held: {cache.held_bytes} bytes" in text
    cache.clear()
    assert not cache.contains(key)
    assert (cache.load(key), cache.held_bytes) == (None, 0)
    assert cache.save(key, value_of(key))
    assert not cache.save(key[:5], value_of(key[:5])), "less than a block"
    assert cache.save(key[:13], value_of(key[:13]))


def test_a_cache_of_another_device_comes_back_where_the_first_was(make):
    cache, key, devices = make(), tuple(range(16)), jax.devices()
    cache.learn(engine_cache(), 32)
    assert keep(cache, key, jax.device_put(engine_cache(key), devices[1]))
    hit = cache.load(key)
    assert {leaf.device for leaf in jax.tree.leaves(hit.prefix)} == {devices[0]}
    check_value(hit, key)


def test_adapters_and_salts_do_not_share_blocks(make):
    tokens = tuple(range(24))
    cache = make()
    views = {
        name: cache.for_adapter(*name)
        for name in [("a",), ("b",), ("a", "s"), (None, "s"), (None, "")]
    }
    views[()] = cache
    prefixes = [engine_cache((n,) * 24) for n in range(len(views))]
    for view, prefix in zip(views.values(), prefixes, strict=True):
        assert not view.contains(tokens)
        assert view.load(tokens) is None
        assert view.save(tokens, value_of(tokens, prefix=prefix))
        cache.flush()
    for view, prefix in zip(views.values(), prefixes, strict=True):
        check_equal(view.load(tokens).prefix["key"][:24], prefix["key"][:24])
    assert cache.stats.num_stored == 3 * len(views)


def test_a_prompt_without_extras_is_not_cached(make):
    cache = make(extras_of=lambda key: None)
    tokens = tuple(range(24))
    assert not cache.save(tokens, value_of(tokens))
    assert not cache.contains(tokens)
    assert cache.load(tokens) is None
    assert cache.store is None


@pytest.mark.parametrize("learns", ["before", "between", "after"])
def test_a_prompt_that_was_loaded_before_clear_is_not_kept(make, learns):
    """Also if the cache layout was learned after its load, or only by the save."""
    cache = make()
    if learns == "before":
        cache.learn(engine_cache(), 32)
    assert cache.load(KEY) is None
    if learns == "between":
        cache.learn(engine_cache(), 32)
    cache.clear("1" if learns == "between" else None)
    assert cache.save(KEY, value_of(KEY)) is False
    assert keep(cache, KEY) is False, "not loaded since"
    assert (cache.load(KEY), cache.errors) == (None, {})
    assert cache.save(KEY[:8], value_of(KEY)) is True, "what was loaded, shortened"
    cache.flush()
    check_value(cache.load(KEY), KEY)


def test_a_prompt_whose_adapter_changes_between_load_and_save_is_not_kept(make):
    version = ["1"]
    cache = make(extras_of=lambda key: Extras(lora_name=version[0]))
    cache.learn(engine_cache(), 32)
    assert cache.load(KEY) is None
    version[0] = "2"
    assert cache.save(KEY, value_of(KEY)) is False
    assert cache.load(KEY) is None
    assert keep(cache, KEY) is True
    version[0] = "1"
    assert cache.load(KEY) is None


@pytest.mark.parametrize("num_threads", [1, 3])
def test_an_unmodified_driver_never_shares_kv_between_adapters(make, num_threads):
    prompts = [prompt for prompt in shared_prompts(12, seed=3) for _ in range(3)]
    names = ["", "a", "b"] * 12

    def run(cache=NO_CACHE, watch=None):
        stores = [AdapterStore(PARAMS) for _ in range(num_threads)]
        engines = [Engine() for _ in stores]
        if watch is not None:
            stores = list(map(watch.store, stores))
            engines = list(map(watch.engine, engines))
        for store in stores:
            for path, name in enumerate("ab"):
                asyncio.run(store.register_adapter(name, path, {}))
        return drive(engines, PARAMS, prompts, cache, stores, names)[0]

    expected = run()
    assert expected[0::3] != expected[1::3] != expected[2::3]
    watch = AdapterWatch()
    cache = make(extras_of=watch)
    answers = run(Flushing(cache), watch)
    assert cache.stats.num_host_hit_tokens > 0
    assert answers == expected
    if num_threads == 1:  # The reference has the fault that must not be reproduced.
        assert run(Flushing(make())) != expected


@pytest.mark.parametrize("version_of", [None, lambda name: "1"])
@pytest.mark.parametrize("change", ["register", "load", "unload"])
def test_an_adapter_that_is_replaced_while_it_is_fetched_is_never_hit(
    change, version_of
):
    watch = AdapterWatch(version_of)

    class Store(AdapterStore):
        """Interleaves two tasks: the fetch begins within the change."""

        async def get_lora_weights(self, adapter_id, **named):
            await asyncio.sleep(0)
            return await super().get_lora_weights(adapter_id, **named)

        async def register_adapter(self, *arguments):
            for _ in range(3):
                await asyncio.sleep(0)
            await super().register_adapter(*arguments)

        load_adapter = unload_adapter = register_adapter

    store = watch.store(Store(PARAMS))

    async def fetch():
        await store.get_lora_weights("a")
        return watch._thread.fetched

    async def change_and_fetch(path):
        changing = getattr(store, f"{change}_adapter")("a", path, {})
        return (await asyncio.gather(changing, fetch(), fetch()))[1:]

    asyncio.run(store.register_adapter("a", 0, {}))
    usual = asyncio.run(fetch())
    assert asyncio.run(fetch()) == usual
    names = [*asyncio.run(change_and_fetch(1)), *asyncio.run(change_and_fetch(2))]
    assert len({usual, *names}) == 5
    after = asyncio.run(fetch())
    assert after not in names
    assert (after == usual) == (version_of is not None)


def test_an_adapter_that_is_replaced_within_a_fetch_is_never_hit():
    watch = AdapterWatch()

    class Store(AdapterStore):
        async def get_lora_weights(self, adapter_id):
            await store.register_adapter(adapter_id, 1, {})
            return await super().get_lora_weights(adapter_id)

    store = watch.store(Store(PARAMS))
    names = set()
    for _ in range(3):
        asyncio.run(store.get_lora_weights("a"))
        names |= {watch._thread.fetched, watch._name("a")}
    assert len(names) == 6


def test_nothing_is_cached_once_the_adapter_is_unknown():
    watch = AdapterWatch()
    store = watch.store(AdapterStore(PARAMS))
    asyncio.run(store.register_adapter("a", 0, {}))
    asyncio.run(store.register_adapter("b", 1, {}))

    class Failing(Engine):
        fails = False

        def unapply_adapter(self, *args):
            if self.fails:
                raise KeyError("no such adapter")

    engine = watch.engine(Failing())

    def apply(name):
        asyncio.run(store.get_lora_weights(adapter_id=name, load_if_not_loaded=True))
        engine.apply_adapter(dict(PARAMS), {}, 0)
        return watch()

    base = watch()
    first = apply("a")
    engine.unapply_adapter({}, {}, 0)
    assert watch() == base
    second = apply("b")
    engine.unapply_adapter({}, {}, 0)
    asyncio.run(store.register_adapter("a", 2, {}))
    again = apply("a")
    engine.unapply_adapter({}, {}, 0)
    assert len({base, first, second, again}) == 4
    # One adapter on top of another is unknown, and stays so.
    apply("a")
    assert apply("b") is None
    engine.unapply_adapter({}, {}, 0)
    assert watch() is None
    assert apply("a") is None
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        assert thread.submit(watch).result() == base  # Another thread, another engine.
        engine._inner.fails = True

        def fail():
            apply("a")
            with pytest.raises(KeyError):
                engine.unapply_adapter({}, {}, 0)
            return watch()

        assert thread.submit(fail).result() is None


def test_a_cache_whose_constant_leaf_differs_is_not_kept(make, caplog):
    cache = make()
    first, second, third = (tuple(range(n, n + 16)) for n in (0, 20, 40))
    keep(cache, first)
    keep(cache, second, engine_cache(second, index=jnp.full((1,), 4, jnp.int32)))
    keep(cache, third, engine_cache(third, generated=jnp.ones((5, 2, 8))))
    kept = [cache.contains(key) for key in (first, second, third)]
    assert kept == [True, False, False]
    assert "'generated' has no sequence axis, but differs" in caplog.text
    assert cache.stats.num_dropped_failed == 4


def maxtext_cache(length, layers=2):
    """Shapes as MaxText's, with buffers as long as the prompt's."""
    kv = jnp.zeros((layers, length, 2, 1, 4))
    return {
        "decoder": {
            "layers": {
                "cached_prefill_key": kv,
                "cached_prefill_value": kv + 0,
                "cache_prefill_segment_id": jnp.zeros((layers, 1, length), jnp.int32),
                "cached_ar_key": kv + 0,
                "cache_ar_segment_id": jnp.zeros((layers, 1, length), jnp.int32),
                "cache_ar_index": jnp.zeros((layers, 1), jnp.int32),
            }
        }
    }


AXES = {"key": 0, "layers/0": 1, "layers/1": 2, "generated": None, "index": None}


def axes_of(prefix, *args):
    return {
        leaf.path.removeprefix("decoder/layers/"): leaf.axis
        for leaf in find_sequence_axes(prefix, *args)
    }


def test_sequence_axes_are_found_by_length_rules_and_names():
    names = {
        "cached_prefill_key": 1,
        "cached_prefill_value": 1,
        "cache_prefill_segment_id": 2,
        "cached_ar_key": None,
        "cache_ar_segment_id": None,
        "cache_ar_index": None,
    }
    assert axes_of(maxtext_cache(16), 16) == names
    unscanned = {name: axis and axis - 1 for name, axis in names.items()}
    one_layer = jax.tree.map(lambda leaf: leaf[0], maxtext_cache(16))
    assert axes_of(one_layer, 16) == unscanned
    assert axes_of(engine_cache(), 32) == AXES
    cube = {"key": jnp.zeros((8, 8, 8)), "index": jnp.zeros(())}
    assert axes_of(cube, None, {"k*": -1, "*": None}) == {"key": 2, "index": None}
    two = {"a": [jnp.zeros((8,))], "b": jnp.zeros((4,))}
    # A recurrent state named as keys: MaxText's linear attention.
    state = maxtext_cache(16)
    state["decoder"]["layers"]["cached_prefill_key"] = jnp.zeros((1, 2, 4, 4))
    for arguments, message in [
        ((cube, 8), r"axes \[0, 1, 2\] of 'key'.*sequence_axes"),
        ((cube, None, {"k*": -1}), "no pattern of sequence_axes matches 'index'"),
        ((cube, None, {"k*": 3, "*": None}), r"axis 3 of 'k\*' in sequence_axes must"),
        ((cube, 9), "has a sequence axis of padded_length=9"),
        ((cube,), "padded_length=None and no known names"),
        (({},), "has no leaves"),
        ((two, 4, {"*": 0}), r"'a/0' has 8 .* not 4: it is not a cache"),
        ((state, 16), "a recurrent state cannot be cut"),
    ]:
        with pytest.raises(ValueError, match=message):
            find_sequence_axes(*arguments)


def test_compare_shapes_finds_the_sequence_axes():
    assert compare_shapes(engine_cache(), engine_cache((), 64)) == AXES
    rules = compare_shapes(jnp.zeros((8, 8)), jnp.zeros((8, 16)))
    assert axes_of(jnp.zeros((8, 16)), None, rules) == {"": 1}
    for first, second, message in [
        (jnp.zeros((8, 8)), jnp.zeros((16, 16)), r"the axes \[0, 1\] differ"),
        (jnp.zeros((8, 8)), jnp.zeros((8, 8)), "have the same shapes"),
        ([jnp.zeros(8)], {"a": jnp.zeros(16)}, "the same structure"),
        (jnp.zeros(8), jnp.zeros((8, 8)), "must have the same axes"),
    ]:
        with pytest.raises(ValueError, match=message):
            compare_shapes(first, second)


EXTRAS_OF = {"extras_of": "alice"}
WRONG_ARGUMENTS = [
    ({"num_host_blocks": None}, ValueError, "num_host_blocks=None and host_bytes"),
    ({"num_host_blocks": 0}, ValueError, "num_host_blocks=0 must be at least 1"),
    ({"block_size": 0}, ValueError, "block_size"),
    ({"host_bytes": "8 gigs"}, ValueError, "host_bytes: '8 gigs' must be a size"),
    ({"extent_bytes": "0"}, ValueError, "extent_bytes: '0' must be a size"),
    ({"cache_policy": "lur"}, ValueError, "did you mean lru"),
    ({"cache_policy": 5}, TypeError, "cache_policy=5 must be, or name, a jaxkv.P"),
    ({"mode": "fast"}, ValueError, "mode='fast' must be one of"),
    ({"max_pending_saves": 0}, ValueError, "max_pending_saves=0 must be at least"),
    (EXTRAS_OF, TypeError, "extras_of='alice' must be an AdapterWatch"),
    ({"sequence_axes": 1}, TypeError, "sequence_axes=1 must be patterns of paths"),
    ({"sequence_axes": {"*": "1"}}, TypeError, "{'.': '1'} in sequence_axes must"),
]


def test_a_wrong_argument_is_refused_at_once_and_not_by_the_first_save():
    for argument, error, message in WRONG_ARGUMENTS:
        size = {} if "host_bytes" in argument else {"num_host_blocks": 8}
        with pytest.raises(error, match=message):
            PrefixCache(**{"block_size": 8, "extras_of": None} | size | argument)
    # Without a word about adapters, KV of one would be served under another.
    with pytest.raises(TypeError, match="extras_of"):
        PrefixCache(block_size=8, num_host_blocks=8)


def test_only_the_first_save_waits_for_the_memory(make, monkeypatch):
    cache, may_go_on, has_begun = make(), threading.Event(), threading.Event()

    def slow(*args, **named):
        has_begun.set()
        assert may_go_on.wait(60)
        return PrefixStore(*args, **named)

    monkeypatch.setattr("jaxkv.integrations.prefix_template.PrefixStore", slow)
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        saving = threads.submit(cache.save, KEY, value_of(KEY))
        assert has_begun.wait(60)
        try:
            look = threads.submit(lambda: (cache.load(KEY), cache.contains(KEY)))
            assert look.result(timeout=60) == (None, False)
            text = threads.submit(cache.gen_statistic_str).result(timeout=60)
            assert "0 of 16 tokens hit" in text
            assert cache.errors == {}
            assert not saving.done()
        finally:
            may_go_on.set()
        assert saving.result() is True


def test_a_closed_cache_sets_no_memory_aside_any_more(make, caplog):
    cache = make()
    cache.close()
    assert cache.save(KEY, value_of(KEY)) is False
    assert "the prefix cache was closed" in caplog.text
    assert (cache.store, cache.load(KEY), cache.errors) == (None, None, {"save": 1})
    with pytest.raises(RuntimeError, match="the prefix cache was closed"):
        cache.learn(engine_cache(), 32)


KEY = tuple(range(16))
OTHER_SHAPE = engine_cache(KEY, generated=jnp.zeros((6, 2, 8)))
IN_NUMPY = jax.tree.map(np.array, engine_cache(KEY))
LONG = tuple(range(100_000, 110_000))
REFUSED = [
    (LONG, value_of(LONG[1:], 32, engine_cache()), "begin with the key, (100000, 1"),
    (KEY, value_of(KEY, prefix=[jnp.zeros(32)]), "must have the structure"),
    (KEY, value_of(KEY, prefix=OTHER_SHAPE), "'generated' must be float32[5, 2, 8]"),
    (KEY, value_of(KEY, 64), "template for 32"),
    (KEY, value_of(KEY, prefix=IN_NUMPY), "must be a jax.Array outside jit"),
    (KEY, None, "NoneType"),
]


def test_a_cache_that_save_cannot_take_is_logged_once_and_counted(make, caplog):
    for key, value, message in REFUSED:
        caplog.clear()
        cache = make()
        keep(cache, KEY)
        held = cache.held_bytes
        for count in (1, 2, 3):
            assert cache.save(key, value) is False
            assert cache.errors == {"save": count}
        (record,) = [entry for entry in caplog.records if "save()" in entry.message]
        assert record.levelname == "ERROR"
        assert record.exc_info
        assert message in record.message
        assert len(record.message) < 500, "not all tokens are shown"
        assert "3 in save" in cache.gen_statistic_str()
        assert cache.held_bytes == held
        check_value(cache.load(KEY), KEY)


@pytest.mark.parametrize("learns", [False, True])
def test_invalid_calls_are_counted_as_errors_and_change_nothing(make, learns):
    cache = make()
    if learns:
        cache.learn(engine_cache(), 32)
        cache.load(KEY)
        keep(cache, KEY)

    def state():
        shared = cache._shared
        names = "num_early_clears", "recent", "_options", "_learn_error"
        thread = vars(shared.begun._thread)
        notes = tuple(thread.get("values", {}).items()), thread.get("last")
        store = None if cache.store is None else state_of(cache.store)
        return repr([getattr(shared, name) for name in names]), notes, store

    value = value_of(KEY)
    values = {
        "prefix": (value.prefix,),
        "tokens": (KEY,),
        "true_length": (16, 10**30),
        "padded_length": (32, *([10**30] if learns else [])),
    }
    calls = {
        "load": {
            "key": (KEY,),
            "min_common_prefix_key_length": (0, None, 10**30),
            "device": (None, None),
        },
        "contains": {"key": (KEY,)},
        "save": {"key": (KEY,), "value": (value,)},
    }
    before, num_errors = state(), 0
    for name, arguments in calls.items():
        if name == "contains" and not learns:
            continue  # Nothing is held.
        for _, wrong in wrong_calls(arguments):
            assert not getattr(cache, name)(**wrong)
            num_errors += 1
            assert sum(cache.errors.values()) == num_errors, (name, wrong)
            assert state() == before, (name, wrong)
    for _, wrong in wrong_calls(values):
        assert cache.save(KEY, types.SimpleNamespace(**wrong)) is False
        num_errors += 1
        assert sum(cache.errors.values()) == num_errors, wrong
        assert state() == before, wrong
    check_refusals(cache.clear, {"weights_epoch": ("1", None, "x")}, state)
    names = {"lora_name": ("a", None, "x"), "salt": ("a", None, "x")}
    check_refusals(cache.for_adapter, names, state)
    if not learns:
        caches = {"prefix": (engine_cache(),), "padded_length": (32,)}
        check_refusals(cache.learn, caches, state)


def test_a_first_cache_whose_axis_is_not_clear_is_not_kept_and_the_next_is(
    make, caplog
):
    cache = make()
    odd = value_of(KEY, 32, [jnp.zeros((32, 2)), jnp.zeros((32, 32))])
    assert cache.save(KEY, odd) is False
    assert "the axes [0, 1] of '1'" in caplog.text
    assert "sequence_axes" in caplog.text
    with pytest.raises(ValueError, match=r"the axes \[0, 1\] of '1'.*sequence_axes"):
        cache.learn(odd.prefix, 32)
    assert cache.store is None
    assert (cache.load(KEY), cache.contains(KEY)) == (None, False)
    assert cache.save(KEY, value_of(KEY)) is True


@pytest.mark.parametrize(
    ("error", "text"),
    [(MemoryError, "64.0 GiB of pinned memory"), (StoreError, "name a folder that")],
)
def test_missing_memory_or_storage_is_tried_once_by_save(
    make, caplog, tmp_path, error, text
):
    calls, storage = [], {}
    if error is StoreError:
        (tmp_path / "file").write_text("")
        storage = STORED | {"storage": str(tmp_path / "file")}

    def make_store(*args, **named):
        calls.append(1)
        if error is MemoryError:
            raise MemoryError("64.0 GiB of pinned memory")
        return PrefixStore(*args, **named)

    cache = make(**storage)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxkv.integrations.prefix_template.PrefixStore", make_store)
        assert [cache.save(KEY, value_of(KEY)) for _ in range(3)] == [False] * 3
        assert len(calls) == 1
        assert text in caplog.text
        assert "only learn() tries again" in caplog.text
        with pytest.raises(error, match=text):
            cache.learn(engine_cache(), 32)
    (tmp_path / "file").unlink(missing_ok=True)
    cache.learn(engine_cache(), 32)
    assert cache.save(KEY, value_of(KEY)) is True


def test_each_cause_of_errors_is_logged_once_whatever_its_message(make, caplog):
    def fail(key):
        raise KeyError(key)

    cache = make(extras_of=fail)
    for n in range(3):
        key = (n, *KEY)
        assert (cache.load(key), cache.contains(key)) == (None, False)
        assert cache.save(key, value_of(key)) is False
    assert cache.errors == dict.fromkeys(("load", "contains", "save"), 3)
    logged = [record.message.split("()")[0] for record in caplog.records]
    assert sorted(logged) == sorted(cache.errors)


STORED = {
    "model": "double",
    "weights_epoch": "0",
    "storage_bytes": "8MiB",
    "storage_write": "through",
    "storage_deadline_s": 30.0,
}


def test_stored_blocks_are_found_by_equal_caches_in_other_processes(make, tmp_path):
    tokens, folder = tuple(range(24)), str(tmp_path / "kv")
    cache = make(**STORED, storage=folder)
    keep(cache, tokens)
    assert cache.store.wait_for_storage(60)
    cache.close()
    for leaves, is_found in (
        ({"index": jnp.full((1,), 4, jnp.int32)}, False),
        ({"generated": jnp.ones((5, 2, 8))}, False),
        ({"generated": jnp.zeros((6, 2, 8))}, False),
        ({}, True),
    ):
        cache = make(**STORED, storage=folder)
        cache.learn(engine_cache((1, 2, 3), **leaves), 32)
        assert cache.store.wait_for_storage(60)
        hit = cache.load(tokens)
        assert (hit is not None) == is_found, leaves
        cache.close()
    check_value(hit, tokens)
    assert "3 fetched" in cache.gen_statistic_str()


def test_missing_settings_of_storage_are_refused_in_one_line(make, tmp_path):
    stored = STORED | {"storage": str(tmp_path / "kv")}
    for name in ("model", "weights_epoch"):
        with pytest.raises(ValueError, match=f"storage needs {name} .got ''"):
            make(**stored | {name: ""})
    with pytest.raises(ValueError, match="needs an AdapterWatch"):
        make(**stored, extras_of=AdapterWatch())
    with pytest.raises(TypeError, match="unexpected keyword argument 'storages'"):
        make(storages="kv")
    for learns in (False, True):
        cache = make(**stored, extras_of=AdapterWatch(version_of=str))
        if learns:
            cache.learn(engine_cache(), 32)
        with pytest.raises(ValueError, match="must name the weights from now on"):
            cache.clear()
        cache.clear("1")
        cache.learn(engine_cache(), 32)
        assert cache.store._namespace.weights_epoch == "1"
    make().clear()


def test_adapters_with_versions_are_the_same_wherever_their_weights_are():
    version = {"a": "1"}
    watches = [AdapterWatch(version_of=version.__getitem__) for _ in range(2)]

    def asked(watch, name, times):
        for path in range(times):
            asyncio.run(stores[watch].register_adapter(name, path, {}))
        asyncio.run(stores[watch].get_lora_weights(name, load_if_not_loaded=True))
        return watch._thread.fetched

    stores = {watch: watch.store(AdapterStore(PARAMS)) for watch in watches}
    first = [asked(watch, "a", 1 + n) for n, watch in enumerate(watches)]
    assert first[0] == first[1]
    version["a"] = "2"
    assert asked(watches[0], "a", 1) not in first
    # No version: no other process finds it, and the driver goes on.
    unknown = [asked(watch, "b", 1) for watch in watches]
    assert unknown[0] != unknown[1]
