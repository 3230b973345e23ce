"""KV events of the events of a tier."""

import contextlib
import random

import msgspec
import pytest

from jaxkv.keys.hashing import Extras, KeyChain, MultimodalItem, Namespace
from jaxkv.observe.catalog import BlockCatalog
from jaxkv.observe.describe import count_unknown, describe
from jaxkv.observe.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    decode_batch,
    encode_batch,
)
from jaxkv.search.groups import ChunkedLocal, FullAttention, Mamba, SlidingWindow
from jaxkv.tiers.base import DEVICE_MEDIUM, HOST_MEDIUM
from tests.rigs.listening import removed, stored

SPACE = Namespace("model", "weights", "float32", "NHD", 2)
GROUPS = FullAttention(2), SlidingWindow(2, 9), ChunkedLocal(2, 4), Mamba(2)


@pytest.fixture
def catalog():
    return BlockCatalog()


def chain(catalog, tokens, extras=None, group=0):
    made = KeyChain(SPACE, extras or Extras(), group, record=catalog.record)
    return made.extend(tokens)


def tell(catalog, *events, **options):
    described = []
    for event in events:
        described.append(describe(event, catalog, **options))
        catalog.note(event)
    return described


def test_an_event_is_split_between_blocks_that_are_not_consecutive(catalog):
    """A device pool has a key once for each block that holds it."""
    first, second = chain(catalog, range(6)), chain(catalog, [0, 1, 8, 9])
    blocks = first[0], first[1], second[1], first[2], first[2], *second
    [published, *removals] = tell(
        catalog, stored(*blocks), removed(first[2]), removed(first[2])
    )
    assert removals == [[BlockRemoved([first[2]], "CPU", 0)]] * 2
    assert [(e.parent_block_hash, e.token_ids) for e in published] == [
        (None, [0, 1, 2, 3]),
        (first[0], [8, 9]),
        (first[1], [4, 5]),
        (first[1], [4, 5]),
        (None, [0, 1, 8, 9]),
    ]


def test_consecutive_blocks_of_a_group_are_one_event_with_its_kind(catalog):
    keys = [chain(catalog, range(10, 18), group=group) for group in range(4)]
    blocks = [key for chain_keys in keys for key in chain_keys[1:3]]
    [published, removals] = tell(
        catalog,
        stored(*blocks, medium=DEVICE_MEDIUM),
        removed(keys[0][1], keys[3][2], keys[3][1], medium=DEVICE_MEDIUM),
        groups=GROUPS,
    )
    kinds = "full_attention", "sliding_window", "chunked_local_attention", "mamba"
    assert published == [
        BlockStored(
            block_hashes=keys[group][1:3],
            parent_block_hash=keys[group][0],
            token_ids=[12, 13, 14, 15],
            block_size=2,
            lora_id=None,
            medium="GPU",
            lora_name=None,
            extra_keys=None,
            group_idx=group,
            kv_cache_spec_kind=kind,
            kv_cache_spec_sliding_window=9 if kind == "sliding_window" else None,
        )
        for group, kind in enumerate(kinds)
    ]
    assert removals == [
        BlockRemoved([keys[0][1]], "GPU", 0),
        BlockRemoved([keys[3][2], keys[3][1]], "GPU", 3),
    ]


def test_extra_keys_are_in_vllms_order(catalog):
    items = MultimodalItem(bytes(range(32)), 3), MultimodalItem(b"\xff", 5)
    extras = Extras("sa\ud800lt", "adapter", items)
    [[event]] = tell(catalog, stored(*chain(catalog, range(8), extras)))
    assert event.lora_name == "adapter"
    assert event.extra_keys == [
        ("adapter", "sa\\ud800lt"),  # Only the first block has the salt.
        ("adapter", (bytes(range(32)).hex(), 1)),
        ("adapter", ("ff", 1)),
        ("adapter",),
    ]
    (plain,) = describe(stored(*chain(catalog, range(8))), catalog)
    assert plain.extra_keys is None
    [[later]] = tell(catalog, stored(*chain(catalog, range(8), Extras("s"))[1:]))
    assert later.extra_keys is None


def test_unknown_blocks_have_no_tokens_and_are_counted(catalog):
    keys = chain(catalog, range(4))
    [published, removals] = tell(
        catalog,
        stored(b"foreign", b"other", *keys, b"third", block_size=2),
        removed(b"other", keys[1], medium=HOST_MEDIUM),
    )
    assert published[0] == BlockStored(
        [b"foreign", b"other"], None, [], 2, None, "CPU", None
    )
    assert published[1].token_ids == [0, 1, 2, 3]
    assert published[2].block_hashes == [b"third"]
    assert count_unknown(published) == 3
    assert removals == [
        BlockRemoved([b"other"], "CPU", None),
        BlockRemoved([keys[1]], "CPU", 0),
    ]


