"""The extent table against a model that holds the contents of every place."""

import dataclasses

import numpy as np
import pytest

from jaxkv.transfer.extent_table import NO_EXTENT, ExtentTable, SharedMemory
from jaxkv.transfer.host_memory import HostSize
from tests.rigs.extent_tables import check_table


@dataclasses.dataclass
class Save:
    """A save as the engine issues it: placed piece by piece, in order."""

    number: int
    ids: np.ndarray
    shards: np.ndarray
    todo: np.ndarray
    pieces: int = 0
    ok: bool = True


class Twin:
    """An extent table beside the contents of every extent.

    A place holds (host block, number of the save).
    """

    def __init__(self, num_blocks, num_extents, extent_blocks, num_shards):
        self.table = ExtentTable(num_blocks, num_extents, extent_blocks, num_shards)
        self.extent_blocks, self.num_shards = extent_blocks, num_shards
        self.contents = [{} for _ in range(num_extents)]
        self.claimed_by = {}
        self.readable = {}  # Host block -> number of the save that it must hold.
        self.saves = []
        self.in_flight = []  # (save, placement, what its extent will hold)
        self.reads = []  # (extent, place, what it held)
        self.num_saves = 0

    @property
    def waiting(self):
        return next((save for save in self.saves if save.todo.size), None)

    @property
    def at_rest(self):
        return not self.in_flight and not self.reads

    def claim(self, ids, shards):
        ids, shards = np.array(ids, np.int32), np.array(shards, np.intp)
        save = Save(self.num_saves, ids, shards, np.arange(len(ids)))
        self.num_saves += 1
        self.table.claim(ids, save.number)
        for host_id in ids.tolist():
            self.claimed_by[host_id] = save.number
            self.readable.pop(host_id, None)
        self.saves.append(save)

    def place(self):
        """Place a piece of the first waiting save; return whether that was possible."""
        save = self.waiting
        ids, shards = save.ids[save.todo], save.shards[save.todo]
        placement = self.table.place(ids, shards)
        if placement is None:
            return False
        self.check_placement(placement, ids, shards)
        old = {} if placement.carry == NO_EXTENT else self.contents[placement.carry]
        held = {place: old[place] for place in placement.carried_places.tolist()}
        for host_id, place in zip(placement.ids, placement.places, strict=True):
            held[int(place)] = (int(host_id), save.number)
        self.contents[placement.extent] = {}  # It is about to be overwritten.
        save.todo = np.delete(save.todo, placement.picked)
        save.pieces += 1
        self.in_flight.append((save, placement, held))
        return True

    def check_placement(self, placement, ids, shards):
        assert len(placement.picked) > 0
        assert (placement.ids == ids[placement.picked]).all()
        picked_shards = shards[placement.picked]
        assert (placement.places // self.extent_blocks == picked_shards).all()
        assert placement.extent != placement.carry
        places = [*placement.places.tolist(), *placement.carried_places.tolist()]
        assert len(set(places)) == len(places)
        assert set(places) <= set(range(self.extent_blocks * self.num_shards))
        # No read uses the extent to write, and no piece in flight writes it,
        # reads it or is read.
        assert placement.extent not in [extent for extent, _, _ in self.reads]
        for _, placed, _ in self.in_flight:
            assert {placement.extent, placement.carry}.isdisjoint(
                {placed.extent, placed.carry} - {NO_EXTENT}
            )
        if placement.carry != NO_EXTENT:
            held = self.contents[placement.carry]
            for host_id, place in zip(
                placement.carried_ids.tolist(),
                placement.carried_places.tolist(),
                strict=True,
            ):
                assert held[place][0] == host_id

    def settle(self, index, ok):
        save, placement, held = self.in_flight.pop(index)
        save.pieces -= 1
        if ok:
            self.contents[placement.extent] = held
        else:
            save.ok, save.todo = False, save.todo[:0]
        self.table.settle(placement, ok)

    def finish(self):
        while self.saves and not self.saves[0].todo.size and not self.saves[0].pieces:
            save = self.saves.pop(0)
            self.table.finish(save.ids, save.number, save.ok)
            for host_id in save.ids.tolist():
                if save.ok and self.claimed_by[host_id] == save.number:
                    self.readable[host_id] = save.number

    def abandon(self):
        self.waiting.ok, self.waiting.todo = False, self.waiting.todo[:0]

    def read(self, host_id):
        [extent], [place] = self.table.find(np.array([host_id], np.int32))
        self.table.pin(extent)
        self.reads.append((extent, place, self.contents[extent][place]))

    def end_read(self, index):
        extent, place, held = self.reads.pop(index)
        assert self.contents[extent][place] == held, "overwritten while it was read"
        self.table.unpin(extent)

    def check(self):
        check_table(self.table)
        assert self.table.num_pins == len(self.reads)
        ids = np.array(sorted(self.readable), np.int32)
        places = zip(ids.tolist(), *self.table.find(ids), strict=True)
        for host_id, extent, place in places:
            expected = (host_id, self.readable[host_id])
            assert self.contents[extent][place] == expected
        unreadable = np.setdiff1d(np.arange(self.table.num_blocks), ids).astype(
            np.int32
        )
        for host_id in unreadable:
            with pytest.raises(ValueError, match=rf"host blocks \[{host_id}\] have no"):
                self.table.find(np.array([host_id]))

    def settle_all(self, rng):
        """Finish all saves; each must find its places."""
        while True:
            self.finish()
            self.check()
            if self.waiting and self.place():
                continue
            if self.in_flight:
                self.settle(rng.integers(len(self.in_flight)), ok=True)
            elif self.reads:
                self.end_read(0)
            else:
                assert not self.waiting, "no place, though nothing is in the way"
                return


SHAPES = {  # Host blocks, extents, blocks per extent and shard, shards.
    "one block an extent": (6, 7, 1, 1),
    "one spare extent": (16, 5, 4, 1),
    "not a multiple": (19, 6, 4, 1),
    "many spare": (24, 14, 3, 1),
    "two shards": (24, 5, 3, 2),
}


def shards_of(ids, num_shards):
    """A shard for each host block, the same number of blocks in each."""
    return np.asarray(ids) % num_shards


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("shape", SHAPES)
def test_random_saves_and_reads_agree_with_the_model(shape, seed):
    rng = np.random.default_rng(seed)
    num_blocks, *_, num_shards = SHAPES[shape]
    twin = Twin(*SHAPES[shape])
    for _ in range(150):
        match rng.integers(9):
            case 0 | 1 if len(twin.saves) < 5:
                # Mostly small ones, so that extents are full of holes.
                num = rng.integers(1, num_blocks + 1 if rng.integers(5) == 0 else 4)
                ids = rng.permutation(num_blocks)[:num]
                twin.claim(ids, shards_of(ids, num_shards))
            case 2 | 3 if twin.waiting:
                at_rest = twin.at_rest
                assert twin.place() or not at_rest, "no place, and nothing in the way"
            case 4 | 5 if twin.in_flight:
                twin.settle(rng.integers(len(twin.in_flight)), rng.integers(4) > 0)
            case 6 if twin.readable and len(twin.reads) < 3:
                twin.read(int(rng.choice(sorted(twin.readable))))
            case 7 if twin.reads:
                twin.end_read(rng.integers(len(twin.reads)))
            case 8 if twin.waiting and rng.integers(2):
                twin.abandon()
            case _:
                twin.finish()
        twin.check()
    twin.settle_all(rng)
    # All blocks at once fit, whatever was there before.
    ids = rng.permutation(num_blocks)
    twin.claim(ids, shards_of(ids, num_shards))
    twin.settle_all(rng)
    assert sorted(twin.readable) == list(range(num_blocks))


@pytest.mark.parametrize("seed", range(4))
def test_blocks_in_random_shards_leave_the_table_consistent(seed):
    # Blocks change their shards, which may be full: there are places or not.
    rng = np.random.default_rng(seed)
    twin = Twin(12, 4, 3, 2)
    for _ in range(150):
        if twin.waiting is None:
            ids = rng.permutation(12)[: rng.integers(1, 6)]
            twin.claim(ids, rng.integers(0, 2, len(ids)))
        if not twin.place() and not twin.in_flight:
            twin.abandon()
        if twin.in_flight and rng.integers(2):
            twin.settle(rng.integers(len(twin.in_flight)), rng.integers(4) > 0)
        twin.finish()
        twin.check()


def test_a_claimed_block_keeps_its_place_while_it_is_pinned():
    table, ids = ExtentTable(8, 3, 4), np.arange(4, dtype=np.int32)
    table.claim(ids, 0)
    table.settle(table.place(ids, np.zeros(4, np.intp)), True)
    table.finish(ids, 0, True)
    table.pin(table.find(ids)[0][0])
    table.claim(ids, 1)
    free = len(table._free())
    table.finish(ids, 1, ok=False)  # Abandoned before it had a place.
    table.unpin(0)
    assert len(table._free()) == free == 2
    with pytest.raises(ValueError, match="have no bytes"):
        table.find(ids)
    check_table(table)


def test_a_small_tier_has_sixteen_extents_and_a_large_one_8_mib_for_each_device():
    # With eight of 8 MiB, nearly every save of 16 MiB into 64 MiB carried rows over.
    for tier_mib, extent_mib in ((16, 1), (64, 4), (128, 8), (4096, 8)):
        size = HostSize.of(4 * tier_mib, None, None, 1 << 18, 1)
        assert size.extent_blocks == 4 * extent_mib, tier_mib
    # Handing over 80 leaves on 8 devices took as long as moving 1 MiB on each.
    for num_devices, staging_mib, extent_mib in (
        *((1, 256, 8), (4, 256, 32), (8, 256, 64), (16, 256, 64)),
        (8, 16, 8),
    ):
        size = HostSize.of(4096, None, None, 1 << 20, 1, num_devices, staging_mib << 20)
        assert size.extent_blocks == extent_mib, (num_devices, staging_mib)


def place_all(table, ids, number):
    """Save `ids`; count the blocks that were carried over."""
    table.claim(ids, number)
    todo, num_carried = ids, 0
    while todo.size:
        placement = table.place(todo, np.zeros(len(todo), np.intp))
        table.settle(placement, ok=True)
        todo = np.delete(todo, placement.picked)
        num_carried += len(placement.carried_ids)
    table.finish(ids, number, ok=True)
    return num_carried


@pytest.mark.parametrize("seed", [0, 1])
def test_runs_of_blocks_are_rarely_carried(seed):
    # A full tier evicts blocks in the runs that requests saved.
    num_blocks, extent_blocks, mean_run, batch = 960, 16, 60, 32
    size = HostSize.of(num_blocks, None, extent_blocks, 1, 1)
    assert size.extent_blocks == extent_blocks
    table = ExtentTable(num_blocks, size.num_extents, extent_blocks)
    rng = np.random.default_rng(seed)
    bounds = np.cumsum(rng.geometric(1 / mean_run, 100))
    runs = np.split(np.arange(num_blocks, dtype=np.int32), bounds[bounds < num_blocks])
    counts = []
    for turn in range(5):
        order = [runs[index] for index in rng.permutation(len(runs))]
        for number, start in enumerate(range(0, num_blocks, batch)):
            ids = np.concatenate(order)[start : start + batch]
            counts.append(place_all(table, ids, turn * num_blocks + number))
    check_table(table)
    assert sum(counts) < 0.05 * 5 * num_blocks


@pytest.mark.parametrize("is_shared", [True, False])
def test_tables_that_share_memory_take_little_more_than_one(is_shared):
    # The least recently used blocks are replaced by blocks of two pools: one is common
    # at first and then rare, the other the reverse.
    num_blocks, extent_blocks, num_extents = 512, 16, 36
    shared = SharedMemory()
    tables = [ExtentTable(num_blocks, num_extents, extent_blocks) for _ in range(2)]
    for table in tables:
        shared.join(table, num_extents, extent_bytes=100)
        table.shared = shared if is_shared else None
    rng = np.random.default_rng(0)
    order, pool_of = list(range(num_blocks)), np.full(num_blocks, -1)
    used, number = [], 0
    for step in range(1200):
        share = 0.9 if step // 300 % 2 else 0.2
        for pool, num in enumerate(rng.multinomial(12, [share, 1 - share]).tolist()):
            ids, order = np.array(order[:num], np.int32), order[num:] + order[:num]
            number += 1
            pinned = tables[1 - pool].forget(ids[pool_of[ids] == 1 - pool], number)
            assert not pinned.size
            place_all(tables[pool], ids, number)
            pool_of[ids] = pool
        used.append(shared.num_used_bytes / shared.num_bytes)
    for table in tables:
        check_table(table)
    assert max(used) < 1.5 if is_shared else max(used) > 1.8
