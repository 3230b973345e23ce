"""A prefix store with storage behind it: warm after a restart, and never wrong.

`known_kv` computes a token's KV from the tokens before it, so any process knows the
expected bytes.
"""

import concurrent.futures
import contextlib
import gc
import math
import threading
import time
import weakref

import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import ConfigError, Extras, Namespace, OffloadConfig
from jaxkv.config import KEYS
from jaxkv.integrations.prefix_storage import StorageKeys
from jaxkv.keys.hashing import NO_EXTRAS
from jaxkv.transfer.storage import StoreError, open_store
from tests.integrations.test_prefix_store import (
    BLOCK,
    LENGTH,
    LIKE,
    check_at_rest,
    make_store,
    random_prompt,
)
from tests.rigs.command_line import run_python
from tests.rigs.faulty_store import Faults, FaultyStore
from tests.rigs.known_kv import check_hit, known_kv, to_device
from tests.rigs.refused_threads import refused_threads
from tests.rigs.waiting import wait_for

PROMPT = list(range(100, 100 + 30))  # Seven blocks, and two tokens.
NUM_BLOCKS, NUM_TOKENS = 7, 28
OTHER = list(range(7, 7 + 30))


@pytest.fixture
def make(closing, tmp_path):
    """Make stores that share a folder, and are closed after the test."""

    def make(**arguments):
        defaults = {
            "storage": str(tmp_path / "kv"),
            "storage_bytes": "1MiB",
            "storage_write": "through",
            "storage_deadline_s": 30.0,  # Longer than any stall of the machine.
        }
        return closing(make_store(**defaults | arguments))

    return make


def save(store, tokens, extras=NO_EXTRAS):
    """Save a prompt, and wait until its save has ended."""
    epoch = store.begin(tokens, extras)
    kv = to_device(known_kv(tokens, LENGTH, extras))
    store.save(tokens, kv, extras=extras, epoch=epoch)
    store.flush()


def filled(make, *prompts, **arguments):
    """Fill the folder by a store that is then closed."""
    with make(**arguments) as store:
        for tokens in prompts or (PROMPT,):
            save(store, tokens)
        assert store.wait_for_storage(60)
    return store


def restarted(make, *prompts, **arguments):
    """Fill the folder, and make another store, which has listed it."""
    filled(make, *prompts)
    return listed(make, **arguments)


def listed(make, **arguments):
    """Make a store that has listed the folder."""
    store = make(**arguments)
    assert store.wait_for_storage(60)
    return store


def files_of(tmp_path):
    return sorted(path for path in (tmp_path / "kv").rglob("*.0") if path.is_file())


@pytest.fixture
def faulty(monkeypatch):
    """Wrap each store that is opened from now on in a `FaultyStore`."""
    opened, faults = [], Faults()

    def open_faulty(url):
        opened.append(FaultyStore(open_store(url), len(opened), faults))
        return opened[-1]

    monkeypatch.setattr(
        "jaxkv.scheduling.worker.storage_worker.open_store", open_faulty
    )
    yield faults
    vars(faults).update(vars(Faults()))
    for store in opened:
        store.let_go()


@pytest.mark.parametrize("mode", ["fused", "staged"])
def test_a_store_that_is_made_anew_is_warm(make, mode):
    before = filled(make, mode=mode)
    assert before.stats.num_storage_stored == NUM_BLOCKS
    assert before.stats.num_storage_dropped == 0
    store = listed(make, mode=mode)
    assert (store.num_storage_blocks_held, store.held_bytes) == (NUM_BLOCKS, 0)
    assert not store.contains(PROMPT)
    hit = store.load([*PROMPT, 1, 2, 3])
    assert hit.num_tokens == NUM_TOKENS
    check_hit(hit, PROMPT)
    stats = store.stats
    assert (stats.num_loads, stats.num_host_hit_tokens) == (1, NUM_TOKENS)
    assert (stats.num_storage_loaded, stats.num_storage_failed) == (7, 0)
    assert store.contains(PROMPT)
    check_hit(store.load(PROMPT), PROMPT)  # On the host now.
    assert store.stats.num_storage_loaded == NUM_BLOCKS
    assert store.load(OTHER) is None
    assert store.stats.num_storage_stored == 0
    check_at_rest(store)


