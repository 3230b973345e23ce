"""The longest prefix that all groups can use, against a search block by block."""

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
from tests.reference import hit_search


def mask_of(text: str) -> np.ndarray:
    """Read a mask: 1 is a block that can be had."""
    return np.array([c == "1" for c in text], np.bool_)


def text_of(mask) -> str:
    return "".join("01"[bool(flag)] for flag in np.asarray(mask))


def search(groups, *masks, max_tokens: int) -> tuple:
    """Search, with masks and answer as text: (tokens, needed of each group)."""
    hit = find_longest_hit(as_groups(groups), [mask_of(m) for m in masks], max_tokens)
    return int(hit.num_tokens), *map(text_of, hit.needed)


def expect(groups, masks, max_tokens: int) -> tuple:
    """What the reference says, as `search` says it."""
    # It knows nothing of padding.
    num_tokens = min(len(m) * g.block_size for g, m in zip(groups, masks, strict=True))
    keys = [
        [(group, i) for i in range(num_tokens // spec.block_size)]
        for group, spec in enumerate(groups)
    ]
    length, blocks = hit_search.find_longest_cache_hit(
        groups, keys, lambda key: key if masks[key[0]][key[1]] else None, max_tokens
    )
    texts = ["".join("01"[b is not None] for b in column) for column in blocks]
    pairs = zip(texts, masks, strict=True)
    return length, *(text.ljust(len(mask), "0") for text, mask in pairs)


WINDOW, CHUNKS, STATE = SlidingWindow(4, 9), ChunkedLocal(4, 8), Mamba(4)
LONG_CHUNKS, HALVES = ChunkedLocal(4, 16), [FullAttention(4), FullAttention(8)]
COARSE = [FullAttention(4), Mamba(8), SlidingWindow(12, 13)]
COARSE_MASKS = "111111111111 010111 1111"
THREE = [FullAttention(4), SlidingWindow(4, 5), STATE]
# Groups, masks, the most tokens; tokens of the hit, and the blocks that it needs.
CASES = {
    "full attention takes the leading run": [
        (4, "11101111", 32, 12, "11100000"),
        (4, "01111111", 32, 0, "00000000"),
        (4, "11111111", 32, 32, "11111111"),
    ],
    "the hit is cut to whole blocks of the most tokens": [
        *[(4, "1111", tokens, 12, "1110") for tokens in (15, 14, 13, 12)],
        *[(4, "111", tokens, 0, "000") for tokens in (0, -1, -(1 << 31))],
        *[(kind, "111", -1, 0, "000") for kind in (WINDOW, CHUNKS, STATE)],
    ],
    # A window of 9 is the next token and 8 before it, which are 2 blocks; 10 are 3.
    "a window needs the blocks that the next token looks back on": [
        (WINDOW, "10110110", 32, 28, "00000110"),
        (SlidingWindow(4, 10), "10110110", 32, 4, "10000000"),
        (SlidingWindow(4, 10), "01110110", 32, 16, "01110000"),
    ],
    "a window takes the last run that is long enough": [
        (WINDOW, "11110111", 32, 32, "00000011"),
        (WINDOW, "11110111", 31, 28, "00000110"),
        (WINDOW, "11110111", 27, 16, "00110000"),
    ],
    "a run shorter than the window counts from block 0 on": [
        (SlidingWindow(4, 99), "11101111", 32, 12, "11100000"),
        (SlidingWindow(4, 99), "01101111", 32, 0, "00000000"),
    ],
    "a window of one token still needs a block": [
        (SlidingWindow(4, 1), "01010", 20, 16, "00010"),
        (SlidingWindow(4, 1), "00000", 20, 0, "00000"),
    ],
    # Where the hit ends with a chunk, not even that one is needed.
    "chunks before that of the next token are not needed": [
        *[(CHUNKS, "00001100", tokens, 20, "00001000") for tokens in (22, 23)],
        *[(CHUNKS, "00001100", tokens, 24, "00000000") for tokens in (24, 31)],
    ],
    "in the chunk of the next token the leading run counts": [
        (LONG_CHUNKS, "00001101", 31, 24, "00001100"),
        (LONG_CHUNKS, "00000111", 31, 16, "00000000"),
        (LONG_CHUNKS, "11010000", 15, 8, "11000000"),
    ],
    "mamba needs the last state alone": [
        (STATE, "01101000", 32, 20, "00001000"),
        (STATE, "01101000", 19, 12, "00100000"),
        (STATE, "00000000", 32, 0, "00000000"),
    ],
    "the hit ends where blocks of all groups end": [
        (HALVES, "11111111 1111", 31, 24, "11111100 1110"),
        (HALVES, "11111011 1111", 31, 16, "11110000 1100"),
        (COARSE, COARSE_MASKS, 48, 48, "111111111111 000001 0001"),
        (COARSE, COARSE_MASKS, 47, 0, "000000000000 000000 0000"),
        (COARSE, "111111111111 001000 1111", 47, 24, "111111000000 001000 0100"),
        # Block 4 ends a run of 2, but not a block of 12 tokens.
        ([WINDOW, FullAttention(12)], "011110 11", 24, 12, "011000 10"),
    ],
    "groups of equal kind need the same blocks together": [
        ([STATE] * 2, "0111 1010", 16, 12, "0010 0010"),
        ([WINDOW] * 2, "0111 1110", 16, 12, "0110 0110"),
        ([WINDOW] * 2, "0111 1100", 16, 0, "0000 0000"),
    ],
    "one group shortens what another needs": [
        (THREE[1::-1], "1011 1110", 16, 12, "0010 1110"),
        (THREE[1::-1], "1011 1100", 16, 4, "1000 1000"),
        # Window: 7, 4, 2; states: 6, 3, 2. Only 2 is among both.
        (THREE, "11111111 01010010 01100100", 32, 8, "11000000 01000000 01000000"),
    ],
    # From 28 tokens on, block 6 would do; but only 20 are there, and these need 4. A
    # third kind leaves 12 of them, which need the chunk before.
    "the start of the chunk moves as the hit shrinks": [
        ([THREE[0], CHUNKS], "11111000 00001010", 30, 20, "11111000 00001000"),
        ([THREE[0], CHUNKS], "11111000 00000010", 30, 16, "11110000 00000000"),
        (
            *([THREE[0], CHUNKS, STATE], "11111000 00101010 00100000", 30, 12),
            "11100000 00100000 00100000",
        ),
    ],
    "the hit ends within the shortest mask, and padding changes nothing": [
        (4, "1111", 99, 16, "1111"),
        ([THREE[0], STATE], "1111 11", 16, 8, "1100 01"),
        ([THREE[0], STATE], "11 1111", 16, 8, "11 0100"),
        ([THREE[0], SlidingWindow(8, 17)], "111111 111", 24, 24, "111111 011"),
        ([THREE[0], SlidingWindow(8, 17)], "1111110 11100", 24, 24, "1111110 01100"),
    ],
}


@pytest.mark.parametrize("what", CASES)
def test_hits_worked_out_by_hand(what):
    for groups, masks, max_tokens, num_tokens, needed in CASES[what]:
        found = search(groups, *masks.split(), max_tokens=max_tokens)
        assert found == (num_tokens, *needed.split()), (groups, masks, max_tokens)


def test_no_resident_block_is_no_hit():
    assert search(4, "", max_tokens=99) == (0, "")
    assert search([FullAttention(4), Mamba(8)], "1", "", max_tokens=9) == (0, "0", "")


def test_a_chunk_in_parts_of_blocks_is_refused_as_vllm_hits_without_its_blocks():
    chunks = ChunkedLocal(4, 8)
    object.__setattr__(chunks, "chunk", 6)  # Past the check.
    groups, keys = [FullAttention(4), chunks], [[0, 1], [2, 3]]
    full = {0: 0, 1: 1}
    hit = hit_search.find_longest_cache_hit(groups, keys, full.get, 8)
    # The next token, 4, is in the chunk of tokens 0 to 5 and reads block 0.
    assert hit == (4, [[0], [None]])
    # Here alone would a second pass of the search say something else.
    assert hit_search.find_longest_cache_hit(groups, keys, full.get, 4)[0] == 0
    with pytest.raises(ValueError, match="must have a chunk that is a multiple"):
        ChunkedLocal(4, 6)


# Any kinds.


def draw_groups(rng):
    """Draw one to four groups that can be searched together."""
    sizes = rng.choice([[2, 4, 8], [4, 4, 4], [2, 3, 6]])
    groups = []
    for _ in range(rng.integers(1, 5)):
        block_size, largest = int(rng.choice(sizes)), int(max(sizes))
        kind = rng.choice(4)
        if kind == 0:
            groups.append(FullAttention(block_size))
        elif kind == 1:
            groups.append(SlidingWindow(block_size, int(rng.integers(1, 30))))
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
def test_hits_equal_those_of_a_search_block_by_block(seed):
    rng = np.random.default_rng(seed)
    groups = draw_groups(rng)
    num_tokens, num = alignment(groups) * int(rng.integers(1, 13)), 150
    masks = draw_masks(rng, groups, num_tokens, num)
    max_tokens = rng.integers(-1, num_tokens + 1, size=num, dtype=np.int32)
    padding = [int(rng.integers(0, 40)) for _ in groups]
    padded = [
        np.pad(mask, ((0, 0), (0, more)))
        for mask, more in zip(masks, padding, strict=True)
    ]
    for i in range(num):
        own = [mask[i] for mask in masks]
        length, *needed = expect(groups, own, max(0, int(max_tokens[i])))
        where = f"{groups=} {max_tokens[i]=} masks={[text_of(m) for m in own]}"
        hit = find_longest_hit(groups, [mask[i] for mask in padded], max_tokens[i])
        assert hit.num_tokens == length, where
        for got, want, more in zip(hit.needed, needed, padding, strict=True):
            assert text_of(got) == want + "0" * more, where


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
    one, four = [np.ones(1, np.bool_)], np.ones(4, np.bool_)
    pair = FullAttention(4), Mamba(4)
    for groups, masks, message in (
        (pair, one, "len(masks)=1 must be 2, one for each group."),
        (pair, one * 3, "len(masks)=3 must be 2"),
        ((Mamba(4),), [np.zeros((2, 3), np.bool_)], "masks[0].shape=(2, 3) must be"),
        ((Mamba(4),), [np.zeros(3, np.int32)], "masks[0].dtype=int32 must be bool"),
        ((CHUNKS, Mamba(8)), [four] * 2, "must have a block_size of 8"),
    ):
        with pytest.raises((TypeError, ValueError), match=re.escape(message)):
            find_longest_hit(groups, masks, 4)
