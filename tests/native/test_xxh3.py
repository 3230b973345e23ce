"""The checksum, beside the package that has the same function."""

import numpy as np
import pytest
import xxhash

from jaxkv.native.xxh3 import LEAST_BYTES, xxh3_64


@pytest.mark.parametrize("seed", range(3))
def test_it_is_xxh3_at_every_length_and_place(seed):
    rng = np.random.default_rng(seed)
    lengths = [*range(LEAST_BYTES, 1400), 2047, 2048, 2049, 65536, 100_003]
    raw = rng.integers(0, 256, max(lengths) + 16, np.uint8)
    for length in lengths:
        start = int(rng.integers(16))
        data = raw[start : start + length]
        assert xxh3_64(data) == xxhash.xxh3_64_intdigest(data.tobytes()), length