def test_a_remote_prefill_is_loaded_once_it_is_stored(make):
    keys = {"storage_list_s": 0, "storage_probe_s": 0.0, "storage_await_s": 30.0}
    writer, reader = make(**keys), make(**keys)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        loading = pool.submit(reader.load, PROMPT, remote_prefill=True)
        wait_for(
            lambda: reader._storage.worker.storage_io.stats.num_missing >= NUM_BLOCKS
        )
        assert not loading.done()
        save(writer, PROMPT)
        hit = loading.result(60)
    assert hit.num_tokens == NUM_TOKENS
    check_hit(hit, PROMPT)
    hurried = make(**keys | {"storage_await_s": 0.01})
    assert hurried.load(OTHER, remote_prefill=True) is None
    assert hurried.load(PROMPT) is None, "without remote_prefill nothing is probed"


OF_OTHERS = {
    "another model": {"namespace": Namespace("m", "0", "mixed", "made up", BLOCK)},
    "other weights": {"namespace": Namespace("model", "1", "mixed", "made up", BLOCK)},
    "another block size": {"namespace": Namespace("model", "0", "mixed", "made up", 2)},
    "another dtype": {
        "like": LIKE | {"key": LIKE["key"].view(jnp.uint16).astype(jnp.float16)}
    },
    "another shape": {"like": LIKE | {"key": jnp.zeros((LENGTH, 4, 4), jnp.bfloat16)}},
    "other names": {
        "like": {"keys": LIKE["key"], "layers": LIKE["layers"]},
        "sequence_axis": {"keys": 0, "layers": [1, 2]},
    },
    "another axis": {
        "like": LIKE | {"key": jnp.zeros((2, LENGTH, 8), jnp.bfloat16)},
        "sequence_axis": {"key": 1, "layers": [1, 2]},
    },
    "a secret": {"storage_secret": "a secret of many letters"},
}


def test_objects_of_other_namespaces_are_missed_and_stay(make, tmp_path):
    filled(make)
    before = {path: path.read_bytes() for path in files_of(tmp_path)}
    for name, options in OF_OTHERS.items():
        with listed(make, **options) as store:
            assert store.load(PROMPT) is None, name
            assert store.stats.num_storage_loaded == 0, name
        after = {path: path.read_bytes() for path in files_of(tmp_path)}
        assert after == before, name


def test_a_long_prompt_comes_in_parts_as_far_as_the_host_has_room(make):
    filled(make)
    for num_host_blocks, min_tokens in ((24, NUM_TOKENS), (5, BLOCK)):
        store = listed(make, num_host_blocks=num_host_blocks, max_storage_blocks=2)
        hit = store.load(PROMPT)
        assert min_tokens <= hit.num_tokens <= num_host_blocks * BLOCK
        check_hit(hit, PROMPT)
        check_at_rest(store)


def test_only_requested_blocks_that_are_not_on_the_host_are_fetched(make):
    filled(make)
    store = listed(make)
    assert store.load(PROMPT, min_tokens=NUM_TOKENS + 1) is None
    assert store.stats.num_storage_loaded == 0
    assert store.load(PROMPT, min_tokens=NUM_TOKENS).num_tokens == NUM_TOKENS
    store = listed(make, like=to_device(known_kv([], 20)))  # Shorter arrays.
    hit = store.load(PROMPT)
    assert hit.num_tokens == 20
    check_hit(hit, PROMPT)
    store = listed(make)
    save(store, PROMPT[: 3 * BLOCK])
    check_hit(store.load(PROMPT), PROMPT)
    stats = store.stats
    assert stats.num_host_hit_tokens == NUM_TOKENS
    assert stats.num_storage_loaded == 4


def test_a_prefetched_prompt_is_on_the_host_when_it_is_loaded(make):
    store = restarted(make)
    store.prefetch(OTHER)
    store.prefetch(PROMPT)
    wait_for(store.contains, PROMPT)
    hit = store.load(PROMPT)
    check_hit(hit, PROMPT)
    assert store.stats.num_storage_loaded == NUM_BLOCKS
    check_at_rest(store)


def test_fetches_slower_than_prefill_are_declined(make):
    store = restarted(make, PROMPT, OTHER)
    store.note_prefill_rate(1e15)
    check_hit(store.load(PROMPT), PROMPT)  # The speed of reads is unknown yet.
    assert store.load(OTHER) is None
    assert store.stats.num_fetches_declined == 1
    store.note_prefill_rate(0)
    check_hit(store.load(OTHER), OTHER)
    with pytest.raises(ValueError, match="tokens_per_s=-1 must be a number"):
        store.note_prefill_rate(-1)


