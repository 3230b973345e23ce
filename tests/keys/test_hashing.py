"""Block keys: unique per input, and equal for equal inputs."""

import dataclasses
import hashlib
import itertools
import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxkv.keys import (
    hashing,
    key_from_foreign,
    key_from_int,
    keys_to_words,
    words_to_keys,
)
from jaxkv.keys.hashing import Extras, KeyChain, MultimodalItem, Namespace
from tests.reference.encoding import decode_block

NAMESPACE = Namespace("model", "epoch", "bfloat16", "layout", block_size=4)


def encode_block(namespace, group, parent, tokens, extras=hashing.NO_EXTRAS):
    """Encode a block with the functions that a chain uses."""
    constant = hashing._encode_constant(namespace, group, extras)
    context = hashing._encode_context(parent, extras)
    data = hashing.token_bytes(tokens)
    return constant + context + hashing._field(hashing._Tag.TOKENS, data)


def block_key(*block):
    return hashlib.sha256(encode_block(*block)).digest()


# Includes lone surrogates, and control characters that look like framing.
texts = st.text(st.characters() | st.characters(max_codepoint=15), max_size=12)
keys = st.binary(min_size=32, max_size=32)
token_ids = st.integers(0, 2**32 - 1)


def items(max_offset: int) -> st.SearchStrategy[MultimodalItem]:
    hashes = st.binary(min_size=1, max_size=20)
    return st.builds(MultimodalItem, hashes, st.integers(0, max_offset))


def extras(max_offset: int) -> st.SearchStrategy[Extras]:
    listed = st.lists(items(max_offset), max_size=3).map(tuple)
    return st.builds(Extras, st.none() | texts, st.none() | texts, listed)


@st.composite
def blocks(draw):
    size = draw(st.integers(1, 4))
    return (
        Namespace(*(draw(texts) for _ in range(4)), size),
        draw(st.integers(0, 2**32 - 1)),
        draw(st.none() | keys),
        draw(st.lists(token_ids, min_size=size, max_size=size)),
        draw(extras(size - 1)),
    )


# The encoding is injective.


@given(blocks())
def test_an_encoding_is_read_back_to_its_inputs(block):
    """The encoding is therefore injective, whatever the texts contain."""
    assert decode_block(encode_block(*block)) == block


def test_multimodal_items_are_sorted_by_offset_and_then_by_content():
    items = MultimodalItem(b"c", 1), MultimodalItem(b"a", 3), MultimodalItem(b"b", 3)
    for order in itertools.permutations(items):
        assert Extras(multimodal=order).multimodal == items


# Pinned: a change of the encoding orphans every stored block.


def test_an_encoding_written_by_hand():
    block = (
        Namespace("m", "w", "d", "", block_size=2),
        3,
        b"p" * 32,
        [5, 2**32 - 1],
        Extras("s", "", (MultimodalItem(b"hash", 1),)),
    )
    encoding = (
        b"\1\x0d\0\0\0\0\0\0\0jaxkv block 1"
        b"\2\1\0\0\0\0\0\0\0m"
        b"\3\1\0\0\0\0\0\0\0w"
        b"\4\1\0\0\0\0\0\0\0d"
        b"\5\0\0\0\0\0\0\0\0"
        b"\6\4\0\0\0\0\0\0\0\2\0\0\0"
        b"\7\4\0\0\0\0\0\0\0\3\0\0\0"
        b"\x08\1\0\0\0\0\0\0\0s"
        b"\x09\0\0\0\0\0\0\0\0"
        b"\x0a\x20\0\0\0\0\0\0\0pppppppppppppppppppppppppppppppp"
        b"\x0b\x0c\0\0\0\0\0\0\0\1\0\0\0\0\0\0\0hash"
        b"\x0c\x08\0\0\0\0\0\0\0\5\0\0\0\xff\xff\xff\xff"
    )
    assert encode_block(*block) == encoding
    assert block_key(*block) == hashlib.sha256(encoding).digest()


