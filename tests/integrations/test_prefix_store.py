"""The KV of prompts comes back bit for bit, and only for its own prompt."""

import collections
import concurrent.futures
import contextlib
import linecache
import pathlib
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import Extras, Namespace, TraceRecorder, make_lru
from jaxkv.integrations import prefix_store
from jaxkv.integrations.prefix_store import PrefixStore
from jaxkv.keys.hashing import NO_EXTRAS
from jaxkv.scheduling.stats import OffloadStats
from jaxkv.tools.replay.run import replay
from jaxkv.tools.replay.traces import read_trace
from tests.rigs.command_line import run_python
from tests.rigs.known_kv import (
    SEQUENCE_AXIS,
    check_hit,
    known_kv,
    to_device,
)
from tests.rigs.refusals import check_refusals
from tests.rigs.refused_threads import refused_threads
from tests.rigs.waiting import wait_for
from tests.transfer import faults

BLOCK, LENGTH = 4, 34  # The last two tokens of the arrays make no full block.
NAMESPACE = Namespace("model", "0", "mixed", "made up", BLOCK)
TENANTS = (NO_EXTRAS, Extras(lora_name="a"), Extras(cache_salt="a"), Extras("b", "a"))

# The same in all tests, so that each is compiled once.
POLICIES = {num_blocks: make_lru(num_blocks, 4096) for num_blocks in (64, 24, 5)}

LIKE = to_device(known_kv([], LENGTH))
PROMPT, OTHER = list(range(30)), list(range(50, 80))

modes = pytest.mark.parametrize("mode", ["fused", "staged"])


def make_store(num_host_blocks=64, like=LIKE, **arguments):
    defaults = {"namespace": NAMESPACE, "sequence_axis": SEQUENCE_AXIS}
    if num_host_blocks in POLICIES:
        defaults["cache_policy"] = POLICIES[num_host_blocks]
    return PrefixStore(like, num_host_blocks=num_host_blocks, **defaults | arguments)


@pytest.fixture
def make(closing):
    """Make stores that are closed after the test."""
    return lambda *sizes, **arguments: closing(make_store(*sizes, **arguments))


def save(store, tokens, extras=NO_EXTRAS, length=LENGTH, **arguments):
    epoch = store.epoch
    kv = to_device(known_kv(tokens, length, extras))
    return store.save(tokens, kv, extras=extras, **{"epoch": epoch} | arguments)


def keep(store, *arguments, **options):
    """Save, and wait until the blocks are held."""
    num_saved = save(store, *arguments, **options)
    store.flush()
    return num_saved


def test_each_load_is_recorded_with_what_it_found(make, tmp_path):
    path = tmp_path / "requests.jsonl"
    rng = np.random.default_rng(4)
    store = make(5, recorder=TraceRecorder(path), cache_policy="lru")
    hit_tokens = []
    for _ in range(30):
        who = int(rng.integers(3))
        prompt = [who] * int(rng.integers(1, 14))
        hit = store.load(prompt)
        hit_tokens.append(0 if hit is None else hit.num_tokens)
        keep(store, prompt)
    store.load([0] * BLOCK, TENANTS[1])
    store.close()
    trace = read_trace(path)
    run = trace.recording
    assert run.host_tokens.tolist() == [*hit_tokens, 0]
    assert sum(hit_tokens) > 0
    assert (run.device_tokens == -1).all()
    assert (run.policy, run.host_blocks, trace.block_size) == ("lru", 5, BLOCK)
    # Prompts of other adapters are others.
    assert trace.ids[-1] == trace.num_unique_blocks - 1
    result = replay("lru", trace, 5)
    assert (BLOCK * result.hits_by_request).tolist() == run.host_tokens.tolist()
    assert store.stats.num_host_query_tokens == trace.input_tokens.sum()
    with pytest.raises(RuntimeError, match="closed"):
        store.load([0] * BLOCK)


def test_a_policy_is_notified_of_each_load(make):
    store = make(cache_policy="hazard", clock=lambda: 7.5)
    tokens = list(range(3 * store.block_size))
    assert store.load(tokens) is None
    assert keep(store, tokens) == len(tokens)
    assert store.load(tokens).num_tokens == len(tokens)
    shown = store._index.snapshot().policy
    assert shown["now_ms"] == 7500
    assert sum(shown["touches"].values()) == 2 * 3


