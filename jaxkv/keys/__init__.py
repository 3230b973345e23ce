"""Block keys: their inputs, and their form as arrays of words.

Words are in the machine's byte order, which is little-endian wherever JAX runs on an
accelerator.
"""

from jaxkv.keys.hashing import Extras as Extras
from jaxkv.keys.hashing import KeyChain as KeyChain
from jaxkv.keys.hashing import MultimodalItem as MultimodalItem
from jaxkv.keys.hashing import Namespace as Namespace
from jaxkv.keys.packed import PackedKeys as PackedKeys
from jaxkv.keys.packed import key_from_foreign as key_from_foreign
from jaxkv.keys.packed import key_from_int as key_from_int
from jaxkv.keys.packed import keys_to_words as keys_to_words
from jaxkv.keys.packed import words_to_keys as words_to_keys
