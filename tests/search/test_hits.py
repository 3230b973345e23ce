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


# One kind.


def test_full_attention_takes_the_leading_run():
    assert search(4, "11101111", max_tokens=32) == (12, "11100000")
    assert search(4, "01111111", max_tokens=32) == (0, "00000000")
    assert search(4, "11111111", max_tokens=32) == (32, "11111111")


@pytest.mark.parametrize("tokens", [15, 14, 13, 12])
def test_the_hit_is_cut_to_whole_blocks_of_the_most_tokens(tokens):
    assert search(4, "1111", max_tokens=tokens) == (12, "1110")


def test_below_one_token_there_is_no_hit():
    for kind in (4, SlidingWindow(4, 8), ChunkedLocal(4, 8), Mamba(4)):
        for tokens in (0, -1, -(1 << 31)):
            assert search(kind, "111", max_tokens=tokens) == (0, "000")


def test_no_block_at_all_is_no_hit():
    assert search(4, "", max_tokens=99) == (0, "")
    assert search([FullAttention(4), Mamba(8)], "1", "", max_tokens=9) == (0, "0", "")


def test_a_window_needs_the_blocks_that_the_next_token_looks_back_on():
    # A window of 9 is the next token and 8 before it, which are 2 blocks; 10 are 3.
    assert search(SlidingWindow(4, 9), "10110110", max_tokens=32) == (28, "00000110")
    assert search(SlidingWindow(4, 10), "10110110", max_tokens=32) == (4, "10000000")
    assert search(SlidingWindow(4, 10), "01110110", max_tokens=32) == (16, "01110000")


def test_a_window_takes_the_last_run_that_is_long_enough():
    assert search(SlidingWindow(4, 9), "11110111", max_tokens=32) == (32, "00000011")
    assert search(SlidingWindow(4, 9), "11110111", max_tokens=31) == (28, "00000110")
    assert search(SlidingWindow(4, 9), "11110111", max_tokens=27) == (16, "00110000")


def test_a_run_shorter_than_the_window_counts_from_block_0_on():
    assert search(SlidingWindow(4, 99), "11101111", max_tokens=32) == (12, "11100000")
    assert search(SlidingWindow(4, 99), "01101111", max_tokens=32) == (0, "00000000")


def test_a_window_of_one_token_still_needs_a_block():
    assert search(SlidingWindow(4, 1), "01010", max_tokens=20) == (16, "00010")
    assert search(SlidingWindow(4, 1), "00000", max_tokens=20) == (0, "00000")


def test_chunks_before_that_of_the_next_token_are_not_needed():
    chunks = ChunkedLocal(4, 8)
    assert search(chunks, "00001100", max_tokens=23) == (20, "00001000")
    assert search(chunks, "00001100", max_tokens=22) == (20, "00001000")
    # The hit ends with a chunk: not even that one is needed.
    assert search(chunks, "00001100", max_tokens=24) == (24, "00000000")
    assert search(chunks, "00001100", max_tokens=31) == (24, "00000000")


def test_in_the_chunk_of_the_next_token_the_leading_run_counts():
    chunks = ChunkedLocal(4, 16)
    assert search(chunks, "00001101", max_tokens=31) == (24, "00001100")
    assert search(chunks, "00000111", max_tokens=31) == (16, "00000000")
    assert search(chunks, "11010000", max_tokens=15) == (8, "11000000")


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


def test_mamba_needs_the_last_state_alone():
    assert search(Mamba(4), "01101000", max_tokens=32) == (20, "00001000")
    assert search(Mamba(4), "01101000", max_tokens=19) == (12, "00100000")
    assert search(Mamba(4), "00000000", max_tokens=32) == (0, "00000000")


# Several kinds.


def test_the_hit_ends_where_blocks_of_all_groups_end():
    groups = [FullAttention(4), FullAttention(8)]
    assert search(groups, "11111111", "1111", max_tokens=31) == (24, "11111100", "1110")
    assert search(groups, "11111011", "1111", max_tokens=31) == (16, "11110000", "1100")
    groups = [FullAttention(4), Mamba(8), SlidingWindow(12, 13)]
    masks = ["111111111111", "010111", "1111"]
    answer = (24, "111111000000", "001000", "0100")
    assert search(groups, *masks, max_tokens=48) == (48, "1" * 12, "000001", "0001")
    assert search(groups, *masks, max_tokens=47) == (0, "0" * 12, "000000", "0000")
    assert search(groups, masks[0], "001000", masks[2], max_tokens=47) == answer


