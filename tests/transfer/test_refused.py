"""The engine refuses bad calls, with the reason, and changes nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.transfer import Compression, MultiPoolEngine, TransferEngine, memory
from jaxkv.transfer.tickets import Ticket
from tests.rigs.device_cases import devices, spread
from tests.transfer.numbered import DEVICE


def zeros(*shape, dtype=jnp.float32):
    return jax.device_put(jnp.zeros(shape, dtype), DEVICE)


def on_two_devices():
    return [zeros(4), jax.device_put(zeros(4), devices(2)[1])]


POOLS = {
    "pool has no leaves": lambda: {},
    r"pool\[0\] must be a jax.Array outside jit": lambda: [np.zeros((4, 2))],
    r"pool\[0\] has shape \(\); it must have a block axis": lambda: [zeros()],
    "pool.0. .*at least one element": lambda: [zeros(0, 4)],
    "pool.1. .*at least one element": lambda: [zeros(4), zeros(4, 0)],
    "int4, less than a byte per element": lambda: [zeros(4, 2, dtype=jnp.int4)],
    "must hold plain data": lambda: [jax.random.split(jax.random.key(0), 4)],
    r"pool\[1\] has 5 blocks and pool": lambda: [zeros(4, 2), zeros(5, 2)],
    r"pool\[1\] is on .* all leaves must be on the same devices": on_two_devices,
    "pool is in 'pinned_host'; a pool must be in the device's default memory": (
        lambda: jax.device_put(zeros(4, 2), memory.host_sharding(DEVICE))
    ),
    r"pool\[1\] and pool\[0\] are sharded over two meshes": lambda: [
        spread(zeros(4, 2), 2, axis, axis=axis) for axis in "xy"
    ],
    r"block axis of pool\[1\] is sharded over nothing and .* \('x',\)": lambda: [
        spread(zeros(4, 2), 2, spec) for spec in ("x", None)
    ],
}


@pytest.mark.parametrize("message", POOLS)
def test_a_pool_that_cannot_be_offloaded_is_refused(message):
    with pytest.raises(ValueError, match=message):
        TransferEngine(POOLS[message](), 4)


def test_a_pool_is_refused_inside_jit():
    with pytest.raises(ValueError, match="outside jit"):
        jax.jit(lambda pool: TransferEngine(pool, 4))(zeros(4, 2))


def of_heads(axis):
    return {"compression": Compression(head_axis=axis)}


HEADS = r"other than the block axis 0"
ARGUMENTS = [
    ({"num_host_blocks": 0}, "num_host_blocks=0 must be at least 1"),
    ({}, "num_host_blocks=None and host_bytes=None must"),
    ({"num_host_blocks": 4, "host_bytes": "4KiB"}, "=4 and host_bytes='4KiB' must"),
    ({"host_bytes": 2127}, "host_bytes=2127 must be at least 2128"),
    ({"host_bytes": "plenty"}, "must be a size such as 64MiB"),
    ({"mode": "eager"}, "mode='eager' must be one of"),
    ({"blocks_per_host_block": 0}, "blocks_per_host_block=0 must be at least 1"),
    ({"staging_bytes": 1063}, "staging_bytes=1063 must be at least the 1064 by"),
    ({"block_axis": 2}, r"2 of pool\['ids'\] must be an int in \[-2, 2\): .* \[6, 10"),
    ({"block_axis": {"ids": 1.0, "k": 0}}, r"block_axis 1.0 of pool\['ids'\] must be"),
    ({"block_axis": {"k": 0}}, "must be an int, or a tree of ints shaped like the top"),
    ({"block_axis": [0, 1]}, "must be an int, or a tree of ints"),
    ({"block_axis": {"ids": 0, "k": 1}}, r"\['k'\] has 8 blocks and .* 6; .* \(here 1"),
    ({"kernel": "cuda"}, "kernel='cuda' must be one of"),
    *((of_heads(axis), HEADS) for axis in (0, -4, frozenset(), frozenset({0, 2}))),
    *(
        (of_heads(axis), r"of pool\['k'\] must be an axis of")
        for axis in (4, -5, frozenset({2, 4}))
    ),
    (of_heads([1, 2]), "head_axis=.* must be an int, a froz"),
    (of_heads(1.5), r"head_axis 1.5 of pool\['k'\] must be an"),
]


def test_wrong_arguments_of_an_engine_are_refused():
    pool = {"k": zeros(6, 8, 2, 16), "ids": zeros(6, 10, dtype=jnp.int32)}
    for arguments, message in ARGUMENTS:
        is_sized = arguments.keys() <= {"host_bytes"}  # Or is to have no size.
        size = {} if is_sized else {"num_host_blocks": 8}
        with pytest.raises(ValueError, match=message):
            TransferEngine(pool, **size | arguments)
    assert TransferEngine(pool, host_bytes=2128).num_host_blocks == 1
    with pytest.raises(ValueError, match="compression dtype='int4' must be 'int8'"):
        Compression("int4")
    with pytest.raises(ValueError, match="at least one pool"):
        MultiPoolEngine([], 4)


# Of saves, and of loads with the ids the other way round.
IDS = [
    ([0, 24], [1, 2], r"device_block_ids has \[24\]; .*0, 24"),
    ([0, -1], [1, 2], r"device_block_ids has \[-1\]"),
    ([0, 1], [1, 32], r"host_block_ids has \[32\]; .*0, 32\)"),
    ([0, 1], [-1, 2], r"host_block_ids has \[-1\]"),
    ([0], [2**40 + 1], "host_block_ids has"),
    ([0, 1], [2], "2 device_block_ids and 1 host_block_ids must be"),
    ([3, 3], [1, 2], r"device_block_ids has \[3\] more than once"),
    ([0.0], [1], r"device_block_ids must be a flat sequence of ints, not fl"),
    ([True], [1], "flat sequence of ints, not bool"),
    ([[0]], [[1]], r"host_block_ids must be a flat .* not int64\[1, 1\]"),
    ([[[0]]], [1], r"device_block_ids must be a flat .* int64\[1, 1, 1\]"),
    ([[0, 1]], [1], r"int64\[1, 2\]: a host block holds 1 of them"),
]
# Of host blocks of four device blocks.
ROWS = [
    ([0, 1, 2, 3], range(4), "must be rows of 4 ints"),
    ([[0, 1], [2, 3]], [1, 2], "must be rows of 4 ints"),
    ([[0, 1, 2, 3], [-1] * 4], [1, 2], r"only -1 in the rows \[1\]"),
    ([[0, 1, 2, 3], [4, 5, 4, 6]], [1, 2], r"has \[4\] more than once"),
    ([[0, 1, 2, -2]], [1], r"has \[-2\]; ids .* or -1 for none"),
    ([[0, 1, 2, 24]], [1], r"has \[24\]; ids must be in \[0, 24\)"),
]
COPIES = [
    ([1, 2], [3], "go in pairs"),
    ([1, 2], [3, 3], "distinct"),
    ([1, 2], [2, 3], "sources too"),
    ([24], [3], "must be in"),
    ([1], [-1], "must be in"),
    ([1.0], [2], "flat sequence of ints"),
]


def host_calls(engine, held):
    """Calls about the bytes of host blocks, and what is wrong with them."""
    payload = np.zeros(engine.host_payload_bytes, np.uint8)
    read_only = payload.copy()
    read_only.flags.writeable = False
    yield "have no bytes", lambda: engine.read_host([5])
    yield r"must be in \[0, 32\)", lambda: engine.write_host([32], [payload])
    yield "more than once", lambda: engine.write_host([1, 1], [payload, payload])
    yield "payloads must be 1 of", lambda: engine.write_host([1], [payload[:-1]])
    yield "payloads must be 2 of", lambda: engine.write_host([1, 2], [payload])
    for out in (payload[:-1], np.zeros(2 * len(payload), np.uint8)[::2], read_only):
        yield f"{len(out)} bytes must have", lambda out=out: held.copy(0, out)


def test_refused_calls_change_nothing(make):
    moves = make()
    engine, pool = moves.engine, moves.pool
    moves.save_now([7, 8, 9], [1, 2, 3])
    last = moves.save([6], [3])  # Not to be loaded before it is reported.
    before = moves.numbers
    shared = {"k": pool["k"], "v": pool["k"]}
    as_ints = {"k": pool["k"].astype(jnp.int32), "v": pool["v"]}
    stranger = last._replace(number=99)
    held = engine.read_host([2])
    calls = [
        *((m, lambda d=d, h=h: engine.save(pool, d, h)) for d, h, m in IDS),
        *((m, lambda d=d, h=h: engine.load(pool, h, d)) for d, h, m in IDS),
        *host_calls(engine, held),
        (r"\['k'\] must be float32", lambda: engine.save(as_ints, [1], [2])),
        (r"has \[5\] more than once", lambda: engine.save(pool, [0, 1], [5, 5])),
        (r"\[4, 5\] have no bytes", lambda: engine.load(pool, [1, 4, 5], [0, 1, 2])),
        (r"\[3\] .* reported as completed", lambda: engine.load(pool, [3], [0])),
        (r"\['v'\] must be bfloat16\[24, 8\]", lambda: engine.save(shared, [2], [1])),
        (r"\['v'\] must be bfloat16\[24, 8\]", lambda: engine.load(shared, [1], [2])),
        (r"\['v'\] must be bfloat16\[24, 8\]", lambda: engine.drain(shared)),
        ("must have the structure", lambda: engine.drain([*pool.values()])),
        (r"Ticket\(.*\) is not in flight", lambda: engine.abandon(Ticket("load", 1))),
        (r"Ticket\(.*\) is not in flight", lambda: engine.abandon(Ticket("save", 0))),
        (r"Ticket\(.*\) is not in flight", lambda: engine.abandon(stranger)),
    ]
    for message, call in calls:
        with pytest.raises(ValueError, match=message):
            call()
        assert engine.num_in_flight == 1, message
    held.close()
    assert [completion.ticket for completion in moves.drain()] == [last]
    assert moves.numbers == before
    assert moves.load([1, 2, 3], [0, 1, 2]).number == last.number + 1
    assert [completion.error for completion in moves.drain()] == [None]
    assert moves.numbers == [7, 8, 6, *before[3:]]


def test_refused_rows_of_device_blocks_change_nothing(make):
    moves = make(blocks_per_host_block=4)
    moves.save_now(np.arange(20).reshape(5, 4), range(5))
    before = moves.numbers
    for device_ids, host_ids, message in ROWS:
        with pytest.raises(ValueError, match=message):
            moves.save(device_ids, host_ids)
        with pytest.raises(ValueError, match=message):
            moves.load(host_ids, device_ids)
    # Rows to save may share blocks, as two prefixes do that are stored in one step.
    moves.save_now([[0, 1, 2, 3], [0, 1, 4, 5]], [5, 6])
    with pytest.raises(ValueError, match=r"has \[0, 1\] more than once"):
        moves.load([5, 6], [[0, 1, 2, 3], [0, 1, 4, 5]])
    moves.save_now([[0, -1, 2, 3]], [7])
    with pytest.raises(ValueError, match=r"host blocks \[7\] lack device blocks"):
        moves.load([5, 7], np.arange(8, 16).reshape(2, 4))
    assert moves.engine.num_in_flight == 0
    assert moves.numbers == before
    moves.load_now([5, 6], np.arange(8, 16).reshape(2, 4))
    assert moves.numbers[8:16] == [0, 1, 2, 3, 0, 1, 4, 5]


def calls_with(engine, pool):
    """Calls with a pool that must be the current one."""
    return {
        "save": lambda: engine.save(pool, [2], [1]),
        "load": lambda: engine.load(pool, [1], [2]),
        "drain": lambda: engine.drain(pool),
        "advance": lambda: engine.advance(pool),
    }


def check_refused(calls, message):
    for call in calls:
        with pytest.raises(RuntimeError, match=message):
            call()


def test_a_stale_pool_is_refused_by_every_call(make):
    moves = make()
    engine, stale = moves.engine, moves.pool
    moves.save_now([7], [1])
    moves.load_now([1], [0])
    calls = calls_with(engine, stale)
    assert calls.pop("advance")() is stale  # There is nothing to do.
    message = r"pool\['k'\] has been deleted .* pass the pool that the last load"
    check_refused(calls.values(), message)
    assert engine.num_in_flight == 0
    assert moves.read([1]) == [7]
