"""Host blocks as bytes: read beside saves, written beside loads, from engine to engine.

The tests keep the bytes of the device block that each host block was saved from, and
compare every block that is loaded or read with them.
"""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.transfer import Compression, host_bytes
from tests.rigs.device_cases import only_on_cpu
from tests.rigs.extent_tables import check_table
from tests.transfer.numbered import Moves
from tests.transfer.shadow import Shadow

NUM_BLOCKS, NUM_HOST = 24, 40
BLOCK_AXIS = {"k": 0, "v": 1}  # Rows of v lie apart.


def random_pool(seed):
    rng = np.random.default_rng(seed)
    k, v = rng.normal(size=(2, NUM_BLOCKS, 4, 2, 8)).astype(np.float32)
    return {"k": jnp.asarray(k), "v": jnp.asarray(v.swapaxes(0, 1), jnp.bfloat16)}


def blocks_of(pool):
    leaves = np.asarray(pool["k"]), np.asarray(pool["v"]).swapaxes(0, 1)
    return [b"".join(leaf[n].tobytes() for leaf in leaves) for n in range(NUM_BLOCKS)]


@pytest.fixture
def make(make):
    def make_random(seed, num_host_blocks=NUM_HOST, **options):
        options |= {"block_axis": BLOCK_AXIS}
        return make(random_pool(seed), num_host_blocks, **options)

    return make_random


def in_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def read(engine, ids):
    held = engine.read_host(ids)
    payloads = [np.zeros(engine.host_payload_bytes, np.uint8) for _ in ids]
    in_thread(lambda: [held.copy(i, out) for i, out in enumerate(payloads)])
    held.close()
    return payloads


def write(engine, ids, payloads):
    writing = engine.write_host(ids, payloads)
    while not writing.is_over:
        engine.advance_host(in_thread)
    assert writing.error is None


def payload_of(engine):
    return np.arange(engine.host_payload_bytes).astype(np.uint8)


@pytest.mark.parametrize(
    "platforms", [pytest.param(("cpu",), marks=only_on_cpu), ()], ids=["cpu", "none"]
)
@pytest.mark.parametrize("compression", [None, Compression("int8")])
def test_bytes_of_one_engine_are_right_in_another(
    make, monkeypatch, platforms, compression
):
    # Also as where memory is not read and written at its address.
    monkeypatch.setattr(host_bytes, "_ADDRESSED_PLATFORMS", platforms)
    first, second = (make(1, compression=compression) for _ in range(2))
    description = first.engine.host_bytes_description
    assert description == second.engine.host_bytes_description
    ids = list(range(10, 10 + NUM_BLOCKS))
    first.save_now(range(NUM_BLOCKS), ids)
    expected = blocks_of(first.pool)
    if compression:
        assert description != make(1).engine.host_bytes_description
        first.load_now(ids, range(NUM_BLOCKS))
        expected = blocks_of(first.pool)
    order = np.random.default_rng(2).permutation(NUM_HOST)[:NUM_BLOCKS].tolist()
    write(second.engine, order, read(first.engine, ids))
    second.pool = jax.tree.map(jnp.zeros_like, second.pool)
    second.load_now(order, list(range(NUM_BLOCKS)))
    assert blocks_of(second.pool) == expected


def test_written_bytes_reach_every_copy_of_a_shard():
    mesh = jax.make_mesh((2, 2), ("heads", "copies"), devices=jax.devices()[:4])
    values = np.random.default_rng(0).normal(size=(NUM_BLOCKS, 4, 8))
    heads = jax.NamedSharding(mesh, jax.P(None, None, "heads"))
    pool = jax.device_put(values.astype(np.float32), heads)
    moves = Moves(None, pool, NUM_HOST)
    moves.save_now([1, 2], [10, 11])
    write(moves.engine, [20, 21], read(moves.engine, [10, 11]))
    moves.load_now([20, 21], [3, 4])
    for shard in moves.pool.addressable_shards:
        blocks = np.asarray(shard.data)
        np.testing.assert_array_equal(blocks[3:5], blocks[1:3])


def test_bytes_are_the_same_on_a_mesh_with_another_order_of_devices():
    values = np.random.default_rng(0).normal(size=(NUM_BLOCKS, 8, 4, 4))
    blocks = []
    for order in ((0, 1, 2, 3), (2, 0, 3, 1)):
        devices = np.array([jax.devices()[number] for number in order])
        mesh = jax.sharding.Mesh(devices.reshape(2, 2), ("heads", "copies"))
        for spec in (jax.P(None, "heads"), jax.P(None, "heads", "copies")):
            pool = jax.device_put(
                values.astype(np.float32), jax.NamedSharding(mesh, spec)
            )
            moves = Moves(None, pool, NUM_HOST)
            moves.save_now([1, 2], [10, 11])
            payloads = [payload.tobytes() for payload in read(moves.engine, [10, 11])]
            blocks.append((moves.engine.host_bytes_description, payloads))
    assert blocks[:2] == blocks[2:]
    # With copies of each half, or in quarters.
    assert blocks[0][0] != blocks[1][0]


def over_ranks(pool, num_shards):
    """Shard the blocks; if they are, the heads too, as if each rank had two devices."""
    mesh = jax.make_mesh((num_shards, 2), ("ranks", "heads"))
    specs = {"k": jax.P("ranks", None, "heads"), "v": jax.P(None, "ranks", "heads")}
    return jax.device_put(pool, {k: jax.NamedSharding(mesh, specs[k]) for k in specs})