def test_on_reuse_only_reused_blocks_are_written(make):
    store = make(storage_write="on_reuse")
    assert store.load(PROMPT) is None
    save(store, PROMPT)
    assert store.wait_for_storage(60)
    assert store.stats.num_storage_stored == 0
    assert store.load([*PROMPT[:13], 5]).num_tokens == 12
    assert store.wait_for_storage(60)
    assert store.stats.num_storage_stored == 3


@pytest.mark.parametrize("error", [RuntimeError, MemoryError])
def test_a_machine_without_threads_costs_misses_and_the_store_recovers(make, error):
    store = listed(make, storage_list_s=0.01)
    prompts = [list(range(1000 * n, 1000 * n + 30)) for n in range(6)]
    with refused_threads(error=error):
        for prompt in prompts[:3]:
            assert store.load(prompt) is None
            save(store, prompt)
            store.prefetch(prompt)
        wait_for(lambda: "list other" in store.storage_stats.failed)
        store.wait_for_storage(1.0)
        assert store.load(prompts[0]) is not None  # From the host.
    wait_for(lambda: store.wait_for_storage(1.0))
    for prompt in prompts:
        save(store, prompt)
    assert store.wait_for_storage(60)
    store.close()
    store = listed(make)
    assert store.load(prompts[5]).num_tokens == NUM_TOKENS
    check_at_rest(store)


def test_a_fetch_without_a_thread_to_copy_is_a_miss_and_the_next_one_a_hit(make):
    store = restarted(make)
    with refused_threads() as refused:
        assert store.load(PROMPT) is None
        assert any(name.startswith("jaxkv storage copy") for name in refused)
        assert store.storage_stats.failed["read other"] > 0
    wait_for(lambda: store.load(PROMPT) is not None)
    check_hit(store.load(PROMPT), PROMPT)
    assert store.storage_stats.is_up


def test_a_prefix_store_that_no_thread_can_serve_is_refused_and_closes_its_store(make):
    before = set(threading.enumerate())
    with refused_threads(0, 1), pytest.raises(RuntimeError, match="can't start new"):
        make()  # The thread that copies.
    with refused_threads(14, 1) as refused, pytest.raises(StoreError, match="can't"):
        make()
    assert refused == ["jaxkv prefix storage"]
    with refused_threads(1, 2) as refused:
        make().close()  # A later call starts the store's threads.
    assert len(refused) == 2
    gc.collect()
    wait_for(lambda: set(threading.enumerate()) <= before)


def test_clearing_needs_a_name_for_the_weights_and_their_kv_is_not_found(make):
    store = make(storage_list_s=0.02)
    save(store, PROMPT)
    assert store.wait_for_storage(60)
    for nothing in (None, ""):
        with pytest.raises(ValueError, match="must name the weights from now on"):
            store.clear(nothing)
    assert store.contains(PROMPT)
    store.clear("1")
    filled(make, OTHER, **OF_OTHERS["other weights"])
    wait_for(store.load, OTHER)  # It is listed again, whatever is there.
    assert store.load(PROMPT) is None
    save(store, PROMPT[:9])
    store.clear("0")  # The old weights are back.
    check_hit(wait_for(store.load, PROMPT), PROMPT)


def test_without_storage_a_name_of_other_weights_clears_as_well(make):
    store = make(storage=None)
    save(store, PROMPT)
    store.clear("1")
    assert store.load(PROMPT) is None
    save(store, PROMPT)
    check_hit(store.load(PROMPT), PROMPT)
    assert store.storage_stats is None
    assert store.wait_for_storage()
    store.prefetch(PROMPT)
    store.note_prefill_rate(5)


def test_a_store_that_hangs_is_waited_for_until_the_deadline_alone(make, faulty):
    store = restarted(make, storage_deadline_s=0.3)
    faulty.hang = 1.0
    begin_s = time.monotonic()
    assert store.load(PROMPT) is None
    assert time.monotonic() - begin_s > 0.25
    assert store.load(PROMPT) is None  # It is not fetched again.
    save(store, PROMPT)  # The recomputed KV is kept, and hit.
    check_hit(store.load(PROMPT), PROMPT)
    save(store, OTHER)  # Neither saves nor `close` wait for the store.
    store.close()


@contextlib.contextmanager
def fetching(store, faulty):
    """Load in a thread from a store that hangs; yield the future."""
    faulty.hang = 1.0
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        loading = thread.submit(store.load, PROMPT)
        wait_for(lambda: store.held_bytes)
        yield loading
    faulty.hang = 0.0


