"""Keys that are laid out once for the array side."""

import numpy as np
import pytest

from jaxkv.keys.packed import PackedKeys, keys_to_words, lay_out


def test_the_words_of_packed_keys_cannot_be_changed():
    keys = [bytes([number]) * 32 for number in range(3)]
    array = np.array(keys_to_words(keys))
    packed = PackedKeys(keys, array)
    for words in (packed.words, packed[1:].words):
        with pytest.raises(ValueError, match="read-only"):
            words[0] = 0
    assert array.flags.writeable


def test_packed_keys_are_laid_out_already_and_none_is_foreign():
    keys = [bytes([number]) * 32 for number in range(3)]
    packed = PackedKeys(keys, keys_to_words(keys))
    names, words, has_foreign = lay_out(packed)
    assert (names is packed, words is packed.words, has_foreign) == (True, True, False)
    assert lay_out([*keys, b"short"])[2]
