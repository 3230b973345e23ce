"""The longest prefix that all groups can use, against its definition."""

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
)
from jaxkv.search.hits import find_longest_hit
from tests.reference.longest import first_read, longest_prefix


def mask_of(text: str) -> np.ndarray:
    return np.array([c == "1" for c in text], np.bool_)


def text_of(mask) -> str:
    return "".join("01"[bool(flag)] for flag in np.asarray(mask))


def search(groups, *masks, max_tokens: int) -> tuple:
    hit = find_longest_hit(as_groups(groups), [mask_of(m) for m in masks], max_tokens)
    return int(hit.num_tokens), *map(text_of, hit.needed)


def expect(groups, masks, max_tokens: int) -> tuple:
    """Return the answer by definition, in the form of `search`."""
    num_tokens = longest_prefix(
        groups,
        [len(mask) for mask in masks],
        lambda group, index: masks[group][index],
        max_tokens,
        alignment(groups),
    )
    texts = []
    for group, mask in zip(groups, masks, strict=True):
        first, end = first_read(group, num_tokens), num_tokens // group.block_size
        texts.append(("0" * first + "1" * (end - first)).ljust(len(mask), "0"))
    return num_tokens, *texts


FULL, WINDOW, STATE = FullAttention(4), SlidingWindow(4, 9), Mamba(4)
# Groups, masks, the most tokens; tokens of the hit, and the blocks that it needs. The
# random cases below have masks of one length, and no such limits.
CASES = [
    *[(kind, "111", -(1 << 31), 0, "000") for kind in (FULL, WINDOW, STATE)],
    # A window of one token still needs a block.
    (SlidingWindow(4, 1), "01010", 20, 16, "00010"),
    (SlidingWindow(4, 1), "00000", 20, 0, "00000"),
    # The hit ends within the shortest mask.
    (4, "1111", 99, 16, "1111"),
    ([FULL, STATE], "1111 11", 16, 8, "1100 01"),
    ([FULL, STATE], "11 1111", 16, 8, "11 0100"),
    # A longer search would read the third group's counts as the second's, and hit 16.
    ([FULL, STATE, FULL], "1111 11 1111", 16, 8, "1100 01 1100"),
    ([FULL, SlidingWindow(8, 17)], "111111 111", 24, 24, "111111 011"),
    ([FULL, SlidingWindow(8, 17)], "1111110 11100", 24, 24, "1111110 01100"),
    # The start of the chunk moves as the hit shrinks: from 28 tokens on, block 6 would
    # do; but only 20 are there, and these need 4.
    ([FULL, ChunkedLocal(4, 8)], "11111000 00001010", 30, 20, "11111000 00001000"),
]


def test_hits_worked_out_by_hand():
    for groups, masks, max_tokens, num_tokens, needed in CASES:
        result = search(groups, *masks.split(), max_tokens=max_tokens)
        assert result == (num_tokens, *needed.split()), (groups, masks, max_tokens)


def test_no_resident_block_is_no_hit():
    assert search(4, "", max_tokens=99) == (0, "")
    assert search([FullAttention(4), Mamba(8)], "1", "", max_tokens=9) == (0, "0", "")


# Any kinds.


def draw_groups(rng):
    sizes = rng.choice([[2, 4, 8], [4, 4, 4], [2, 3, 6]])
    groups = []
    for _ in range(rng.integers(1, 5)):
        block_size, largest = int(rng.choice(sizes)), int(max(sizes))
        kind = rng.choice(4)
        if kind == 0:
            groups.append(FullAttention(block_size))
        elif kind == 1:
            # A window of one token is among the cases above: it needs a block, which
            # the next token does not read.
            groups.append(SlidingWindow(block_size, int(rng.integers(2, 30))))
        elif kind == 2:
            groups.append(Mamba(block_size))
        else:
            # Any chunk is a whole number of the largest block.
            groups.append(ChunkedLocal(largest, largest * int(rng.integers(1, 5))))
    if any(isinstance(group, ChunkedLocal) for group in groups):
        same = int(max(sizes))
        groups = [g for g in groups if same % g.block_size == 0]
    return as_groups(groups)