def test_an_event_has_the_block_size_of_its_group(catalog):
    large = Namespace("model", "weights", "float32", "NHD", 4)
    keys = KeyChain(large, group=1, record=catalog.record).extend(range(8))
    [[event]] = tell(catalog, stored(*keys, block_size=2))
    assert (event.block_size, event.token_ids) == (4, list(range(8)))


def test_int_block_hashes_are_vllms_numbers(catalog):
    keys = chain(catalog, range(4))
    events = stored(keys[1], b"\x01\x00"), removed(keys[1])
    [published, removals] = tell(catalog, *events, int_block_hashes=True)
    mask = 2**64 - 1
    assert published[0].parent_block_hash == int.from_bytes(keys[0], "big") & mask
    assert published[0].block_hashes == removals[0].block_hashes
    assert published[0].block_hashes == [int.from_bytes(keys[1], "big") & mask]
    assert published[1].block_hashes == [256]


# The wire format. Expected values are written out, independent of the code.

BATCH = KVEventBatch(
    1.5,
    [
        BlockStored([b"k" * 32, 2**64 - 1], b"p" * 32, [7, 8], 1, None, "CPU", None),
        BlockStored([5], None, [7], 1, None, "GPU", "lora", [("lora", ("ab", 0))], 0),
        BlockRemoved([5], "GPU", 1),
        AllBlocksCleared(),
    ],
    3,
)


def test_the_wire_format_is_vllms():
    stored = {"type": "BlockStored", "block_size": 1, "lora_id": None}
    first = {"block_hashes": [b"k" * 32, 2**64 - 1], "parent_block_hash": b"p" * 32}
    first |= {"token_ids": [7, 8], "medium": "CPU", "lora_name": None}
    second = {"block_hashes": [5], "parent_block_hash": None, "token_ids": [7]}
    second |= {"medium": "GPU", "lora_name": "lora"}
    second |= {"extra_keys": [["lora", ["ab", 0]]], "group_idx": 0}
    removal = {"type": "BlockRemoved", "block_hashes": [5], "medium": "GPU"}
    assert msgspec.msgpack.decode(encode_batch(BATCH)) == [
        1.5,
        [
            *(stored | first, stored | second, removal | {"group_idx": 1}),
            {"type": "AllBlocksCleared"},
        ],
        3,
    ]


def test_the_array_format_begins_each_event_with_its_name():
    payload = encode_batch(BATCH, array_like=True)
    ts, events, rank = msgspec.msgpack.decode(payload)
    assert (ts, rank) == (1.5, 3)
    head = ["BlockStored", [b"k" * 32, 2**64 - 1], b"p" * 32, [7, 8], 1, None, "CPU"]
    assert events[0][:8] == [*head, None]
    head = ["BlockStored", [5], None, [7], 1, None, "GPU", "lora"]
    assert events[1][:10] == [*head, [["lora", ["ab", 0]]], 0]
    assert not any(events[0][8:] + events[1][10:])
    assert events[2:] == [["BlockRemoved", [5], "GPU", 1], ["AllBlocksCleared"]]


def test_unknown_fields_are_ignored_and_the_other_format_is_refused():
    event = {"type": "BlockRemoved", "block_hashes": [1], "medium": "CPU", "new": 7}
    payload = msgspec.msgpack.encode([0.5, [event], None, "newer"])
    assert decode_batch(payload).events == [BlockRemoved([1], "CPU")]
    for array_like in (False, True):
        payload = encode_batch(BATCH, array_like=array_like)
        batch = decode_batch(payload, array_like=array_like)
        assert batch.events[0] == BATCH.events[0]
        assert encode_batch(batch, array_like=array_like) == payload
        with pytest.raises(msgspec.DecodeError):
            decode_batch(payload, array_like=not array_like)


# msgpack: an array in an array, and so on; a text that is no UTF-8; a huge length; a
# number for a batch; and an array for the name of an event.
NO_BATCHES = [
    *(b"", b"nonsense", b"\x91" * 5000 + b"\x00"),
    *(
        encode_batch(BATCH, array_like=form).replace(b"CPU", b"\xff\xfeU")
        for form in (0, 1)
    ),
    *(b"\xdd\xff\xff\xff\xff", encode_batch(BATCH)[:-1]),
    *map(msgspec.msgpack.encode, (7, [0.5, [[[]]]])),
]


@pytest.mark.parametrize("array_like", [False, True])
def test_a_payload_that_is_no_batch_is_a_decode_error(array_like):
    for payload in NO_BATCHES:
        with pytest.raises(msgspec.DecodeError):
            decode_batch(payload, array_like=array_like)
    rng, good = random.Random(array_like), encode_batch(BATCH, array_like=array_like)
    for _ in range(3000):
        changed = bytearray(good)
        for _ in range(rng.randrange(1, 4)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        with contextlib.suppress(msgspec.DecodeError):
            decode_batch(bytes(changed), array_like=array_like)
