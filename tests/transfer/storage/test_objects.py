"""The format of objects: what is right is read, and nothing else ever is."""

import hashlib

import numpy as np
import pytest
import xxhash

from jaxkv.transfer.storage import ObjectFormat, Refusal
from jaxkv.transfer.storage.objects import HEADER_BYTES

KEY = bytes(range(32))
PAYLOAD = np.random.default_rng(7).bytes(100)
SECRET = "a secret of enough bytes"
NAME = (
    "jaxkv1/4a623f2af271b8f67e9ea303221f16f5"
    "/00/000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f.0"
)
DIGEST = "67def12763f1aa6a01a58ecf535e345972362ce14f065d70711b2cbd98cb1e93"


def make(namespace=b"model", layout="f32[25]", payload_bytes=100, **options):
    return ObjectFormat(namespace, layout, payload_bytes, **options)


def encoded(objects, key=KEY, payload=PAYLOAD):
    return b"".join(objects.encode(key, [payload]))


@pytest.fixture(params=[None, SECRET])
def objects(request):
    return make(secret=request.param)


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


def test_a_payload_comes_back_and_a_bit_flipped_anywhere_is_refused(objects):
    data = encoded(objects)
    assert len(data) == objects.object_bytes
    assert bytes(objects.decode(KEY, data)) == PAYLOAD
    for place in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[place // 8] ^= 1 << place % 8
        assert isinstance(objects.decode(KEY, bytes(damaged)), Refusal), place


def test_an_object_cut_anywhere_is_torn(objects):
    data = encoded(objects)
    for length in range(len(data)):
        assert objects.decode(KEY, data[:length]) == Refusal("torn", True)


def test_objects_of_others_are_refused_with_the_reason_and_lie_elsewhere():
    ours = make()
    for foreign, reason in (
        (make(namespace=b"another"), "namespace"),
        (make(layout="bf16[50]"), "layout"),
        (make(shard=1, num_shards=2), "shard"),
        (make(num_shards=2), "shard"),
        (make(secret=SECRET), "unsealed"),
    ):
        assert ours.decode(KEY, encoded(foreign)) == Refusal(reason, True)
        assert ours.folder != foreign.folder or ours.name(KEY) != foreign.name(KEY)
    shards = [make(shard=n, num_shards=2) for n in range(2)]
    assert shards[0].folder == shards[1].folder
    formats = [
        ours,
        make(namespace=b"another"),
        make(layout="bf16[50]"),
        make(payload_bytes=101),
        make(secret=SECRET),
        make(secret=SECRET + "!"),
        shards[0],
    ]
    assert len({objects.folder for objects in formats}) == len(formats)


def test_without_the_secret_nothing_can_be_made_that_is_read():
    ours = make(secret=SECRET)
    guess = make(secret="another secret of many bytes")
    assert ours.decode(KEY, encoded(guess)) == Refusal("forged", True)
    assert ours.decode(KEY, encoded(make())) == Refusal("unsealed", True)
    # The right object, under the name of another key.
    other_key = KEY[::-1]
    assert ours.decode(other_key, encoded(ours)) == Refusal("key", True)
    # Its header, with the other key.
    moved = encoded(ours).replace(KEY, other_key)
    assert ours.decode(other_key, moved) == Refusal("forged", True)
    # Its payload replaced, with the seal's flag set.
    unsealed = make()
    forged = bytearray(encoded(unsealed, payload=b"x" * 100))
    forged[10:12] = encoded(ours)[10:12]
    assert ours.decode(KEY, bytes(forged)) == Refusal("forged", True)


def test_any_bytes_are_refused_and_never_raise(objects):
    right, rng = encoded(objects), np.random.default_rng(0)
    for _ in range(6000):
        data = bytearray(right)
        start, end = sorted(rng.integers(0, len(data) + 1, 2))
        match rng.integers(6):
            case 0:
                data = bytearray(rng.bytes(int(rng.integers(600))))
            case 1:  # A header of random fields under the right magic.
                data[8:HEADER_BYTES] = rng.bytes(HEADER_BYTES - 8)
            case 2:  # Huge lengths and counts.
                at = int(rng.choice([8, 10, 12, 112, 116, 120, 124]))
                data[at : at + 4] = b"\xff" * 4
            case 3:
                data[start:end] = bytes(end - start)
            case 4:  # What is longer, or shorter.
                data[start:] = rng.bytes(int(rng.integers(300)))
            case _:
                data[start:end] = data[start:end][::-1]
        answer = objects.decode(KEY, bytes(data))
        if bytes(data) == right:
            assert bytes(answer) == PAYLOAD
        else:
            assert isinstance(answer, Refusal)
            assert answer.is_ours == (bytes(data[:8]) == right[: len(data[:8])])


def test_the_checksum_of_payloads_of_all_sizes_is_that_of_the_package():
    for num_bytes in (1, 240, 241, 255, 256, 257, 5000):
        objects = make(payload_bytes=num_bytes)
        payload = np.random.default_rng(0).bytes(num_bytes)
        data = encoded(objects, payload=payload)
        padded = payload if num_bytes > 240 else payload.ljust(256, b"\0")
        expected = xxhash.xxh3_64_intdigest(padded)
        assert int.from_bytes(data[160:168], "little") == expected, num_bytes
        assert bytes(objects.decode(KEY, data)) == payload


def test_the_format_does_not_change_without_notice():
    """Objects of older versions are read, unless VERSION changes."""
    data = encoded(make(), payload=bytes(range(100)))
    assert make().name(KEY) == NAME
    assert hashlib.sha256(data).hexdigest() == DIGEST


def test_what_makes_no_format_is_refused():
    for options, message in (
        (dict(payload_bytes=0), "payload_bytes=0 must be at least 1"),
        (dict(shard=2, num_shards=2), "shard=2 must be in"),
        (dict(secret="short"), "storage_secret has 5 bytes and must have at least 16"),
        (dict(secret=b""), "storage_secret has 0 bytes"),
        (dict(secret="0123456789abcde\n"), "has 15 bytes and must have at least 16"),
    ):
        with pytest.raises(ValueError, match=message) as info:
            make(**options)
        assert "short" not in str(info.value)


def test_white_space_around_a_secret_does_not_count():
    bare = make(secret="0123456789abcdef")
    for secret in ("0123456789abcdef\n", b" 0123456789abcdef\r\n"):
        assert make(secret=secret).folder == bare.folder