def test_a_window_begins_at_an_aligned_end_though_the_run_goes_on():
    groups = [SlidingWindow(4, 9), FullAttention(12)]
    # Block 4 ends a run of 2, but not a block of 12 tokens.
    assert search(groups, "011110", "11", max_tokens=24) == (12, "011000", "10")


def test_groups_of_equal_kind_need_the_same_blocks_together():
    groups = [Mamba(4), Mamba(4)]
    assert search(groups, "0111", "1010", max_tokens=16) == (12, "0010", "0010")
    groups = [SlidingWindow(4, 9)] * 2
    assert search(groups, "0111", "1110", max_tokens=16) == (12, "0110", "0110")
    assert search(groups, "0111", "1100", max_tokens=16) == (0, "0000", "0000")


def test_one_group_shortens_what_another_needs():
    groups = [SlidingWindow(4, 5), FullAttention(4)]
    assert search(groups, "1011", "1110", max_tokens=16) == (12, "0010", "1110")
    assert search(groups, "1011", "1100", max_tokens=16) == (4, "1000", "1000")


def test_groups_that_shorten_each_other_in_turn_end_at_what_all_can_use():
    # Window: 7, 4, 2; states: 6, 3, 2. Only 2 is among both.
    groups = [FullAttention(4), SlidingWindow(4, 5), Mamba(4)]
    masks = ["11111111", "01010010", "01100100"]
    assert search(groups, *masks, max_tokens=32) == (
        8,
        "11000000",
        "01000000",
        "01000000",
    )


def test_the_start_of_the_chunk_moves_as_the_hit_shrinks():
    groups = [FullAttention(4), ChunkedLocal(4, 8)]
    # From 28 tokens on, block 6 would do; but only 20 are there, and these need 4.
    assert search(groups, "11111000", "00001010", max_tokens=30)[0] == 20
    assert search(groups, "11111000", "00000010", max_tokens=30)[0] == 16
    # A third kind leaves 12 of them, which need the chunk before.
    groups.append(Mamba(4))
    masks = ["11111000", "00101010", "00100000"]
    answer = (12, "11100000", "00100000", "00100000")
    assert search(groups, *masks, max_tokens=30) == answer


def test_the_hit_ends_within_the_shortest_mask():
    assert search(4, "1111", max_tokens=99) == (16, "1111")
    groups = [FullAttention(4), Mamba(4)]
    assert search(groups, "1111", "11", max_tokens=16) == (8, "1100", "01")
    assert search(groups, "11", "1111", max_tokens=16) == (8, "11", "0100")


def test_padding_changes_nothing():
    groups = [FullAttention(4), SlidingWindow(8, 17)]
    plain = search(groups, "111111", "111", max_tokens=24)
    padded = search(groups, "11111100000", "111" + "0" * 29, max_tokens=24)
    assert plain[0] == padded[0] == 24
    assert plain[1:] == (padded[1][:6], padded[2][:3])
    assert "1" not in padded[1][6:] + padded[2][3:]


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
def test_the_answers_are_those_of_a_search_block_by_block(seed):
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


# What is refused.


@pytest.mark.parametrize(
    ("error", "masks", "message"),
    [
        (ValueError, ["1"], "len(masks)=1 must be 2, one for each group."),
        (ValueError, ["1", "1", "1"], "len(masks)=3 must be 2"),
    ],
)
def test_masks_that_do_not_belong_to_the_groups_are_refused(error, masks, message):
    with pytest.raises(error, match=re.escape(message)):
        search([FullAttention(4), Mamba(4)], *masks, max_tokens=4)


def test_masks_of_another_shape_or_dtype_are_refused():
    with pytest.raises(ValueError, match=re.escape("masks[0].shape=(2, 3) must be")):
        find_longest_hit((Mamba(4),), [np.zeros((2, 3), np.bool_)], 4)
    with pytest.raises(TypeError, match=re.escape("masks[0].dtype=int32 must be bool")):
        find_longest_hit((Mamba(4),), [np.zeros(3, np.int32)], 4)


def test_groups_that_cannot_be_searched_together_are_refused():
    masks = [np.ones(4, np.bool_)] * 2
    with pytest.raises(ValueError, match="must have a block_size of 8"):
        find_longest_hit((ChunkedLocal(4, 8), Mamba(8)), masks, 4)