def test_golden_digests():
    tokens = list(range(8))
    salted = Extras("salt", "lora", (MultimodalItem(b"image", 5),))
    made = [
        *KeyChain(NAMESPACE).extend(tokens),
        *KeyChain(NAMESPACE, salted, group=1).extend(tokens),
        key_from_int(2**64 - 1),
        key_from_foreign(b"12345678"),
    ]
    assert [key.hex() for key in made] == [
        "33a829e5aa021845f1345ae19d77ec845eeba7d2628945ebeda48459197e8d47",
        "18fa51507493842f179f98e25fca0d8af2be374deb35bc892d05f2b2cd0f8b03",
        "74a8915058daccb8f7bd3ce2ca35e256eed6eb9cdad8b0451e24db908d187a7b",
        "795026b00b3af38bfc2ac2b265410700efda89778b4cbef2703b6775802d0b8e",
        "798adb50219310163a6cdf88424af23306e841536a83e51d53a217b740d35e2a",
        "802d4de3de659f58d9341c7825a662d7ea9524d5fc9c06a7fea9be8f82c0f4ee",
    ]


# Chains.


def keys_of(tokens, extra):
    """Return the keys of a chain by definition, block by block."""
    parent, made = None, []
    for start in range(0, len(tokens) - 3, 4):
        inside = tuple(
            MultimodalItem(item.content_hash, item.offset - start)
            for item in extra.multimodal
            if start <= item.offset < start + 4
        )
        block_extra = dataclasses.replace(extra, multimodal=inside)
        parent = block_key(NAMESPACE, 2, parent, tokens[start : start + 4], block_extra)
        made.append(parent)
    return made


@given(st.data())
def test_a_chain_that_grows_and_is_rewound_has_the_keys_of_its_tokens(data):
    extra = data.draw(extras(max_offset=50))
    chain, tokens = KeyChain(NAMESPACE, extra, group=2), []
    keys = chain.keys
    for _ in range(data.draw(st.integers(1, 6))):
        num_blocks = data.draw(st.none() | st.integers(0, len(keys)))
        if num_blocks is not None:
            chain.rewind(num_blocks)
            tokens = tokens[: 4 * num_blocks]
        num_before = len(keys)
        new_tokens = data.draw(st.lists(token_ids, max_size=20))
        tokens += new_tokens
        expected = keys_of(tokens, extra)
        assert chain.extend(new_tokens) == expected[num_before:]
        assert (chain.num_tokens, chain.keys) == (len(tokens), expected)
        assert keys is chain.keys, "the list of a request"


def test_what_a_chain_refuses_leaves_it_as_it_was():
    chain, twin = KeyChain(NAMESPACE), KeyChain(NAMESPACE)
    assert chain.extend(range(9)) == twin.extend(range(9))
    assert type(chain.num_tokens) is int
    for call, wrong, error, message in (
        (chain.rewind, 3, ValueError, r"num_blocks=3 must be in \[0, 2\]"),
        (chain.rewind, -1, ValueError, "num_blocks=-1 must be in"),
        (chain.rewind, 1.0, TypeError, "num_blocks=1.0 must be an integer"),
        (chain.rewind, None, TypeError, "num_blocks=None must be an integer"),
        *[
            (call, *case)
            for call in (chain.extend, chain.follow)
            for case in (
                ([1, -1], ValueError, r"tokens\[1\]=-1 must be in \[0, 2\*\*32\)"),
                ((2**32,), ValueError, r"tokens\[0\]=4294967296 must be in"),
                ([2**80], ValueError, r"tokens\[0\]=1208925819614629174706176 must"),
                ([1, 2.0], TypeError, r"tokens\[1\]=2.0 must be an integer"),
                (["a"], TypeError, r"tokens\[0\]='a' must be an integer"),
                ([[1]], TypeError, r"tokens\[0\]=\[1\] must be an integer"),
                (7, TypeError, r"\(\) must be integers in a row"),
                ({"a": 1}, TypeError, r"\(\) must be integers in a row"),
                (np.array([0, -5]), ValueError, r"tokens\[1\]=-5 must be in"),
                (np.array([2**32]), ValueError, r"tokens\[0\]=4294967296 must be in"),
                (np.array([-1], np.int8), ValueError, r"tokens\[0\]=-1 must be in"),
                (np.array([2**63], np.uint64), ValueError, r"=9223372036854775808"),
                (np.array([1.0]), TypeError, r"float64.*must be integers in a row"),
                (np.array([True]), TypeError, r"bool.*must be integers in a row"),
                (np.zeros((2, 2), int), TypeError, r"\(2, 2\) must be integers in a"),
                (b"bytes", TypeError, r"S5.*must be integers in a row"),
                ("text", TypeError, r"U4.*must be integers in a row"),
            )
        ],
    ):
        with pytest.raises(error, match=message):
            call(wrong)
        assert (chain.num_tokens, chain.keys) == (twin.num_tokens, twin.keys), message
    assert chain.extend(range(4)) == twin.extend(range(4))


