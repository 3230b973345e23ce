"""Kinds of attention groups, and the sizes that follow from them."""

import re

import numpy as np
import pytest

from jaxkv.search.groups import (
    ChunkedLocal,
    FullAttention,
    Mamba,
    SlidingWindow,
    alignment,
    as_groups,
    check_groups,
    lazy_target_blocks,
    num_host_blocks,
)


def test_groups_of_equal_sizes_and_kind_are_equal_keys():
    assert len({SlidingWindow(16, 64), SlidingWindow(16, 64), Mamba(16)}) == 2
    assert FullAttention(16) != Mamba(16)


def test_sizes_out_of_range_or_of_a_wrong_type_are_refused_by_name():
    for make, error, message in (
        *[
            (make, ValueError, message)
            for make, message in (
                (lambda: FullAttention(0), "block_size=0 of FullAttention(block_size"),
                (lambda: Mamba(-4), "block_size=-4 of"),
                (lambda: SlidingWindow(16, 0), "window=0 of"),
                (lambda: SlidingWindow(16, 1 << 31), "window=2147483648 of"),
                (lambda: ChunkedLocal(16, 0), "chunk=0 of"),
                (lambda: ChunkedLocal(16, 24), "ChunkedLocal(block_size=16, chunk=24)"),
                (lambda: as_groups(0), "block_size=0 of"),
                (lambda: as_groups([]), "groups=() must hold at least one group"),
                (lambda: check_groups(()), "groups=() must hold at least one group"),
                (
                    lambda: as_groups([Mamba((1 << 30) - 1), Mamba(4)]),
                    "4294967292, the least common multiple",
                ),
                (
                    lambda: as_groups([ChunkedLocal(16, 64), FullAttention(32)]),
                    "must have a block_size of 32",
                ),
                (
                    lambda: as_groups([ChunkedLocal(16, 64), Mamba(24)]),
                    "must have a block_size of 48",
                ),
                (
                    lambda: lazy_target_blocks(as_groups(16), 0),
                    "max_num_batched_tokens",
                ),
                (lambda: num_host_blocks(0, 1, 1), "host_bytes=0 must be at least 1"),
                (lambda: num_host_blocks(1, 0, 1), "device_bytes=0 must be at least 1"),
                (lambda: num_host_blocks(1, 1, 0), "num_device_blocks=0 must be at"),
                (
                    lambda: num_host_blocks(1, 1, 1, 0),
                    "world_size=0 must be at least 1",
                ),
            )
        ],
        (lambda: FullAttention(True), TypeError, "block_size=True of"),
        (lambda: SlidingWindow(16, 2.5), TypeError, "window=2.5 of"),
        (lambda: Mamba(np.int32(16)), TypeError, "must be an int"),
        (lambda: as_groups(True), TypeError, "groups=True must be a block size"),
        (lambda: as_groups("full"), TypeError, "groups='full' must be a block size"),
        (lambda: as_groups(None), TypeError, "groups=None must be a block size"),
        (lambda: as_groups([Mamba(4), 16]), TypeError, "groups[1]=16 must be one of"),
        (lambda: as_groups([Mamba]), TypeError, "must be one of FullAttention"),
    ):
        with pytest.raises(error, match=re.escape(message)):
            make()
    as_groups([ChunkedLocal(16, 64), FullAttention(16), SlidingWindow(8, 20)])


def test_an_int_or_a_group_alone_is_one_group():
    assert as_groups(16) == (FullAttention(16),)
    assert as_groups(Mamba(16)) == (Mamba(16),)
    assert as_groups([Mamba(16), FullAttention(4)]) == (Mamba(16), FullAttention(4))


def test_the_alignment_is_the_least_common_multiple():
    assert alignment((FullAttention(16),)) == 16
    assert alignment((FullAttention(4), SlidingWindow(6, 9), Mamba(8))) == 24


def test_the_lazy_target_is_twice_the_blocks_of_a_full_step():
    assert lazy_target_blocks((FullAttention(16),), 64) == 2 * 4
    assert lazy_target_blocks((FullAttention(16),), 65) == 2 * 5
    assert lazy_target_blocks((SlidingWindow(16, 64),), 8192) == 2 * (4 + 1)
    assert lazy_target_blocks((SlidingWindow(16, 65),), 8192) == 2 * (5 + 1)
    assert lazy_target_blocks((Mamba(16),), 8192) == 2 * 2
    assert lazy_target_blocks((ChunkedLocal(16, 32),), 64) == 2 * 4
    hybrid = (FullAttention(16), SlidingWindow(8, 12), Mamba(32))
    assert lazy_target_blocks(hybrid, 100) == 2 * (7 + 3 + 2)


def test_a_host_block_is_as_large_as_on_the_device():
    assert num_host_blocks(999, device_bytes=1000, num_device_blocks=10) == 9
    assert num_host_blocks(1000, device_bytes=1000, num_device_blocks=10) == 10
    # Rounded once, at the end: 3 blocks take 10 bytes, so 100 bytes are 30 blocks.
    assert num_host_blocks(100, device_bytes=10, num_device_blocks=3) == 30
    # Each worker has its share of the bytes, and all have the same number of blocks.
    assert num_host_blocks(4001, 1000, num_device_blocks=10, world_size=4) == 10
    # Too little for a block is a block.
    assert num_host_blocks(1, 1000, num_device_blocks=1, world_size=4) == 1
    # Larger than an int of 64 bits on the way.
    assert num_host_blocks(1 << 40, 1 << 40, num_device_blocks=1 << 30) == 1 << 30
