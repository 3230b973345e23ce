"""The format of objects: what is right is read, and nothing else ever is."""

import numpy as np
import pytest

from jaxkv.transfer.storage import ObjectFormat, Refusal
from jaxkv.transfer.storage.objects import HEADER_BYTES

KEY = bytes(range(32))
PAYLOAD = np.random.default_rng(7).bytes(100)
SECRET = "a secret of enough bytes"


def make(namespace=b"model", layout="f32[25]", payload_bytes=100, **more):
    return ObjectFormat(namespace, layout, payload_bytes, **more)


def encoded(objects, key=KEY, payload=PAYLOAD):
    return b"".join(objects.encode(key, [payload]))


@pytest.fixture(params=[None, SECRET])
def objects(request):
    return make(secret=request.param)


def test_a_payload_comes_back_as_it_went(objects):
    data = encoded(objects)
    assert len(data) == objects.object_bytes
    payload = objects.decode(KEY, data)
    assert bytes(payload) == PAYLOAD


def test_neither_side_copies_a_payload():
    objects = make()
    array = np.arange(25, dtype=np.float32)
    pieces = objects.encode(KEY, [array[:10], array[10:]])
    array[0] = 77
    assert np.frombuffer(pieces[1], np.float32)[0] == 77
    data = bytearray(encoded(objects))
    payload = objects.decode(KEY, memoryview(data))
    data[HEADER_BYTES] ^= 1
    assert payload[0] == PAYLOAD[0] ^ 1


def test_a_bit_flipped_anywhere_is_refused(objects):
    data = encoded(objects)
    for place in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[place // 8] ^= 1 << place % 8
        assert isinstance(objects.decode(KEY, bytes(damaged)), Refusal), place


def test_an_object_cut_anywhere_is_torn(objects):
    data = encoded(objects)
    for length in range(len(data)):
        assert objects.decode(KEY, data[:length]) == Refusal("torn", True)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (dict(namespace=b"another"), "namespace"),
        (dict(layout="bf16[50]"), "layout"),
        (dict(shard=1, num_shards=2), "shard"),
        (dict(num_shards=2), "shard"),
        (dict(secret=SECRET), "unsealed"),
    ],
)
def test_objects_of_others_are_refused_with_the_reason(other, reason):
    ours, theirs = make(), make(**other)
    assert ours.decode(KEY, encoded(theirs)) == Refusal(reason, True)
    assert ours.folder != theirs.folder or ours.name(KEY) != theirs.name(KEY)