@given(st.data())
def test_following_a_list_hashes_its_changed_blocks_alone(data):
    extra, recorded = data.draw(extras(max_offset=30)), []
    chain = KeyChain(NAMESPACE, extra, record=recorded.append)
    # Few unique tokens, so that lists shrink and regrow with equal ones.
    some = st.lists(st.integers(0, 2), max_size=9)
    tokens, compared = [], []
    for _ in range(data.draw(st.integers(1, 8))):
        start = data.draw(st.integers(0, len(tokens)))
        stop = data.draw(st.integers(start, len(tokens)))
        end = data.draw(st.sampled_from([[], tokens[stop:]]))
        tokens = [*tokens[:start], *data.draw(some), *end]
        call = data.draw(st.sampled_from(["follow", "extend", "rewind"]))
        if call == "extend":
            chain.extend(data.draw(some))
        elif call == "rewind":
            num = data.draw(st.integers(0, len(chain.keys)))
            chain.rewind(num)
            compared = compared[: 4 * num]
        recorded.clear()
        is_array = data.draw(st.booleans())
        assert chain.follow(np.array(tokens, int) if is_array else tokens) is chain.keys
        expected = KeyChain(NAMESPACE, extra).extend(tokens)
        assert (chain.keys, chain.num_tokens) == (expected, len(tokens))
        is_same = [old == new for old, new in zip(compared, tokens, strict=False)]
        num_same = [*is_same, False].index(False)
        assert [block.key for block in recorded] == expected[num_same // 4 :]
        compared = list(tokens)


def test_following_again_repairs_a_chain_whose_record_failed():
    fails = iter([False, False, True])
    chain = KeyChain(NAMESPACE, record=lambda block: 1 // (not next(fails, False)))
    chain.follow(range(8))
    changed = [0, 1, 2, 3, 9, 9, 9, 9]
    with pytest.raises(ZeroDivisionError):
        chain.follow(changed)
    assert chain.num_tokens == 4
    assert chain.follow(changed) == KeyChain(NAMESPACE).extend(changed)


def test_kinds_of_token_input_agree():
    tokens = [0, 1, 255, 256, 30_000, 17, 2, 3]
    expected = KeyChain(NAMESPACE).extend(tokens)
    kinds = np.uint32, np.int32, np.int64, np.uint64, np.uint16, ">i4"
    for given_as in (tuple(tokens), *(np.array(tokens, kind) for kind in kinds)):
        assert KeyChain(NAMESPACE).extend(given_as) == expected
    expected = KeyChain(NAMESPACE).extend([0, 2, 4, 6])
    for given_as in (range(0, 8, 2), np.arange(8)[::2]):
        assert KeyChain(NAMESPACE).extend(given_as) == expected
    assert KeyChain(NAMESPACE).extend(range(0)) == []


def test_a_chain_does_not_keep_the_tokens_of_full_blocks():
    chain = KeyChain(dataclasses.replace(NAMESPACE, block_size=4096))
    piece = np.arange(1000)
    tracemalloc.start()
    for _ in range(1000):
        chain.extend(piece)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(chain.keys) == 244
    assert held < 64_000  # Bytes; the tokens take 4,000,000.


def test_refusals_name_the_value():
    for call, message in (
        (lambda: Namespace("m", 1, "d", "l", 4), "weights_epoch=1 must be"),
        (lambda: Namespace("m", "w", "d", "l", 0), "block_size=0 must be"),
        (lambda: Namespace("m", "w", "d", "l", 4.0), "block_size=4.0 must"),
        (lambda: Extras(cache_salt=b"s"), "cache_salt=b's' must be of type"),
        (lambda: Extras(lora_name=7), "lora_name=7 must be of type str"),
        (lambda: Extras(multimodal=("i",)), "item='i' must be of type Mult"),
        (lambda: MultimodalItem("h", 0), "content_hash='h' must be of type"),
        (lambda: MultimodalItem(b"", 0), "content_hash=b'' must not be"),
        (lambda: MultimodalItem(b"h", -1), "offset=-1 must be in"),
        (lambda: KeyChain(NAMESPACE, group=-1), "group=-1 must be in"),
        (lambda: KeyChain(NAMESPACE, group=2**32), "group=4294"),
        (lambda: key_from_int(-1), "value=-1 must be in"),
        (lambda: key_from_int(2**64), "value=18446744073709551616 must"),
        (lambda: key_from_foreign("k"), "raw='k' must be of type bytes"),
        (lambda: keys_to_words([b"k" * 31, b"k" * 33]), r"\[31, 33\]"),
        (lambda: words_to_keys(np.zeros((2, 8), int)), "int64.*must be"),
        (lambda: words_to_keys(np.zeros(8, np.uint32)), r"shape=\(8,\)"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            call()


def test_a_chain_records_what_its_keys_were_made_of():
    """A record holds the arguments of `block_key`, and the tokens as passed."""
    items = (
        MultimodalItem(b"two", 5),
        MultimodalItem(b"one", 5),
        MultimodalItem(b"c", 9),
    )
    extras = Extras("salt", "lora", items)
    blocks = []
    chain = KeyChain(NAMESPACE, extras, 3, record=blocks.append)
    for part in (range(3), range(3, 9), range(9, 15)):
        chain.extend(part)
    assert [block.key for block in blocks] == chain.keys
    assert [block.parent for block in blocks] == [None, *chain.keys[:-1]]
    tokens = [np.frombuffer(block.tokens, "<u4").tolist() for block in blocks]
    assert tokens == [list(range(n, n + 4)) for n in (0, 4, 8)]
    for block, block_tokens in zip(blocks, tokens, strict=True):
        group, parent, inside = block.group, block.parent, block.extras
        assert block.key == block_key(NAMESPACE, group, parent, block_tokens, inside)
    assert [block.extras.multimodal for block in blocks] == [
        (),
        (MultimodalItem(b"one", 1), MultimodalItem(b"two", 1)),
        (MultimodalItem(b"c", 1),),
    ]
    assert chain.keys == KeyChain(NAMESPACE, extras, 3).extend(range(15))


# Foreign keys, and keys as words.


@given(st.lists(st.binary(min_size=1, max_size=80), unique=True, max_size=20))
def test_foreign_keys_stay_different(raws):
    made = [key_from_foreign(raw) for raw in raws]
    assert {len(key) for key in made} <= {32}
    assert len(set(made)) == len(raws)
    for key, raw in zip(made, raws, strict=True):
        assert (key == raw) == (len(raw) == 32)


def test_ints_bytes_and_blocks_have_domains_of_their_own():
    raw = (7).to_bytes(8, "little")
    encoding = encode_block(NAMESPACE, 0, None, [1] * 4)
    made = {key_from_int(7), key_from_foreign(raw), hashlib.sha256(raw).digest()}
    made |= {key_from_foreign(encoding), hashlib.sha256(encoding).digest()}
    assert len(made) == 5


@given(st.lists(keys, max_size=9))
def test_lanes_round_trip(made):
    words = keys_to_words(made)
    assert (words.dtype, words.shape) == (np.uint32, (len(made), 8))
    expected = [struct.unpack("<8I", key) for key in made]
    assert words.tolist() == [list(row) for row in expected]
    assert words_to_keys(words) == made
    assert words_to_keys(words[::-1]) == made[::-1]
