"""Whether the arrays of an `ExtentTable` agree with one another."""

import numpy as np

from jaxkv.transfer.extent_table import NO_BLOCK, NO_EXTENT


def check_table(table):
    (placed,) = np.nonzero(table._extent != NO_EXTENT)
    owner = table._owner[table._extent[placed], table._place[placed]]
    assert (owner == placed).all(), "a block is not where it should be"
    assert (table._owner != NO_BLOCK).sum() == len(placed), "a place is leaked"
    by_shard = table._owner.reshape(len(table._pins), table._num_shards, -1)
    assert ((by_shard != NO_BLOCK).sum(axis=2) == table._used).all(), "miscounted"
    assert table._readable[placed].sum() == table._readable.sum(), "nothing to read"
    assert (table._pins >= 0).all(), "unpinned too often"
    claims = table._used.sum(axis=1) + table._pins + table._held
    assert (table._claims == claims).all(), "miscounted what keeps an extent"
