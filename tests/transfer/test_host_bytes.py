"""Host blocks as bytes: read beside saves, written beside loads, from engine to engine.

What each host block holds is kept as the bytes of the device block that it was saved
from; every block that is loaded or read is compared with that.
"""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.transfer import Compression, TransferEngine, host_bytes

NUM_BLOCKS, NUM_HOST = 24, 40


def make_pool(seed: int):
    rng = np.random.default_rng(seed)
    k, v = rng.normal(size=(2, NUM_BLOCKS, 4, 2, 8)).astype(np.float32)
    return {"k": jnp.asarray(k), "v": jnp.asarray(v, jnp.bfloat16)}


def blocks_of(pool):
    """List the bytes of each block of a pool."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(pool)]
    return [b"".join(leaf[n].tobytes() for leaf in leaves) for n in range(NUM_BLOCKS)]


def read(engine, ids):
    held = engine.read_host(ids)
    payloads = [np.zeros(engine.host_payload_bytes, np.uint8) for _ in ids]
    thread = threading.Thread(
        target=lambda: [held.copy(i, out) for i, out in enumerate(payloads)]
    )
    thread.start()
    thread.join()
    held.close()
    return payloads


def write(engine, ids, payloads):
    writing = engine.write_host(ids, payloads)
    while not writing.is_over:
        engine.advance_host(lambda copy: threading.Thread(target=copy).start())
    assert writing.error is None


@pytest.mark.parametrize("platforms", [("cpu",), ()])
@pytest.mark.parametrize("mode", ["fused", "staged"])
@pytest.mark.parametrize("layer_groups", [1, 2])
def test_bytes_of_one_engine_are_right_in_another(
    monkeypatch, platforms, mode, layer_groups
):
    # Also as where memory is not read and written at its address.
    monkeypatch.setattr(host_bytes, "_ADDRESSED_PLATFORMS", platforms)
    pool = make_pool(1)
    expected = blocks_of(pool)
    kinds = {"mode": mode, "layer_groups": layer_groups}
    first, second = (TransferEngine(pool, NUM_HOST, **kinds) for _ in range(2))
    assert first.host_bytes_description == second.host_bytes_description
    ids = list(range(10, 10 + NUM_BLOCKS))
    first.save(pool, list(range(NUM_BLOCKS)), ids)
    pool, _ = first.drain(pool)
    payloads = read(first, ids)
    order = np.random.default_rng(2).permutation(NUM_HOST)[:NUM_BLOCKS].tolist()
    write(second, order, payloads)
    pool = jax.tree.map(jnp.zeros_like, pool)
    pool, _ = second.load(pool, order, list(range(NUM_BLOCKS)))
    pool, (done,) = second.drain(pool)
    assert done.error is None
    assert blocks_of(pool) == expected


@pytest.mark.parametrize("mode", ["fused", "staged"])
@pytest.mark.parametrize("blocks_per_host_block", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_every_block_keeps_its_bytes_whatever_is_written_beside_it(
    mode, blocks_per_host_block, seed
):
    rng = np.random.default_rng(seed)
    m = blocks_per_host_block
    pool = make_pool(seed)
    engine = TransferEngine(
        pool, NUM_HOST, mode=mode, blocks_per_host_block=m, extent_bytes=4096
    )
    contents = {}  # The device blocks' bytes of each host block.
    payloads = {}  # And what `read_host` says they are.
    for _ in range(120):
        num = int(rng.integers(1, 6))
        ids = rng.permutation(NUM_HOST)[:num].tolist()
        known = [host for host in ids if host in contents]
        match rng.integers(4):
            case 0:
                picked = rng.permutation(NUM_BLOCKS)[: num * m].reshape(num, m)
                now = blocks_of(pool)
                engine.save(pool, picked if m > 1 else picked[:, 0], ids)
                pool, completions = engine.drain(pool)
                assert all(done.error is None for done in completions)
                for host, row in zip(ids, picked.tolist(), strict=True):
                    contents[host] = [now[block] for block in row]
                    payloads.pop(host, None)
            case 1 if payloads:
                names = list(payloads)
                chosen = [names[rng.integers(len(names))] for _ in ids]
                held = [payloads[name] for name in chosen]
                known_contents = [contents[name] for name in chosen]
                write(engine, ids, held)
                for host, what, payload in zip(ids, known_contents, held, strict=True):
                    contents[host], payloads[host] = what, payload
            case 2 if known:
                for host, payload in zip(known, read(engine, known), strict=True):
                    if host in payloads:
                        assert payload.tobytes() == payloads[host].tobytes()
                    payloads[host] = payload
            case _ if known:
                targets = rng.permutation(NUM_BLOCKS)[: len(known) * m]
                rows = targets.reshape(-1, m)
                pool, _ = engine.load(pool, known, rows if m > 1 else targets)
                pool, completions = engine.drain(pool)
                assert all(done.error is None for done in completions)
                now = blocks_of(pool)
                for host, row in zip(known, rows.tolist(), strict=True):
                    assert [now[block] for block in row] == contents[host]
        assert not engine.poll()  # Takes back the pins of what was read.
        engine._table.check()
        assert engine._table.num_pins == 0
    assert payloads, "the case that reads never ran"


def test_compressed_blocks_come_back_as_they_were_stored():
    pool = make_pool(5)
    engine = TransferEngine(pool, NUM_HOST, compression=Compression("int8"))
    other = TransferEngine(pool, NUM_HOST, compression=Compression("int8"))
    plain = TransferEngine(pool, NUM_HOST)
    assert engine.host_bytes_description != plain.host_bytes_description
    engine.save(pool, [3, 4], [0, 1])
    pool, _ = engine.drain(pool)
    write(other, [7, 8], read(engine, [0, 1]))
    loaded = []
    for each, ids in ((engine, [0, 1]), (other, [7, 8])):
        blank = jax.tree.map(jnp.zeros_like, pool)
        blank, _ = each.load(blank, ids, [5, 6])
        blank, _ = each.drain(blank)
        loaded.append(blocks_of(blank)[5:7])
    assert loaded[0] == loaded[1]


def test_a_write_whose_copy_cannot_begin_fails_and_the_next_one_succeeds():
    pool = make_pool(9)
    engine = TransferEngine(pool, 1, mode="fused")
    payload = np.arange(engine.host_payload_bytes).astype(np.uint8)

    def refuse(copy):
        raise RuntimeError("can't start new thread")

    for _ in range(3):
        failed = engine.write_host([0], [payload])
        engine.advance_host(refuse)
        engine.advance_host(refuse)
        assert failed.is_over
        assert "can't start new thread" in str(failed.error)
    write(engine, [0], [payload])
    [held] = read(engine, [0])
    assert held.tobytes() == payload.tobytes()
    engine._table.check()


def test_a_save_waits_for_a_write_that_holds_the_last_extent():
    pool = make_pool(6)
    # Two extents of one block each: one is full, one is to spare.
    engine = TransferEngine(pool, 1, mode="fused")
    copies = []
    writing = engine.write_host([0], [np.ones(engine.host_payload_bytes, np.uint8)])
    engine.advance_host(copies.append)
    engine.save(pool, [3], [0])
    expected = blocks_of(pool)[3]
    timer = threading.Timer(0.05, lambda: [copy() for copy in copies])
    timer.start()
    pool, (saved,) = engine.drain(pool)
    timer.join()
    assert saved.error is None
    assert writing.is_over
    pool, _ = engine.load(pool, [0], [9])
    pool, _ = engine.drain(pool)
    assert blocks_of(pool)[9] == expected


def test_a_save_that_had_to_wait_leaves_alone_what_was_written_since(gate):
    gate.shut = True
    pool = make_pool(7)
    extent_bytes = 4 * TransferEngine(pool, NUM_HOST).host_payload_bytes
    engine = TransferEngine(
        pool,
        NUM_HOST,
        mode="fused",
        extent_bytes=extent_bytes,
        staging_bytes=extent_bytes,
    )
    # Whoever gave these host blocks away has forgotten the save meanwhile.
    before = engine.save(pool, [0, 1, 2, 3], [30, 31, 32, 33])
    waiting = engine.save(pool, [4, 5], [10, 11])
    assert engine.is_waiting(waiting)
    payload = np.arange(engine.host_payload_bytes).astype(np.uint8)
    write(engine, [10], [payload])
    gate.shut = False
    expected = blocks_of(pool)
    pool, done = engine.drain(pool)
    assert [each.ticket for each in done] == [before, waiting]
    assert all(each.error is None for each in done)
    [held] = read(engine, [10])
    assert held.tobytes() == payload.tobytes()
    pool, _ = engine.load(pool, [11, 30], [20, 21])
    pool, _ = engine.drain(pool)
    assert blocks_of(pool)[20] == expected[5]
    assert blocks_of(pool)[21] == expected[0]
    engine._table.check()


def test_a_write_that_had_to_wait_leaves_alone_what_was_saved_since():
    pool = make_pool(8)
    engine = TransferEngine(pool, 1, mode="fused")  # Two extents of one block each.
    engine.save(pool, [5], [0])
    pool, _ = engine.drain(pool)
    held, copies = engine.read_host([0]), []
    payload = np.ones(engine.host_payload_bytes, np.uint8)
    waiting = engine.write_host([0], [payload])
    engine.advance_host(copies.append)
    assert not copies
    held.close()
    # Whoever gave this host block away has forgotten the write meanwhile.
    engine.save(pool, [3], [0])
    expected = blocks_of(pool)[3]
    pool, [saved] = engine.drain(pool)
    assert saved.error is None
    engine.advance_host(lambda copy: copy())
    engine.advance_host(lambda copy: copy())
    assert waiting.is_over
    pool, _ = engine.load(pool, [0], [9])
    pool, _ = engine.drain(pool)
    assert blocks_of(pool)[9] == expected


def test_wrong_arguments_are_refused_and_change_nothing():
    pool = make_pool(7)
    engine = TransferEngine(pool, 4)
    payload = np.zeros(engine.host_payload_bytes, np.uint8)
    with pytest.raises(ValueError, match="have no bytes"):
        engine.read_host([2])
    with pytest.raises(ValueError, match=r"must be in \[0, 4\)"):
        engine.write_host([4], [payload])
    with pytest.raises(ValueError, match="more than once"):
        engine.write_host([1, 1], [payload, payload])
    with pytest.raises(ValueError, match="payloads must be 1 of"):
        engine.write_host([1], [payload[:-1]])
    with pytest.raises(ValueError, match="payloads must be 2 of"):
        engine.write_host([1, 2], [payload])
    engine.save(pool, [0, 1, 2, 3], [0, 1, 2, 3])
    pool, (done,) = engine.drain(pool)
    assert done.error is None
    held = engine.read_host([0])
    read_only = payload.copy()
    read_only.flags.writeable = False
    for out in (payload[:-1], np.zeros(2 * len(payload), np.uint8)[::2], read_only):
        with pytest.raises(ValueError, match=f"{len(out)} bytes must have"):
            held.copy(0, out)
    assert not read_only.any()
    held.close()