def state_of(store):
    """Return all that a call may change."""
    store.flush()
    names = "_epoch", "_namespace", "_num_saves", "_num_loads"
    fields = tuple(getattr(store, name) for name in names)
    snapshot = repr(store._index.snapshot())
    return (store.stats, store.held_bytes, snapshot, *fields)


def check_at_rest(store):
    """Check that nothing is pinned, and that the index agrees with the engine."""
    snapshot = store._index.snapshot()
    assert set(snapshot.ref_cnt.values()) <= {0}
    assert store.held_bytes == len(snapshot.ref_cnt) * store.block_bytes
    engine = store._engine
    assert engine.num_in_flight == engine._table.num_pins == 0
    stats = store.stats
    dropped = stats.num_dropped_full, stats.num_dropped_failed, stats.num_dropped_reset
    assert stats.num_offered == stats.num_stored + sum(dropped)


@modes
def test_arrays_of_several_lengths_share_blocks(make, mode):
    store = make(mode=mode)
    prompt = list(range(20))
    assert keep(store, prompt, length=20) == 20
    for length in (34, 20, 18, 9, 4):
        hit = store.load(prompt, length=length)
        assert hit.num_tokens == min(20, length // BLOCK * BLOCK)
        check_hit(hit, prompt, length=length)
    assert store.load(prompt, length=3) is None
    # A longer prompt: only its new blocks move, out of longer arrays.
    assert keep(store, [*prompt, *range(50, 60)], length=30, num_tokens=26) == 24
    assert store.stats.num_stored == 6
    check_hit(store.load([*prompt, *range(50, 60)]), [*prompt, *range(50, 60)])


class Oracle:
    """The held prefixes: a list of token prefixes, the oldest use first."""

    def __init__(self, num_blocks):
        self.num_blocks = num_blocks
        self.order = []
        self.num_stored = self.num_dropped = self.num_evicted = 0

    def keys(self, tokens, extras):
        ends = range(BLOCK, min(len(tokens), LENGTH) + 1, BLOCK)
        return [(extras, tuple(tokens[:end])) for end in ends]

    def use(self, keys):
        for key in reversed(keys):
            if key in self.order:
                self.order.remove(key)
                self.order.append(key)

    def hits(self, keys):
        missing = [n for n, key in enumerate(keys) if key not in self.order]
        return min(missing, default=len(keys))

    def load(self, keys, min_tokens):
        num_hits = self.hits(keys)
        if num_hits * BLOCK < min_tokens:
            num_hits = 0
        self.use(keys[:num_hits])
        return num_hits

    def save(self, keys):
        self.num_dropped += len(keys[self.num_blocks :])
        keys = keys[: self.num_blocks]
        new = [key for key in keys if key not in self.order]
        while len(self.order) + len(new) > self.num_blocks:
            self.order.remove(next(key for key in self.order if key not in keys))
            self.num_evicted += 1
        self.order += new
        self.num_stored += len(new)
        self.use(keys)
        return len(keys)


def random_prompt(rng, num_ends=20):
    """Join a random prefix and a random end: prompts often share blocks."""
    beginning = np.random.default_rng(int(rng.integers(4))).integers(0, 50, 16)
    seed = 100 + int(rng.integers(num_ends))
    end = np.random.default_rng(seed).integers(0, 50, 17)
    tokens = [*beginning[: rng.integers(17)], *end[: rng.integers(18)]]
    return [int(token) for token in tokens]


@modes
@pytest.mark.parametrize("seed", range(3))
def test_random_prompts_agree_with_a_list_of_prefixes(make, seed, mode):
    rng = np.random.default_rng(seed)
    num_blocks, num_tenants, num_ends = [(64, 4, 20), (5, 2, 1), (24, 1, 2)][seed]
    store, oracle = make(num_blocks, mode=mode), Oracle(num_blocks)
    num_queried = num_hit = 0
    for _ in range(80):
        tokens = random_prompt(rng, num_ends)
        extras = TENANTS[rng.integers(num_tenants)]
        keys = oracle.keys(tokens, extras)
        action = rng.random()
        if action < 0.5:
            forms = (tokens, np.array(tokens, np.int32), jnp.array(tokens, int))
            min_tokens = 12 * (action < 0.1)
            hit = store.load(
                forms[num_queried % 3],
                extras,
                min_tokens=min_tokens,
                epoch=store.epoch,
            )
            num_tokens = BLOCK * oracle.load(keys, min_tokens)
            assert (0 if hit is None else hit.num_tokens) == num_tokens
            if hit is not None:
                check_hit(hit, tokens, extras)
            num_queried, num_hit = num_queried + len(tokens), num_hit + num_tokens
        elif action < 0.98:
            assert keep(store, tokens, extras) == BLOCK * oracle.save(keys)
        else:
            store.clear()
            oracle.order.clear()
        held = bool(keys) and oracle.hits(keys) == len(keys)
        assert store.contains(tokens, extras) == held
        assert store.held_bytes == len(oracle.order) * store.block_bytes
    stats = store.stats
    assert (stats.num_host_query_tokens, stats.num_host_hit_tokens) == (
        num_queried,
        num_hit,
    )
    assert num_hit > 0
    assert stats.num_stored == oracle.num_stored
    assert stats.num_dropped_full == oracle.num_dropped
    assert stats.num_evicted == oracle.num_evicted
    assert stats.num_dropped_failed == 0
    check_at_rest(store)


@contextlib.contextmanager
def blocked_thread(store):
    """Hold back all saves until the end of the block."""
    begun, go_on = threading.Event(), threading.Event()

    def wait():
        begun.set()
        assert go_on.wait(60)

    waiting = store._executor.submit(wait)
    assert begun.wait(60)
    try:
        yield
    finally:
        go_on.set()
    waiting.result()
    store.flush()


@modes
def test_saved_arrays_may_be_donated_at_once(make, mode):
    store = make(mode=mode)
    overwrite = jax.jit(
        lambda kv: jax.tree.map(jnp.zeros_like, kv), donate_argnums=0, keep_unused=True
    )
    kv = to_device(known_kv(PROMPT, LENGTH))
    with blocked_thread(store):
        assert store.save(PROMPT, kv) == 28
        jax.block_until_ready(overwrite(kv))
        assert kv["key"].is_deleted()
        assert not store.contains(PROMPT), "found before its bytes have arrived"
    check_hit(store.load(PROMPT), PROMPT)


def test_a_save_that_only_if_refuses_costs_no_other(make, caplog):
    store = make()

    def fail():
        raise KeyError("a mistake of the caller's")

    for number, only_if in enumerate((lambda: False, fail)):
        assert keep(store, PROMPT, only_if=only_if) == 28
        assert (store.load(PROMPT), store.held_bytes) == (None, 0)
        assert store.stats.num_dropped_failed == 7 * (1 + number)
        assert ("a mistake of the caller's" in caplog.text) == (only_if is fail)
    keep(store, OTHER, only_if=lambda: True)
    check_hit(store.load(OTHER), OTHER)
    check_at_rest(store)


def test_a_save_cleared_in_flight_is_not_found(make):
    store = make()

    def clear_and_begin_anew():
        store.clear()
        assert save(store, PROMPT, only_if=lambda: False) == 28
        return True

    kv = to_device(known_kv(OTHER, LENGTH))
    store.save(PROMPT, kv, only_if=clear_and_begin_anew)
    store.flush()
    assert not store.contains(PROMPT[:4])
    assert store.load(PROMPT, epoch=1) is None
    check_at_rest(store)


P, Q, R = list(range(8)), list(range(20, 24)), list(range(30, 34))


@pytest.mark.parametrize("seed", range(3))
def test_a_save_belongs_to_the_epoch_of_its_weights(make, seed):
    """Threads compute prompts of two adapters while the weights change."""
    rng, store = np.random.default_rng(seed), make()
    prompts = [[], P[:3], P, P + Q, P + R, P + Q + R, R]
    threads = [concurrent.futures.ThreadPoolExecutor(1) for _ in range(2)]
    held, computing, counts = set(), [], collections.Counter()
    for _ in range(200):
        run, epoch = threads[rng.integers(2)].submit, store.epoch
        action = rng.choice(["load", "save", "clear"], p=[0.4, 0.55, 0.05])
        is_kept = None
        if action == "clear":
            store.clear((None, "1")[rng.integers(2)])
            held = set()
        elif action == "load" or not computing:
            tokens, extras = (
                prompts[rng.integers(len(prompts))],
                TENANTS[rng.integers(2)],
            )
            old = int(rng.integers(epoch + 1)) if rng.random() < 0.2 else epoch
            num_held = len(keys_of(tokens, extras) & held) * (old == epoch)
            hit = run(store.load, tokens, extras, epoch=old).result()
            assert (0 if hit is None else hit.num_tokens) == num_held * BLOCK
            if is_kept := hit is not None:
                check_hit(hit, tokens, (extras, epoch))
            computing.append((tokens, extras, old))
        else:  # Of a prompt that any thread has loaded, however long ago.
            tokens, extras, old = computing.pop(rng.integers(len(computing)))
            keys, is_kept = keys_of(tokens, extras), old == epoch
            kv = to_device(known_kv(tokens, LENGTH, (extras, old)))
            saved = run(store.save, tokens, kv, extras=extras, epoch=old).result()
            assert saved == len(keys) * BLOCK * is_kept
            store.flush()
            held |= keys if is_kept else set()
        counts[action, is_kept] += 1
        assert store.held_bytes == len(held) * store.block_bytes
    assert len(counts) == 5
    assert min(counts.values()) >= 5, counts
    check_at_rest(store)
    for thread in threads:
        thread.shutdown()


def keys_of(tokens, extras):
    ends = range(BLOCK, len(tokens) + 1, BLOCK)
    return {(extras, *tokens[:end]) for end in ends}


ANSWER = list(range(90, 100))
LATE_SAVES = {
    "a shorter prompt was loaded since": (P, [P[:4]], P + Q),
    "many prompts were loaded since": (P, [P, *([n] * 4 for n in range(40)), P], P + R),
    "the prompt and a part of its answer were": (P, [P + ANSWER[:4]], P + ANSWER),
}


@pytest.mark.parametrize("case", LATE_SAVES)
@pytest.mark.parametrize("num_threads", [0, 1])
def test_kv_of_old_weights_is_not_kept_whatever_was_loaded_since(
    make, case, num_threads
):
    """The saving thread loads the prompts, or another one."""
    store, (before, since, saved) = make(), LATE_SAVES[case]
    kv = to_device(known_kv(saved, LENGTH, "old weights"))

    def load_all():
        store.load(before)
        store.clear("v2")
        for tokens in since:
            store.load(tokens, epoch=1)

    if num_threads:
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            thread.submit(load_all).result()
    else:
        load_all()
    with pytest.raises(ValueError, match="epoch=None must be a number, since clear"):
        store.save(saved, kv)
    assert store.save(saved, kv, epoch=0) == 0
    store.flush()
    assert (store.load(saved, epoch=1), store.held_bytes) == (None, 0)
    assert store.stats.num_dropped_reset == len(saved) // BLOCK


def test_a_load_after_a_clear_needs_the_epoch(make):
    store = make()
    keep(store, P)
    store.clear()
    keep(store, P)
    with pytest.raises(ValueError, match="epoch=None must be a number, since clear"):
        store.load(P)
    assert store.load(P, epoch=0) is None
    check_hit(store.load(P, epoch=1), P)
    for call in (store.load, lambda tokens, **named: save(store, tokens, **named)):
        with pytest.raises(ValueError, match="epoch=2 must be at most 1"):
            call(P, epoch=2)


def test_a_clear_between_the_keys_of_a_call_and_its_effect_is_noticed(
    make, monkeypatch
):
    """Another thread clears in the middle of each call."""
    store = make()
    keep(store, P)
    kv = to_device(known_kv(P, LENGTH))
    extend = prefix_store.KeyChain.extend

    def extend_and_clear(chain, tokens):
        keys = extend(chain, tokens)
        store.clear("0")  # The same keys.
        return keys

    with monkeypatch.context() as patch:
        patch.setattr(prefix_store.KeyChain, "extend", extend_and_clear)
        assert store.load(P) is None
        assert store.save(P, kv, epoch=store.epoch) == 0
        assert store.load(P, epoch=store.epoch) is None
    store.flush()
    assert not store.contains(P)
    check_at_rest(store)


def test_a_clear_after_the_bytes_of_a_load_arrived_makes_it_a_miss(make, monkeypatch):
    store = make()
    keep(store, P)
    drain = store._engine.drain

    def drain_and_clear(pool):
        ended = drain(pool)
        store.clear()
        return ended

    monkeypatch.setattr(store._engine, "drain", drain_and_clear)
    assert store.load(P) is None
    assert (store.stats.num_host_hit_tokens, store.stats.num_loads_failed) == (0, 0)
    check_at_rest(store)


def test_a_save_that_waits_for_others_ends_with_its_epoch(make):
    store = make(max_pending_saves=1)
    kv = to_device(known_kv(P, LENGTH))
    with concurrent.futures.ThreadPoolExecutor(1) as thread, blocked_thread(store):
        save(store, Q)
        waiting = thread.submit(store.save, P, kv)
        wait_for(lambda: store._changed._waiters)
        store.clear()
        assert waiting.result(timeout=60) == 0
    assert store.stats.num_dropped_reset == (len(P) + len(Q)) // BLOCK
    assert store.held_bytes == 0


def test_a_load_is_copied_before_the_saves_that_wait(make, monkeypatch):
    store, order = make(), []
    keep(store, P)

    def recorded(name, copy):
        return lambda *args: order.append(name) or copy(*args)

    for name in ("save", "load"):
        copy = recorded(name, getattr(store._engine, name))
        monkeypatch.setattr(store._engine, name, copy)
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        with blocked_thread(store):
            save(store, OTHER)
            save(store, Q)
            loading = thread.submit(store.load, P)
            wait_for(lambda: store._loads)
        check_hit(loading.result(), P)
    assert order == ["load", "save", "save"]


def test_blocks_that_are_being_loaded_are_not_evicted(make):
    store = make(5)
    prompt = list(range(5 * BLOCK))
    keep(store, prompt)
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        with blocked_thread(store):
            loading = thread.submit(store.load, prompt)
            wait_for(lambda: store.stats.num_host_query_tokens)
            assert save(store, [100 + token for token in prompt]) == 0
        check_hit(loading.result(), prompt)
    check_at_rest(store)


@modes
def test_failed_kv_is_never_found(make, mode):
    store = make(mode=mode)
    save(store, PROMPT[:9])
    kv = faults.broken(to_device(known_kv(PROMPT, LENGTH)))
    assert store.save(PROMPT, kv) == 28
    store.flush()
    faults.recover(to_device(known_kv(PROMPT, LENGTH)))
    hit = store.load(PROMPT)
    assert hit.num_tokens == 8
    check_hit(hit, PROMPT)
    assert store.stats.num_dropped_failed == 5
    check_at_rest(store)
    assert keep(store, PROMPT) == 28
    check_hit(store.load(PROMPT), PROMPT)


def test_a_save_that_cannot_copy_its_kv_raises_and_holds_nothing(make, monkeypatch):
    store = make()

    def fails(*args):
        raise jax.errors.JaxRuntimeError("out of the device's memory")

    with monkeypatch.context() as patch:
        patch.setattr(type(store._layout), "cut", fails)
        with pytest.raises(jax.errors.JaxRuntimeError, match="out of the device's"):
            save(store, P)
    store.flush()
    assert (store.load(P), store.stats.num_dropped_failed) == (None, 2)
    check_at_rest(store)


@modes
def test_a_failed_load_is_a_miss_and_discards_its_blocks(make, mode, monkeypatch):
    store = make(mode=mode)
    keep(store, PROMPT)

    def fails(*args):
        raise jax.errors.JaxRuntimeError("a fault of the device")

    with monkeypatch.context() as patch:
        patch.setattr(store._engine._copier, "load_program", fails)
        assert store.load(PROMPT) is None
    assert (store.stats.num_loads_failed, store.stats.num_host_hit_tokens) == (1, 0)
    assert not store.contains(PROMPT)
    assert store.load(PROMPT) is None
    check_at_rest(store)
    keep(store, PROMPT)
    check_hit(store.load(PROMPT), PROMPT)


def test_a_bug_in_the_thread_is_raised_by_the_next_call(make, monkeypatch):
    store = make()

    def fails(*args):
        raise KeyError("a mistake in the code")

    monkeypatch.setattr(store._engine, "save", fails)
    save(store, list(range(8)))
    with pytest.raises(RuntimeError, match="thread failed") as raised:
        store.flush()
    assert "a mistake in the code" in str(raised.value.__cause__)
    with pytest.raises(RuntimeError, match="thread failed"):
        store.load([1, 2, 3, 4])


def test_a_full_queue_makes_the_next_save_wait(make):
    store = make(max_pending_saves=1)
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        with blocked_thread(store):
            save(store, list(range(8)))
            second = thread.submit(save, store, list(range(50, 58)))
            wait_for(lambda: store._changed._waiters)
            assert not second.done()
        assert second.result() == 8
    store.close()
    assert store.stats.num_stored == 4


def test_invalid_calls_are_refused_and_change_nothing(make):
    store = make()
    kv, prompt = to_device(known_kv(range(20), LENGTH)), list(range(20))
    deleted = to_device(known_kv(range(20), LENGTH))
    deleted["key"].delete()
    kv_40 = to_device(known_kv(prompt, 40))
    refusals = [
        (ValueError, "num_tokens=21 must be at most 20", (prompt, kv, 21)),
        (ValueError, "num_tokens=-1 must be at least 0", (prompt, kv, -1)),
        (ValueError, "num_tokens=35 must be at most 34", (list(range(35)), kv)),
        (ValueError, "must have the structure", (prompt, kv["layers"])),
        (ValueError, "'key' must be bfloat16", (prompt, kv | {"key": jnp.zeros(4)})),
        (
            ValueError,
            r"'layers/1' must be float32\[2, 2, 34\]",
            (prompt, kv | {"layers": [kv["layers"][0], kv["layers"][1][..., :20]]}),
        ),
        (TypeError, "must be a jax.Array", (prompt, known_kv(prompt, LENGTH))),
        (ValueError, "for 40 tokens, and the template for 34", (prompt, kv_40)),
        (RuntimeError, "kv: leaf 'key' has been deleted or donated", (prompt, deleted)),
        (ValueError, r"tokens\[1\]=-1", ([0, -1, 2, 3], kv)),
    ]
    for error, message, arguments in refusals:
        with pytest.raises(error, match=message):
            store.save(*arguments)
    with pytest.raises(TypeError, match="only_if=True must be a function, or None"):
        store.save(prompt, kv, only_if=True)
    for call in (store.load, store.contains):
        with pytest.raises(TypeError, match="extras='alice' must be of type Extras"):
            call(prompt, "alice")
    with pytest.raises(ValueError, match="length=35 must be at most 34"):
        store.load(prompt, length=35)
    assert (store.stats, store.held_bytes) == (OffloadStats(), 0)
    store.load(prompt)
    store.save(prompt, kv)
    tokens_and_extras = {"tokens": (prompt,), "extras": (NO_EXTRAS,)}
    calls = {
        "contains": tokens_and_extras,
        "load": tokens_and_extras
        | {
            "min_tokens": (0, 10**30),
            "length": (LENGTH, None),
            "epoch": (0, None),
        },
        "save": tokens_and_extras
        | {
            "kv": (kv,),
            "num_tokens": (20, None),
            "only_if": (None, None, len),
            "epoch": (0, None),
        },
        "clear": {"weights_epoch": ("1", None, "x")},
    }
    for name, arguments in calls.items():
        check_refusals(getattr(store, name), arguments, lambda: state_of(store))
    store.close()
    store.close()
    for call in (store.flush, store.clear, lambda: store.load(prompt)):
        with pytest.raises(RuntimeError, match="was closed"):
            call()
    with pytest.raises(RuntimeError, match="was closed"):
        store.save(prompt, kv)


REFUSED = [
    (
        {"sequence_axis": 0},
        ValueError,
        "sequence_axis as its block_axis: .* has 3 blocks",
    ),
    ({"sequence_axis": {"key": 0}}, ValueError, "must be an int, or a tree of ints"),
    ({"sequence_axis": 3}, ValueError, r"block_axis 3 of pool\['key'\] must be"),
    ({"sequence_axis": -4}, ValueError, r"block_axis -4 of pool\['key'\] must be"),
    ({"num_host_blocks": 0}, ValueError, "num_host_blocks=0 must be at least 1"),
    ({"num_host_blocks": None}, ValueError, "one of"),
    ({"max_pending_saves": 0}, ValueError, "max_pending_saves=0 must be at least"),
    ({"cache_policy": "nonesuch"}, ValueError, "nonesuch"),
    ({"namespace": Namespace("m", "0", "d", "l", 64)}, ValueError, "than a block"),
    ({"namespace": "m"}, TypeError, "namespace='m' must be a jaxkv.Namespace"),
    ({"storage": "kv"}, TypeError, "unexpected keyword argument 'storage'"),
    (
        {"sequence_axis": 0, "like": {"key": np.zeros((8, 2))}},
        TypeError,
        "'key' must be a jax.Array or",
    ),
    (
        {"sequence_axis": 0, "like": [3]},
        TypeError,
        "'0' must be a jax.Array or .* not <class 'int'>",
    ),
    ({"sequence_axis": 0, "like": []}, ValueError, "pool has no leaves"),
]


def test_invalid_arguments_are_refused(make):
    for arguments, error, message in REFUSED:
        with pytest.raises(error, match=message):
            make(**arguments)


def test_another_number_of_blocks_compiles_nothing(make):
    store = make()
    store.warm_up()
    programs = store._layout._programs
    compiled = programs.cache_info().misses
    for end in (9, 13, 17, 34):
        keep(store, list(range(end)))
        assert store.load(list(range(end))).num_tokens == end // BLOCK * BLOCK
    assert (compiled, programs.cache_info().misses) == (3, 3)


def test_a_load_that_is_interrupted_at_any_line_leaves_nothing_pinned(make):
    store = make(5)
    prompt = list(range(5 * BLOCK))
    keep(store, prompt)
    store.load(prompt)  # It compiles; a compilation would hide the lines after it.
    root = pathlib.Path(prefix_store.__file__).parents[1]
    places = [str(root), threading.__file__, concurrent.futures.__path__[0]]
    num_interrupted, left, before = 0, 0, sys.gettrace()

    def trace(frame, event, _):
        nonlocal left
        name, line = frame.f_code.co_filename, frame.f_lineno
        if not name.startswith(tuple(places)):
            return None
        text = linecache.getline(name, line).lstrip()
        # The interpreter handles no signal where it leaves a `with`.
        if event == "line" and not text.startswith("with "):
            left -= 1
            if left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    hit = None
    while hit is None:
        left = num_interrupted
        sys.settrace(trace)
        try:
            hit = store.load(prompt)
        except KeyboardInterrupt:
            num_interrupted += 1
        else:
            assert hit is not None
        finally:
            sys.settrace(before)
    assert num_interrupted > 20
    check_hit(hit, prompt)
    # The interrupted loads end before this save: all blocks can be evicted.
    keep(store, [100 + token for token in prompt])
    assert store.stats.num_dropped_full == 0
    check_at_rest(store)


def test_a_store_that_no_thread_can_serve_is_refused(make):
    before = set(threading.enumerate())
    with refused_threads(0, 1), pytest.raises(RuntimeError, match="can't start new"):
        make()
    wait_for(lambda: set(threading.enumerate()) <= before)


def test_a_load_without_a_thread_for_it_runs_in_the_callers(make, monkeypatch):
    store, threads = make(), []
    keep(store, P)

    def refuse(*args):
        raise RuntimeError("can't start new thread")

    def record_and_load(*args):
        threads.append(threading.current_thread())
        return load(*args)

    load = store._load
    with monkeypatch.context() as patch:
        patch.setattr(store, "_load", record_and_load)
        patch.setattr("_thread.start_new_thread", refuse)
        check_hit(store.load(P), P)
    assert threads == [threading.current_thread()]


UNCLOSED = """
import jax
jax.config.update("jax_platforms", "cpu")
from tests.integrations import test_prefix_store as t
store = t.make_store()
t.save(store, t.PROMPT)
print("end")
"""


def test_a_process_that_closes_nothing_ends():
    done = run_python(UNCLOSED, text=True, timeout=500)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")