def test_a_prompt_that_is_cleared_while_it_is_fetched_is_a_miss(make, faulty):
    store = restarted(make, num_host_blocks=24)
    with fetching(store, faulty) as loading:
        store.clear("1")
        assert loading.result(timeout=20) is None  # Long before the deadline.
    for first in range(5):  # Its places on the host are given to others.
        save(store, [first, *OTHER[1:]])
        check_hit(store.load([first, *OTHER[1:]]), [first, *OTHER[1:]])
    assert store.wait_for_storage(60)
    check_at_rest(store)


def test_a_remote_prefill_that_is_cleared_while_it_is_awaited_is_a_miss(make):
    reader, writer = make(storage_await_s=60.0), make()
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        loading = thread.submit(reader.load, PROMPT, remote_prefill=True)
        wait_for(lambda: reader.held_bytes)
        reader.clear("1")
        save(writer, PROMPT)  # By the weights before.
        assert loading.result(timeout=20) is None
    assert (reader.load(PROMPT), reader.stats.num_host_hit_tokens) == (None, 0)


def test_a_prefetch_that_is_cleared_before_the_store_answers_fetches_nothing(
    make, faulty
):
    store = restarted(make, OTHER, storage_probe_s=30.0)
    filled(make, PROMPT)  # Not listed: the store is asked for it.
    faulty.hang = 1.0
    store.prefetch(PROMPT)
    wait_for(lambda: store._storage.worker.num_in_flight)
    store.clear("1")
    faulty.hang = 0.0
    for _ in range(50):
        store._storage.advance()
    store._storage.worker.storage_io._store.let_go()
    wait_for(lambda: not store._storage.worker.num_in_flight)
    assert (store.held_bytes, store.stats.num_storage_loaded) == (0, 0)


def test_a_close_while_a_prompt_is_fetched_ends_both(make, faulty):
    store = restarted(make)
    with fetching(store, faulty) as loading:
        store.close()
        with pytest.raises(RuntimeError, match="closed"):
            loading.result(timeout=20)
    store.close()


KINDS = {
    "errors": Faults(error=0.3, raising=0.1),
    "damage": Faults(cut=0.15, flip=0.15, longer=0.1, swap=0.2, junk=0.1, lose=0.1),
    "torn writes": Faults(tear=0.5),
    "late and hanging": Faults(late=0.5, hang=0.05),
}


@pytest.mark.parametrize("kind", KINDS)
def test_two_stores_of_eight_threads_never_get_a_wrong_byte(make, faulty, kind):
    rng = np.random.default_rng(8)
    filled(make, *(random_prompt(rng) for _ in range(8)))
    stores = [
        listed(
            make,
            num_host_blocks=24,
            storage_list_s=0.05,
            storage_deadline_s=0.2,
            storage_bytes="20KiB",
            max_storage_blocks=4,
        )
        for _ in range(2)
    ]
    vars(faulty).update(vars(KINDS[kind]))
    loaded = []

    def hammer(seed):
        rng, store = np.random.default_rng(seed), stores[seed % 2]
        for _ in range(40):
            tokens = random_prompt(rng)
            extras = (NO_EXTRAS, Extras(lora_name="a"))[rng.integers(2)]
            hit = store.load(tokens, extras)
            if hit is not None:
                check_hit(hit, tokens, extras)
                loaded.append(hit.num_tokens)
            kv = to_device(known_kv(tokens, LENGTH, extras))
            store.save(tokens, kv, extras=extras)
            if rng.random() < 0.05:
                store.clear("0")
            if rng.random() < 0.1:
                store.prefetch(random_prompt(rng), extras)

    def count(*names):
        return sum(getattr(store.stats, name) for store in stores for name in names)

    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        list(threads.map(hammer, range(8)))
    assert loaded
    assert count("num_storage_loaded", "num_storage_failed") > 0
    vars(faulty).update(vars(Faults()))
    for store in stores:
        store.flush()
        store.wait_for_storage(60)
        wait_for(is_at_rest, store)  # Until late fetches are over, too.
        assert store.stats.num_loads_failed == store.stats.num_dropped_failed == 0


def is_at_rest(store):
    try:
        check_at_rest(store)
    except AssertionError:
        return False
    return True