def draw_masks(rng, groups, num_tokens, num):
    """Draw masks for `num` sequences, from mostly missing to nearly all there."""
    masks = []
    for group in groups:
        share = rng.choice([0.5, 0.8, 0.95, 1.0], size=(num, 1))
        num_blocks = num_tokens // group.block_size
        masks.append(rng.random((num, num_blocks)) < share)
    return masks


@pytest.mark.parametrize("seed", range(24))
def test_hits_are_the_longest_by_definition(seed):
    rng = np.random.default_rng(seed)
    groups = draw_groups(rng)
    num_tokens, num = alignment(groups) * int(rng.integers(1, 13)), 150
    masks = draw_masks(rng, groups, num_tokens, num)
    max_tokens = rng.integers(-1, num_tokens + 1, size=num, dtype=np.int32)
    padding = [int(rng.integers(0, 40)) for _ in groups]
    padded = [
        np.pad(mask, ((0, 0), (0, num_added)))
        for mask, num_added in zip(masks, padding, strict=True)
    ]
    for i in range(num):
        row_masks = [mask[i] for mask in masks]
        length, *needed = expect(groups, row_masks, max(0, int(max_tokens[i])))
        where = f"{groups=} {max_tokens[i]=} masks={[text_of(m) for m in row_masks]}"
        hit = find_longest_hit(groups, [mask[i] for mask in padded], max_tokens[i])
        assert hit.num_tokens == length, where
        for got, want, num_added in zip(hit.needed, needed, padding, strict=True):
            assert text_of(got) == want + "0" * num_added, where


def test_the_random_cases_are_of_all_sorts():
    drawn = [draw_groups(np.random.default_rng(seed)) for seed in range(24)]
    assert {len(groups) for groups in drawn} == {1, 2, 3, 4}
    kinds = {type(group) for groups in drawn for group in groups}
    assert kinds == {FullAttention, SlidingWindow, ChunkedLocal, Mamba}
    assert any(len(set(groups)) < len(groups) for groups in drawn)
    assert any(alignment(g) > max(s.block_size for s in g) for g in drawn)


@pytest.mark.parametrize("num_blocks", [8191, 8192])
def test_long_sequences(num_blocks):
    rng = np.random.default_rng(num_blocks)
    groups = (FullAttention(16), SlidingWindow(16, 1024), Mamba(64))
    tokens = num_blocks * 16 - 1
    masks = [rng.random(num_blocks) < 0.9999 for _ in groups]
    masks[0][:] = True
    masks[2] = masks[2][: num_blocks // 4]
    answer = expect(groups, masks, tokens // 64 * 64)
    hit = find_longest_hit(groups, masks, tokens)
    assert answer[0] > 0
    assert (int(hit.num_tokens), *map(text_of, hit.needed)) == answer


def test_masks_that_do_not_fit_the_groups_are_refused():
    single, four = [np.ones(1, np.bool_)], np.ones(4, np.bool_)
    pair = FullAttention(4), Mamba(4)
    for groups, masks, message in (
        (pair, single, "len(masks)=1 must be 2, one for each group."),
        (pair, single * 3, "len(masks)=3 must be 2"),
        ((Mamba(4),), [np.zeros((2, 3), np.bool_)], "masks[0].shape=(2, 3) must be"),
        ((Mamba(4),), [np.zeros(3, np.int32)], "masks[0].dtype=int32 must be bool"),
        ((ChunkedLocal(4, 8), Mamba(8)), [four] * 2, "must have a block_size of 8"),
    ):
        with pytest.raises((TypeError, ValueError), match=re.escape(message)):
            find_longest_hit(groups, masks, 4)