@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("num_shards", [1, 2])
@pytest.mark.parametrize("seed", range(2))
def test_every_block_keeps_its_bytes_whatever_is_written_beside_it(
    make, m, num_shards, seed
):
    """With shards, each rank has a part of all blocks, and writes anybody's bytes."""
    rng = np.random.default_rng(seed)
    options = {"blocks_per_host_block": m, "extent_bytes": 4096 * num_shards}
    moves = make(seed, **options)
    if num_shards > 1:
        pool = over_ranks(moves.pool, num_shards)
        moves = Moves(None, pool, NUM_HOST, block_axis=BLOCK_AXIS, **options)
    shadow = Shadow(jax.tree.map(np.asarray, moves.pool), BLOCK_AXIS)
    payloads = {}  # The bytes of host blocks, as `read_host` copies them.

    def draw(num_blocks):
        """Return a rank's blocks in a random order."""
        num = num_blocks // num_shards
        return rng.permutation(num) + rank * num

    for _ in range(100):
        num, rank = int(rng.integers(1, 6)), int(rng.integers(num_shards))
        ids = draw(NUM_HOST)[:num].tolist()
        readable = [host for host in ids if host in shadow.host]
        match rng.integers(4):
            case 0:
                rows = draw(NUM_BLOCKS)[: num * m].reshape(num, m)
                moves.save_now(rows if m > 1 else rows[:, 0], ids)
                shadow.save(rows, ids)
                for host in ids:
                    payloads.pop(host, None)
            case 1 if payloads:
                names = [list(payloads)[rng.integers(len(payloads))] for _ in ids]
                held = [(shadow.host[name], payloads[name]) for name in names]
                write(moves.engine, ids, [payload for _, payload in held])
                for host, (blocks, payload) in zip(ids, held, strict=True):
                    shadow.host[host], payloads[host] = blocks, payload
            case 2 if readable:
                read_now = read(moves.engine, readable)
                for host, payload in zip(readable, read_now, strict=True):
                    old = payloads.setdefault(host, payload)
                    assert payload.tobytes() == old.tobytes()
            case _ if readable:
                rows = draw(NUM_BLOCKS)[: len(readable) * m].reshape(-1, m)
                moves.load_now(readable, rows if m > 1 else rows[:, 0])
                shadow.load(readable, rows)
                shadow.check(moves.pool)
        assert not moves.engine.poll()  # Unpins the extents that were read.
        check_table(moves.engine._table)
        assert moves.engine._table.num_pins == 0
    assert payloads, "the case that reads never ran"


def test_a_write_whose_copy_cannot_begin_fails_and_the_next_one_succeeds(make):
    engine = make(9, 1).engine
    payload = payload_of(engine)

    def refuse(copy):
        raise RuntimeError("can't start new thread")

    for _ in range(3):
        failed = engine.write_host([0], [payload])
        engine.advance_host(refuse)
        engine.advance_host(refuse)
        assert failed.is_over
        assert "can't start new thread" in str(failed.error)
        with pytest.raises(ValueError, match=r"\[0\] have no bytes to load"):
            engine.read_host([0])
    write(engine, [0], [payload])
    [held] = read(engine, [0])
    assert held.tobytes() == payload.tobytes()


def test_a_save_waits_for_a_write_that_holds_the_last_extent(make):
    # Two extents of one block each: one is full, one is to spare.
    moves, copies = make(6, 1), []
    expected = blocks_of(moves.pool)[3]
    writing = moves.engine.write_host([0], [payload_of(moves.engine)])
    moves.engine.advance_host(copies.append)
    moves.save([3], [0])
    timer = threading.Timer(0.05, lambda: [copy() for copy in copies])
    timer.start()
    [saved] = moves.drain()
    timer.join()
    assert saved.error is None
    assert writing.is_over
    moves.load_now([0], [9])
    assert blocks_of(moves.pool)[9] == expected


def test_a_save_that_had_to_wait_leaves_alone_what_was_written_since(make, gate):
    gate.shut = True
    extent_bytes = 4 * make(7).engine.host_payload_bytes
    sizes = {"extent_bytes": extent_bytes, "staging_bytes": extent_bytes}
    moves = make(7, **sizes)
    expected = blocks_of(moves.pool)
    # Meanwhile the caller forgot the save and gave its host blocks to a write.
    before = moves.save([0, 1, 2, 3], [30, 31, 32, 33])
    waiting = moves.save([4, 5], [10, 11])
    assert moves.engine.is_waiting(waiting)
    payload = payload_of(moves.engine)
    write(moves.engine, [10], [payload])
    gate.shut = False
    ended = [(done.ticket, done.error) for done in moves.drain()]
    assert ended == [(before, None), (waiting, None)]
    [held] = read(moves.engine, [10])
    assert held.tobytes() == payload.tobytes()
    moves.load_now([11, 30], [20, 21])
    assert blocks_of(moves.pool)[20:22] == [expected[5], expected[0]]


def test_a_write_that_had_to_wait_leaves_alone_what_was_saved_since(make):
    moves = make(8, 1)  # Two extents of one block each.
    moves.save_now([5], [0])
    held, copies = moves.engine.read_host([0]), []
    waiting = moves.engine.write_host([0], [payload_of(moves.engine)])
    moves.engine.advance_host(copies.append)
    assert not copies
    held.close()
    # Meanwhile the caller forgot the write and gave its host block to a save.
    expected = blocks_of(moves.pool)[3]
    moves.save_now([3], [0])
    for _ in range(2):
        moves.engine.advance_host(lambda copy: copy())
    assert waiting.is_over
    moves.load_now([0], [9])
    assert blocks_of(moves.pool)[9] == expected
