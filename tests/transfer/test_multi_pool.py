"""Several pools over one set of host blocks, compared with plain Python."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.transfer import MultiPoolEngine
from tests.transfer.numbered import check_at_rest, modes

SIZES = (24, 7, 5)
HOST_BLOCKS = 20


def new_pools():
    """Keys and values; states of two arrays; smaller states."""
    keys, states, small = SIZES
    return [
        jnp.zeros((keys, 8), jnp.float32),
        (jnp.zeros((states, 3, 4), jnp.bfloat16), jnp.zeros((states, 2), jnp.int32)),
        jnp.zeros((small, 1), jnp.int32),
    ]


def written(pools, which, block, number):
    """Pools with a number in all elements of a block."""
    new = list(pools)
    if which == 1:
        new[1] = tuple(leaf.at[block].set(number) for leaf in pools[1])
    else:
        new[which] = pools[which].at[block].set(number)
    return new


def number_in(pools, which, block):
    leaves = pools[1] if which == 1 else (pools[which],)
    values = {float(value) for leaf in leaves for value in np.unique(leaf[block])}
    assert len(values) == 1, values
    return int(values.pop())


def make_engine(mode):
    pools = new_pools()
    return MultiPoolEngine(pools, HOST_BLOCKS, mode=mode, staging_bytes=3 << 20), pools


def split(engine, block):
    which = int(np.searchsorted(engine.first_blocks, block, side="right")) - 1
    return which, block - int(engine.first_blocks[which])


@modes
@pytest.mark.parametrize("seed", range(3))
def test_blocks_of_all_pools_come_back_as_they_were(mode, seed):
    rng = np.random.default_rng(seed)
    engine, pools = make_engine(mode)
    num_blocks = sum(SIZES)
    on_device, on_host, counter = dict.fromkeys(range(num_blocks), 0), {}, 0
    num_loaded = [0] * len(SIZES)
    for _ in range(40):
        for block in rng.choice(num_blocks, 6, replace=False).tolist():
            counter += 1
            number = counter % 251  # bfloat16 has it.
            pools = written(pools, *split(engine, block), number)
            on_device[block] = number
        num = int(rng.integers(0, 9))
        blocks = rng.choice(num_blocks, num, replace=False).tolist()
        hosts = rng.choice(HOST_BLOCKS, num, replace=False).tolist()
        saved = engine.save(pools, blocks, hosts)
        expected = {saved: (tuple(hosts), sum(bytes_of(engine, b) for b in blocks))}
        if rng.random() < 0.5:
            pools, done = engine.drain(pools)
            check(done, expected)
            expected = {}
        else:  # Host blocks in flight are not read.
            pools = engine.advance(pools)
        readable = {
            h: own for h, own in on_host.items() if expected == {} or h not in hosts
        }
        for block, host in zip(blocks, hosts, strict=True):
            on_host[host] = split(engine, block)[0], on_device[block]
            if not expected:
                readable[host] = on_host[host]
        # Two requests load up to eight of them, each into a free block of its pool.
        free = [b for b in range(num_blocks) if b not in blocks]
        sources, targets = [], []
        for host in rng.permutation(list(readable)).tolist()[:8]:
            own = [b for b in free if split(engine, b)[0] == readable[host][0]]
            if own:
                target = int(rng.choice(own))
                free.remove(target)
                sources.append(host)
                targets.append(target)
        cut = int(rng.integers(0, len(sources) + 1))
        sizes = [cut, 0, len(sources) - cut]
        pools, tickets = engine.load_each(pools, sources, targets, sizes)
        of_load = sources[:cut], [], sources[cut:]
        at = targets[:cut], [], targets[cut:]
        for ticket, hosts_of, blocks_of in zip(tickets, of_load, at, strict=True):
            size = sum(bytes_of(engine, b) for b in blocks_of)
            expected[ticket] = tuple(hosts_of), size
        pools, done = engine.drain(pools)
        check(done, expected)
        for host, block in zip(sources, targets, strict=True):
            on_device[block] = readable[host][1]
            num_loaded[split(engine, block)[0]] += 1
        for block, number in on_device.items():
            assert number_in(pools, *split(engine, block)) == number
    assert min(num_loaded) > 10
    for own in engine.engines:
        check_at_rest(own)
        # What another pool's block has replaced takes no memory.
        held = int((own._table._owner >= 0).sum())
        number = engine.engines.index(own)
        assert held == sum(which == number for which, _ in on_host.values())


def bytes_of(engine, block):
    return engine.engines[split(engine, block)[0]].block_bytes


def check(done, expected):
    assert [each.error for each in done] == [None] * len(expected)
    assert [each.ticket for each in done] == list(expected)
    found = {each.ticket: (each.host_block_ids, each.num_bytes) for each in done}
    assert found == expected


@modes
def test_what_a_load_still_reads_is_emptied_after_it(mode):
    engine, pools = make_engine(mode)
    keys, states = 3, engine.first_blocks[1] + 2
    pools = written(pools, 0, 3, 77)
    engine.save(pools, [keys], [4])
    pools, _ = engine.drain(pools)
    pools, _ = engine.load_each(pools, [4], [9], [1])
    engine.save(pools, [states], [4])
    pools, done = engine.drain(pools)
    assert [each.error for each in done] == [None, None]
    assert number_in(pools, 0, 9) == 77
    pools = engine.advance(pools)
    assert not (engine.engines[0]._table._owner >= 0).any()


@modes
def test_abandoning_a_save_empties_its_blocks_in_each_pool(mode):
    engine, pools = make_engine(mode)
    first = engine.first_blocks.tolist()
    ticket = engine.save(pools, [1, first[1], first[2]], [0, 1, 2])
    engine.abandon(ticket)
    with pytest.raises(ValueError, match="not in flight"):
        engine.abandon(ticket)
    later = engine.save(pools, [2], [1])
    pools, done = engine.drain(pools)
    assert [each.ticket for each in done] == [later]
    pools, _ = engine.load_each(pools, [1], [5], [1])
    for host in (0, 2):
        with pytest.raises(ValueError, match="must go back to the pool"):
            engine.load_each(pools, [host], [7], [1])


@modes
def test_a_refused_call_of_several_pools_changes_none(mode):
    engine, pools = make_engine(mode)
    first = engine.first_blocks.tolist()
    engine.save(pools, [1, first[1]], [0, 1])
    pools, _ = engine.drain(pools)
    refusals = {
        "ids must be in": lambda: engine.save(pools, [first[-1]], [0]),
        "more than once": lambda: engine.save(pools, [1, 2], [0, 0]),
        r"host blocks \[1\] must go back to the pool": lambda: engine.load_each(
            pools, [0, 1], [2, 3], [2]
        ),
        "sizes=": lambda: engine.load_each(pools, [0, 1], [2, first[1]], [1]),
        "one pool": lambda: engine.load_each(pools, [0], [2], [1], in_step=True),
        "must have the structure": lambda: engine.save([*pools[:2], None], [1], [2]),
        "of its own pool": lambda: engine.copy(pools, [1], [first[1]]),
    }
    for message, call in refusals.items():
        with pytest.raises(ValueError, match=message):
            call()
    assert engine.num_in_flight == 0
    for own in engine.engines:
        check_at_rest(own)
    with pytest.raises(ValueError, match="at least one pool"):
        MultiPoolEngine([], 4)


@modes
def test_bytes_of_all_pools_are_right_in_another_engine(mode):
    engine, pools = make_engine(mode)
    first = engine.first_blocks.tolist()
    blocks = [3, first[1] + 2, first[2] + 4, 5]
    for number, block in enumerate(blocks):
        pools = written(pools, *split(engine, block), 10 + number)
    engine.save(pools, blocks, [7, 0, 2, 9])
    pools, _ = engine.drain(pools)
    held = engine.read_host([0, 7, 2, 9])
    payloads = [np.ones(engine.host_payload_bytes, np.uint8) for _ in range(4)]
    for index, payload in enumerate(payloads):
        held.copy(index, payload)
    held.close()
    other, pools = make_engine(mode)
    assert other.host_bytes_description == engine.host_bytes_description
    # A host block that another pool's block is in.
    other.save(pools, [1], [11])
    pools, _ = other.drain(pools)
    writing = other.write_host([11, 12, 13, 14], payloads)
    while not writing.is_over:
        other.advance_host(lambda copy: copy())
    assert writing.error is None
    blocks = [first[1] + 4, 8, first[2] + 1, 9]
    pools, _ = other.load_each(pools, [11, 12, 13, 14], blocks, [4])
    pools, [done] = other.drain(pools)
    assert done.error is None
    found = [number_in(pools, *split(other, block)) for block in blocks]
    assert found == [11, 10, 12, 13]
    with pytest.raises(ValueError, match=r"host blocks \[15\] have no bytes"):
        other.read_host([11, 15])
    payloads[0][-8] = 3
    for wrong in (payloads[:1], [payloads[1][1:]], []):
        with pytest.raises(ValueError, match="payloads must be 1 of"):
            other.write_host([1], wrong)
    engine.poll(), other.poll()
    for own in (*engine.engines, *other.engines):
        check_at_rest(own)


@modes
def test_blocks_are_copied_within_each_pool(mode):
    engine, pools = make_engine(mode)
    first = engine.first_blocks.tolist()
    pools = written(written(pools, 0, 1, 5), 2, 3, 6)
    pools = engine.copy(pools, [1, first[2] + 3], [2, first[2] + 4])
    assert number_in(pools, 0, 2) == 5
    assert number_in(pools, 2, 4) == 6
