"""Ids of blocks under a secret, against SipHash in plain Python."""

import random

import numpy as np
import pytest

from jaxkv.keys.packed import keys_to_words
from jaxkv.scheduling.record.keyed import ID_BITS, hash_keys

WORD = (1 << 64) - 1


def siphash(secret, message):
    """SipHash-2-4 of any message, as its authors describe it."""

    def rotate(word, bits):
        return (word << bits | word >> (64 - bits)) & WORD

    def mix():
        v[0] = (v[0] + v[1]) & WORD
        v[1] = rotate(v[1], 13) ^ v[0]
        v[0] = rotate(v[0], 32)
        v[2] = (v[2] + v[3]) & WORD
        v[3] = rotate(v[3], 16) ^ v[2]
        v[0] = (v[0] + v[3]) & WORD
        v[3] = rotate(v[3], 21) ^ v[0]
        v[2] = (v[2] + v[1]) & WORD
        v[1] = rotate(v[1], 17) ^ v[2]
        v[2] = rotate(v[2], 32)

    halves = [int.from_bytes(secret[i : i + 8], "little") for i in (0, 8)]
    seeds = b"somepseudorandomlygeneratedbytes"
    v = [
        int.from_bytes(seeds[8 * i : 8 * i + 8], "big") ^ halves[i % 2]
        for i in range(4)
    ]
    padded = message + bytes(7 - len(message) % 8) + bytes([len(message) % 256])
    for start in range(0, len(padded), 8):
        part = int.from_bytes(padded[start : start + 8], "little")
        v[3] ^= part
        mix()
        mix()
        v[0] ^= part
    v[2] ^= 0xFF
    for _ in range(4):
        mix()
    return v[0] ^ v[1] ^ v[2] ^ v[3]


def test_the_twin_gives_the_value_that_the_authors_publish():
    # Appendix A of the paper.
    assert siphash(bytes(range(16)), bytes(range(15))) == 0xA129CA6149BE45E5


def test_ids_are_the_first_bits_of_siphash():
    rng = random.Random(7)
    for num in (0, 1, 2, 600):
        secret = rng.randbytes(16)
        keys = [rng.randbytes(32) for _ in range(num)]
        words = keys_to_words(keys)
        expected = [siphash(secret, key) >> (64 - ID_BITS) for key in keys]
        # Every other row is not contiguous.
        for step in (1, 2):
            ids = hash_keys(words[::step], secret)
            assert (ids.dtype, ids.tolist()) == (np.int64, expected[::step])


def test_a_secret_of_another_length_is_refused():
    for num in (15, 17):
        with pytest.raises(ValueError, match=rf"len\(secret\)={num} must be 16 bytes"):
            hash_keys(np.zeros((1, 8), np.uint32), bytes(num))