def test_wait_for_storage_returns_false_after_a_failure(make, faulty):
    filled(make, OTHER)
    faulty.error = 1.0
    store = make(storage_deadline_s=1e300)
    assert not store.wait_for_storage(math.inf), "it could not be listed"
    assert store.wait_for_storage(), "nothing has failed since"
    save(store, PROMPT)
    assert not store.wait_for_storage(), "nothing was written"
    faulty.error = 0.0
    store.clear("2")
    save(store, PROMPT)
    assert store.wait_for_storage()
    assert store.stats.num_storage_stored == NUM_BLOCKS


def test_a_bug_in_the_threads_is_raised_by_the_next_call(make, monkeypatch):
    store = restarted(make)

    def fails(moves):
        raise KeyError("a mistake in the code")

    monkeypatch.setattr(store._storage.worker, "start", fails)
    with pytest.raises(RuntimeError, match="thread failed") as raised:
        store.load(PROMPT)
    assert "a mistake in the code" in str(raised.value.__cause__)


def test_an_unclosed_store_is_collected_with_its_threads(tmp_path):
    before = set(threading.enumerate())
    store = make_store(storage=str(tmp_path / "kv"), storage_bytes="1MiB")
    threads = set(threading.enumerate()) - before
    thread, reference = store._storage._thread, weakref.ref(store)
    assert thread in threads
    assert store.wait_for_storage(60)
    del store
    wait_for(lambda: gc.collect() >= 0 and not any(t.is_alive() for t in threads))
    assert reference() is None


def named(**names):
    fields = {"model": "m", "weights_epoch": "0", "kv_dtype": "", "layout": ""}
    return Namespace(**(fields | names), block_size=BLOCK)


EVICTING = {"storage_write": "on_evict"}
REFUSED = [
    ({"namespace": named(model="")}, ConfigError, "needs model (got '')"),
    (
        {"namespace": named(weights_epoch="")},
        ConfigError,
        "needs weights_epoch (got '')",
    ),
    ({"storage_bytes": 100}, ValueError, "must be at least 432, what one host"),
    ({"storage_bytes": "much"}, ConfigError, "storage_bytes='much' must be a size"),
    (EVICTING | {"cache_policy": "arc"}, ValueError, "'on_evict' needs cache_policy="),
    (EVICTING | {"retention": True}, ValueError, "'on_evict' needs cache_policy="),
    (
        {"storage_byte": 5},
        TypeError,
        "unexpected keyword argument 'storage_byte': did you mean storage_bytes?",
    ),
    ({"metrics_port": 5}, TypeError, "unexpected keyword argument 'metrics_port'"),
    ({"storage": "ftp://host"}, ValueError, "unknown 'ftp'"),
    ({"storage": "/proc/kv"}, StoreError, "name a folder that can be made"),
]


def test_invalid_arguments_are_refused_in_one_line(make, monkeypatch):
    num_threads = threading.active_count()
    for arguments, error, message in REFUSED:
        with pytest.raises(error) as raised:
            make(**arguments)
        assert message in str(raised.value)
        assert "\n" not in str(raised.value)
    monkeypatch.setattr("jax.process_count", lambda: 2)
    with pytest.raises(ValueError, match="that one process serves"):
        make()
    wait_for(lambda: threading.active_count() <= num_threads)


UNCLOSED = """
import sys
import jax
jax.config.update("jax_platforms", "cpu")
from tests.integrations import test_prefix_storage as t
store = t.make_store(storage=sys.argv[1], storage_bytes="1MiB", storage_write="through")
t.save(store, t.PROMPT)
print("end")
"""


def test_a_process_that_closes_nothing_ends(tmp_path):
    done = run_python(UNCLOSED, str(tmp_path / "kv"), text=True, timeout=500)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


def test_the_keys_are_those_of_the_configuration(make, tmp_path):
    assert set(StorageKeys.__annotations__) == {n for n in KEYS if "storage" in n}
    environ = {"JAXKV_STORAGE": str(tmp_path / "kv"), "JAXKV_STORAGE_WRITE": "through"}
    environ["JAXKV_STORAGE_BYTES"] = "1MiB"
    config = OffloadConfig.from_env(environ=environ)
    store = make(**config.storage_keys())
    save(store, PROMPT)
    assert store.wait_for_storage(60)
    assert store.stats.num_storage_stored == NUM_BLOCKS
    none = OffloadConfig().storage_keys()
    assert none["storage"] is None
    assert make(**none).num_storage_blocks == 0
