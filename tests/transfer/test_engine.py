"""What the engine promises a caller: order, refusals, failures, and never to block."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.transfer import TransferEngine

CPU = jax.devices("cpu")[0]
MODES = ("fused", "staged")
NUM_BLOCKS, NUM_HOST_BLOCKS = 24, 32

modes = pytest.mark.parametrize("mode", MODES)


def numbered_pool(offset=0):
    """Blocks that say which they are: leaf k holds n, leaf v holds -n."""
    numbers = jnp.arange(offset, offset + NUM_BLOCKS, dtype=jnp.float32)
    k = jnp.broadcast_to(numbers[:, None], (NUM_BLOCKS, 8))
    return jax.device_put({"k": k, "v": -k.astype(jnp.bfloat16)}, CPU)


def numbers_in(pool):
    """The number of each block; checks that all of the block agrees."""
    k, v = np.array(pool["k"]), np.array(pool["v"].astype(jnp.float32))
    assert (k == k[:, :1]).all()
    assert (v == -k).all()
    return k[:, 0].astype(int).tolist()


def make_engine(mode):
    pool = numbered_pool()
    return TransferEngine(pool, NUM_HOST_BLOCKS, mode=mode), pool


def load_numbers(engine, pool, host_ids):
    """Load `host_ids` into the first blocks of `pool` and read them."""
    pool, _ = engine.load(pool, host_ids, list(range(len(host_ids))))
    return numbers_in(pool)[: len(host_ids)], pool


@pytest.fixture(scope="module")
def delayed():
    """Make a pool that is ready some seconds later, however fast the machine is."""

    @jax.jit
    def step(num_products, pool):
        # Products, for XLA:CPU runs what it takes to be cheap before it returns.
        mean = jnp.full((64, 64), 1 / 64, jnp.float32)
        product = jax.lax.fori_loop(0, num_products, lambda _, x: x @ mean, mean)
        zero = product[0, 0] * 0
        return jax.tree.map(lambda leaf: leaf + zero.astype(leaf.dtype), pool)

    def duration_s(num_products):
        start_s = time.perf_counter()
        jax.block_until_ready(step(num_products, numbered_pool()))
        return time.perf_counter() - start_s

    duration_s(1)
    products_per_s = 2000 / min(duration_s(2000) for _ in range(5))
    return lambda pool, seconds: step(int(seconds * products_per_s), pool)


def fault(*args):
    raise RuntimeError("a fault of the device")


def callback(function):
    """f32[]: what `function` says when the program runs."""
    return jax.pure_callback(function, jax.ShapeDtypeStruct((), jnp.float32))


@pytest.fixture
def broken(delayed):
    """Make a pool whose arrays turn out to have failed, some time later."""

    def step(pool, function):
        zero = callback(function)
        return jax.tree.map(lambda leaf: leaf + zero.astype(leaf.dtype), pool)

    step = jax.jit(step, static_argnames="function")
    yield lambda pool: step(delayed(pool, 0.5), fault)
    # jax waits at exit for the last callback of a device: let it be one that succeeds.
    jax.block_until_ready(step(numbered_pool(), lambda: np.zeros((), np.float32)))


@modes
def test_sizes(mode):
    engine, _ = make_engine(mode)
    assert engine.mode == mode
    assert engine.block_bytes == 8 * 4 + 8 * 2
    assert engine.num_host_blocks == NUM_HOST_BLOCKS
    assert engine.host_bytes == NUM_HOST_BLOCKS * engine.block_bytes
    assert engine.num_in_flight == 0


def test_the_default_on_cpu_is_fused():
    assert TransferEngine(numbered_pool(), 1).mode == "fused"


@modes
def test_completions_are_in_the_order_of_issue(mode):
    engine, pool = make_engine(mode)
    tickets = [engine.save(pool, [i, i + 1], [2 * i, 2 * i + 1]) for i in range(5)]
    assert engine.num_in_flight == 5
    assert [done.ticket for done in engine.drain()] == tickets
    for i in range(3):
        pool, ticket = engine.load(pool, [i], [i])
        tickets += [ticket, engine.save(pool, [9], [30])]
    done = engine.drain()
    assert [each.ticket for each in done] == tickets[5:]
    assert [each.ticket.number for each in done] == list(range(5, 11))
    assert [each.direction for each in done] == ["load", "store"] * 3
    assert [each.num_blocks for each in done] == [1] * 6
    assert [each.num_bytes for each in done] == [engine.block_bytes] * 6
    assert engine.num_in_flight == 0
    assert engine.poll() == engine.drain() == []


@modes
@pytest.mark.parametrize("empty", [[], (), np.zeros(0, np.int64), np.zeros(0)])
def test_empty_transfers_complete_at_the_next_poll(mode, empty):
    engine, pool = make_engine(mode)
    stored = engine.save(pool, empty, empty)
    same, loaded = engine.load(pool, empty, empty)
    assert numbers_in(same) == numbers_in(pool)  # Not donated.
    done = engine.poll()
    assert [each.ticket for each in done] == [stored, loaded]
    assert [(each.num_blocks, each.error) for each in done] == [(0, None)] * 2


@modes
@pytest.mark.parametrize("num_blocks", [1, 3, 4, 15, 16, 17, 21, 24])
def test_any_number_of_blocks(mode, num_blocks):
    engine, pool = make_engine(mode)
    ids = np.random.default_rng(num_blocks).permutation(NUM_BLOCKS)[:num_blocks]
    engine.save(pool, ids.tolist(), ids.astype(np.uint16))
    assert engine.drain()[0].num_blocks == num_blocks
    found, _ = load_numbers(engine, pool, ids)
    assert found == ids.tolist()


@modes
def test_a_host_block_can_be_loaded_twice_at_once(mode):
    engine, pool = make_engine(mode)
    engine.save(pool, [7], [3])
    engine.drain()
    assert load_numbers(engine, pool, [3, 3, 3])[0] == [7, 7, 7]


@modes
def test_the_caller_may_change_his_ids_after_the_call(mode, delayed):
    engine, pool = make_engine(mode)
    engine.warm_up()
    # At an address that XLA reads in place, if it is let.
    memory = np.zeros(64, np.int32)
    start = -memory.ctypes.data % 64 // 4
    device_ids = memory[start : start + 4]
    device_ids[:] = [5, 6, 7, 8]
    host_ids = np.array([1, 2, 3, 4], np.int32)
    engine.save(delayed(pool, 0.3), device_ids, host_ids)
    device_ids[:] = host_ids[:] = 0
    engine.drain()
    assert load_numbers(engine, pool, [1, 2, 3, 4])[0] == [5, 6, 7, 8]


@modes
def test_save_and_load_do_not_wait_for_the_step_before(mode, delayed):
    engine, pool = make_engine(mode)
    engine.warm_up()
    engine.save(pool, [4], [9])
    engine.drain()
    pool = delayed(pool, 1.0)
    step_output = pool["k"]
    stored = engine.save(pool, range(NUM_BLOCKS), [*range(10, 32), 0, 1])
    assert not step_output.is_ready()
    assert engine.poll() == []
    pool, loaded = engine.load(pool, [9], [0])
    assert not pool["k"].is_ready()
    assert engine.poll() == []
    assert engine.num_in_flight == 2
    assert [done.ticket for done in engine.drain()] == [stored, loaded]
    assert numbers_in(pool) == [4, *range(1, NUM_BLOCKS)]


@modes
def test_poll_reports_without_drain(mode, delayed):
    engine, pool = make_engine(mode)
    ticket = engine.save(delayed(pool, 0.2), [4], [9])
    reports = []
    give_up_s = time.perf_counter() + 60
    while not reports and time.perf_counter() < give_up_s:
        reports = engine.poll()
    assert [done.ticket for done in reports] == [ticket]
    assert load_numbers(engine, pool, [9])[0] == [4]


@modes
def test_a_device_block_may_be_overwritten_right_after_save(mode, delayed):
    engine, pool = make_engine(mode)
    engine.warm_up()

    def overwrite(pool):
        return jax.tree.map(lambda leaf: leaf * 0 + jnp.ones((), leaf.dtype), pool)

    overwrite = jax.jit(overwrite, donate_argnums=0)
    overwrite(numbered_pool())  # Compiled now, so that it comes right after the save.
    pool = delayed(pool, 0.3)  # The save is still to run when its blocks are donated.
    engine.save(pool, [3, 14, 15], [2, 7, 1])
    overwrite(pool)
    assert pool["k"].is_deleted()
    assert [done.error for done in engine.drain()] == [None]
    assert load_numbers(engine, numbered_pool(), [2, 7, 1])[0] == [3, 14, 15]


REFUSALS = {
    "device id too large": ([0, 24], [1, 2], r"device_block_ids has \[24\]; .*0, 24"),
    "device id negative": ([0, -1], [1, 2], r"device_block_ids has \[-1\]"),
    "host id too large": ([0, 1], [1, 32], r"host_block_ids has \[32\]; .*0, 32\)"),
    "host id negative": ([0, 1], [-1, 2], r"host_block_ids has \[-1\]"),
    "too wide an id": ([0], [2**40 + 1], "host_block_ids has"),
    "lengths differ": ([0, 1], [2], "2 device_block_ids and 1 host_block_ids must be"),
    "device id twice": ([3, 3], [1, 2], r"device_block_ids has \[3\] more than once"),
    "floats": ([0.0], [1], r"device_block_ids must be a flat sequence of ints, not fl"),
    "bools": ([True], [1], "flat sequence of ints, not bool"),
    "nested": ([[0]], [[1]], r"flat sequence of ints, not int64\[1, 1\]"),
}


@modes
@pytest.mark.parametrize("case", REFUSALS)
def test_refused_ids_change_nothing(mode, case):
    engine, pool = make_engine(mode)
    first = engine.save(pool, [7, 8], [1, 2])
    engine.drain()
    device_ids, host_ids, message = REFUSALS[case]
    with pytest.raises(ValueError, match=message):
        engine.save(pool, device_ids, host_ids)
    with pytest.raises(ValueError, match=message):
        engine.load(pool, host_ids, device_ids)
    assert engine.poll() == []
    assert load_numbers(engine, pool, [1, 2])[0] == [7, 8]
    assert engine.drain()[0].ticket.number == first.number + 1


@modes
def test_a_save_into_one_host_block_twice_is_refused(mode):
    engine, pool = make_engine(mode)
    with pytest.raises(ValueError, match=r"host_block_ids has \[5\] more than once"):
        engine.save(pool, [0, 1, 2], [5, 6, 5])
    assert engine.num_in_flight == 0


@modes
def test_host_blocks_without_bytes_cannot_be_loaded(mode):
    engine, pool = make_engine(mode)
    engine.save(pool, [7], [1])
    engine.drain()
    with pytest.raises(ValueError, match=r"host blocks \[4, 5\] have no bytes to load"):
        engine.load(pool, [1, 4, 5], [0, 1, 2])
    engine.save(pool, [8], [1])
    with pytest.raises(ValueError, match=r"\[1\] .* reported as completed"):
        engine.load(pool, [1], [0])
    engine.drain()
    assert load_numbers(engine, pool, [1])[0] == [8]


@modes
def test_a_stale_pool_is_refused_and_changes_nothing(mode):
    engine, stale = make_engine(mode)
    engine.save(stale, [7], [1])
    engine.drain()
    pool, _ = engine.load(stale, [1], [0])
    engine.drain()
    with pytest.raises(RuntimeError, match="pass the pool that the last load"):
        engine.save(stale, [2], [1])
    with pytest.raises(RuntimeError, match="pass the pool that the last load"):
        engine.load(stale, [1], [2])
    assert engine.num_in_flight == 0
    assert load_numbers(engine, pool, [1])[0] == [7]


@modes
def test_a_pool_of_another_layout_is_refused_and_changes_nothing(mode):
    engine, pool = make_engine(mode)
    engine.save(pool, [7], [1])
    engine.drain()
    other = {"k": pool["k"], "v": pool["k"]}
    with pytest.raises(ValueError, match=r"pool\['v'\] must be bfloat16\[24, 8\]"):
        engine.save(other, [2], [1])
    with pytest.raises(ValueError, match=r"pool\['v'\] must be bfloat16\[24, 8\]"):
        engine.load(other, [1], [2])
    assert engine.num_in_flight == 0
    assert load_numbers(engine, pool, [1])[0] == [7]


def test_wrong_arguments_at_construction():
    with pytest.raises(ValueError, match="num_host_blocks=0 must be at least 1"):
        TransferEngine(numbered_pool(), 0)
    with pytest.raises(ValueError, match="mode='eager' must be one of"):
        TransferEngine(numbered_pool(), 4, mode="eager")


@modes
def test_a_failed_save_is_reported_and_leaves_its_blocks_unreadable(mode, broken):
    engine, pool = make_engine(mode)
    engine.save(pool, [7, 8], [1, 2])
    engine.drain()
    bad = broken(pool)
    ticket = engine.save(bad, [0, 1, 3], [2, 3, 4])
    [done] = engine.drain()
    assert done.ticket == ticket
    assert isinstance(done.error, jax.errors.JaxRuntimeError)
    assert "a fault of the device" in str(done.error)
    # The guard against taking it for a success: asked whether it is ready, a failed
    # array says yes.
    with pytest.raises(jax.errors.JaxRuntimeError):
        bad["k"].block_until_ready()
    assert bad["k"].is_ready()
    with pytest.raises(ValueError, match=r"host blocks \[2, 3, 4\] have no bytes"):
        engine.load(pool, [2, 3, 4], [0, 1, 2])
    engine.save(pool, [9, 10, 11], [2, 3, 4])
    assert [each.error for each in engine.drain()] == [None]
    assert load_numbers(engine, pool, [1, 2, 3, 4])[0] == [7, 9, 10, 11]


@modes
def test_a_late_failure_spares_what_a_later_save_wrote(mode, monkeypatch):
    engine, pool = make_engine(mode)
    with monkeypatch.context() as patch:
        patch.setattr(engine._mover, "save_program", dispatch_failure)
        engine.save(pool, [0], [5])  # Fails, but is not reported yet.
    engine.save(pool, [6], [5])
    assert [done.error is None for done in engine.drain()] == [False, True]
    assert load_numbers(engine, pool, [5])[0] == [6]


def dispatch_failure(size):
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no staging memory")


@modes
def test_a_save_that_fails_at_dispatch_is_a_value_too(mode, monkeypatch):
    engine, pool = make_engine(mode)
    ids = list(range(21))  # Programs of 16, 4 and 1 blocks; the second fails.
    real = engine._mover.save_program

    def second_fails(size):
        return dispatch_failure(size) if size == 4 else real(size)

    with monkeypatch.context() as patch:
        patch.setattr(engine._mover, "save_program", second_fails)
        engine.save(pool, ids, ids)
    [done] = engine.drain()
    assert "no staging memory" in str(done.error)
    assert done.error.__traceback__ is None  # Its frames would keep the pool alive.
    for host_id in (0, 16, 20):
        with pytest.raises(ValueError, match="no bytes to load"):
            engine.load(pool, [host_id], [0])
    engine.save(pool, ids, ids)
    assert [each.error for each in engine.drain()] == [None]
    assert load_numbers(engine, pool, ids)[0] == ids


@modes
def test_a_load_that_fails_at_dispatch_returns_the_pool_as_it_was(mode, monkeypatch):
    engine, pool = make_engine(mode)
    engine.save(pool, [7], [1])
    engine.drain()
    with monkeypatch.context() as patch:
        patch.setattr(engine._mover, "load_program", dispatch_failure)
        pool, ticket = engine.load(pool, [1], [0])
    [done] = engine.drain()
    assert (done.ticket, done.direction) == (ticket, "load")
    assert "no staging memory" in str(done.error)
    assert numbers_in(pool) == list(range(NUM_BLOCKS))
    assert load_numbers(engine, pool, [1])[0] == [7]


@modes
def test_a_load_that_fails_on_its_way_spares_the_host_blocks(mode, broken):
    engine, pool = make_engine(mode)
    engine.save(pool, [7], [1])
    engine.drain()
    pool, ticket = engine.load(broken(pool), [1], [0])
    [done] = engine.drain()
    with pytest.raises(jax.errors.JaxRuntimeError, match="a fault of the device"):
        pool["k"].block_until_ready()
    assert done.ticket == ticket
    assert "a fault of the device" in str(done.error)
    assert load_numbers(engine, numbered_pool(100), [1])[0] == [7]
