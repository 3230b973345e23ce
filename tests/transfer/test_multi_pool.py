"""Several pools over one set of host blocks, compared with plain Python."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.transfer import MultiPoolEngine
from tests.transfer.numbered import check_at_rest

SIZES = (24, 7, 5)
HOST_BLOCKS = 20


class Pools:
    """An engine over keys and values; states of two arrays; and smaller states.

    All elements of a block have one number.
    """

    def __init__(self):
        keys, states, small = SIZES
        self.pools = [
            jnp.zeros((keys, 8), jnp.float32),
            (
                jnp.zeros((states, 3, 4), jnp.bfloat16),
                jnp.zeros((states, 2), jnp.int32),
            ),
            jnp.zeros((small, 1), jnp.int32),
        ]
        self.engine = MultiPoolEngine(self.pools, HOST_BLOCKS, staging_bytes=3 << 20)
        self.first = self.engine.first_blocks.tolist()

    def pool_of(self, block):
        return int(np.searchsorted(self.first, block, side="right")) - 1

    def write(self, block, number):
        def written(leaf):
            array = np.array(leaf)
            array[block - self.first[which]] = number
            return jnp.array(array)

        which = self.pool_of(block)
        self.pools[which] = jax.tree.map(written, self.pools[which])

    @property
    def numbers(self):
        """The number of each block, after checking all its elements."""
        numbers = []
        for pool in self.pools:
            leaves = [np.array(leaf).astype(int) for leaf in jax.tree.leaves(pool)]
            rows = [leaf.reshape(len(leaf), -1) for leaf in leaves]
            whole = np.concatenate(rows, axis=1)
            assert (whole == whole[:, :1]).all()
            numbers += whole[:, 0].tolist()
        return numbers

    def bytes_of(self, block):
        return self.engine.engines[self.pool_of(block)].block_bytes

    def save(self, blocks, hosts):
        return self.engine.save(self.pools, blocks, hosts)

    def load(self, hosts, blocks, sizes=None):
        sizes = [len(hosts)] if sizes is None else sizes
        self.pools, tickets = self.engine.load_each(self.pools, hosts, blocks, sizes)
        self.pools = list(self.pools)
        return tickets

    def drain(self):
        pools, done = self.engine.drain(self.pools)
        self.pools = list(pools)
        assert [completion.error for completion in done] == [None] * len(done)
        return {
            completion.ticket: (completion.host_block_ids, completion.num_bytes)
            for completion in done
        }


@pytest.fixture
def pools():
    pools = Pools()
    yield pools
    pools.drain()
    assert pools.engine.num_in_flight == 0
    for engine in pools.engine.engines:
        check_at_rest(engine)


@pytest.mark.parametrize("seed", range(2))
def test_blocks_of_all_pools_come_back_as_they_were(pools, seed):
    rng = np.random.default_rng(seed)
    num_blocks = sum(SIZES)
    on_device, on_host, counter = dict.fromkeys(range(num_blocks), 0), {}, 0
    num_loaded = [0] * len(SIZES)
    for _ in range(30):
        for block in rng.choice(num_blocks, 6, replace=False).tolist():
            counter += 1
            on_device[block] = counter % 251  # bfloat16 has it.
            pools.write(block, on_device[block])
        num = int(rng.integers(0, 9))
        blocks = rng.choice(num_blocks, num, replace=False).tolist()
        hosts = rng.choice(HOST_BLOCKS, num, replace=False).tolist()
        saved = pools.save(blocks, hosts)
        expected = {saved: (tuple(hosts), sum(map(pools.bytes_of, blocks)))}
        readable = {host: held for host, held in on_host.items() if host not in hosts}
        for block, host in zip(blocks, hosts, strict=True):
            on_host[host] = pools.pool_of(block), on_device[block]
        if rng.random() < 0.5:
            assert pools.drain() == expected
            expected, readable = {}, on_host
        else:  # Host blocks in flight are not read.
            pools.pools = list(pools.engine.advance(pools.pools))
        # Two requests load up to eight of them, each into a free block of its pool.
        free = [b for b in range(num_blocks) if b not in blocks]
        pairs = []
        for host in rng.permutation(list(readable)).tolist()[:8]:
            targets = [b for b in free if pools.pool_of(b) == readable[host][0]]
            if targets:
                pairs.append((host, int(rng.choice(targets))))
                free.remove(pairs[-1][1])
        cut = int(rng.integers(0, len(pairs) + 1))
        sources, targets = [host for host, _ in pairs], [block for _, block in pairs]
        tickets = pools.load(sources, targets, [cut, 0, len(pairs) - cut])
        for ticket, part in zip(tickets, (pairs[:cut], [], pairs[cut:]), strict=True):
            size = sum(pools.bytes_of(block) for _, block in part)
            expected[ticket] = tuple(host for host, _ in part), size
        done = pools.drain()
        assert list(done) == list(expected)
        assert done == expected
        for host, block in pairs:
            on_device[block] = readable[host][1]
            num_loaded[pools.pool_of(block)] += 1
        assert pools.numbers == [*on_device.values()]
    assert min(num_loaded) > 6
    for number, engine in enumerate(pools.engine.engines):
        # What another pool's block has replaced takes no memory.
        held = int((engine._table._owner >= 0).sum())
        assert held == sum(which == number for which, _ in on_host.values())


def test_what_a_load_still_reads_is_emptied_after_it(pools):
    pools.write(3, 77)
    pools.save([3], [4])
    pools.drain()
    pools.load([4], [9])
    pools.save([pools.first[1] + 2], [4])
    assert len(pools.drain()) == 2
    assert pools.numbers[9] == 77
    pools.engine.advance(pools.pools)
    assert not (pools.engine.engines[0]._table._owner >= 0).any()


def test_abandoning_a_save_empties_its_blocks_in_each_pool(pools):
    engine, first = pools.engine, pools.first
    ticket = pools.save([1, first[1], first[2]], [0, 1, 2])
    engine.abandon(ticket)
    with pytest.raises(ValueError, match="not in flight"):
        engine.abandon(ticket)
    later = pools.save([2], [1])
    assert list(pools.drain()) == [later]
    pools.load([1], [5])
    for host in (0, 2):
        with pytest.raises(ValueError, match="must go back to the pool"):
            pools.load([host], [7])


def test_a_refused_call_of_several_pools_changes_none(pools):
    engine, first = pools.engine, pools.first
    pools.save([1, first[1]], [0, 1])
    pools.drain()
    refusals = {
        "ids must be in": lambda: pools.save([first[-1]], [0]),
        "more than once": lambda: pools.save([1, 2], [0, 0]),
        r"host blocks \[1\] must go back": lambda: pools.load([0, 1], [2, 3]),
        "sizes=": lambda: pools.load([0, 1], [2, first[1]], [1]),
        "must ": lambda: engine.save(pools.pools[:1] * 3, [1], [2]),
    }
    for message, call in refusals.items():
        with pytest.raises(ValueError, match=message):
            call()
    assert engine.num_in_flight == 0


def test_bytes_of_all_pools_are_right_in_another_engine(pools):
    first = pools.first
    blocks = [3, first[1] + 2, first[2] + 4, 5]
    for number, block in enumerate(blocks):
        pools.write(block, 10 + number)
    pools.save(blocks, [7, 0, 2, 9])
    pools.drain()
    held = pools.engine.read_host([0, 7, 2, 9])
    num_bytes = pools.engine.host_payload_bytes
    payloads = [np.ones(num_bytes, np.uint8) for _ in range(4)]
    for index, payload in enumerate(payloads):
        held.copy(index, payload)
    held.close()
    pools.engine.poll()
    second = Pools()
    assert second.engine.host_bytes_description == pools.engine.host_bytes_description
    # A host block that another pool's block is in.
    second.save([1], [11])
    second.drain()
    writing = second.engine.write_host([11, 12, 13, 14], payloads)
    while not writing.is_over:
        second.engine.advance_host(lambda copy: copy())
    assert writing.error is None
    blocks = [first[1] + 4, 8, first[2] + 1, 9]
    second.load([11, 12, 13, 14], blocks)
    second.drain()
    assert [second.numbers[block] for block in blocks] == [11, 10, 12, 13]
    with pytest.raises(ValueError, match=r"host blocks \[15\] have no bytes"):
        second.engine.read_host([11, 15])
    payloads[0][-8] = 3
    for wrong in (payloads[:1], [payloads[1][1:]], []):
        with pytest.raises(ValueError, match="payloads must be 1 of"):
            second.engine.write_host([1], wrong)
    second.engine.poll()
    for engine in second.engine.engines:
        check_at_rest(engine)
