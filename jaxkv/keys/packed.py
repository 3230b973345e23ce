"""Conversion between keys and words; foreign keys, of other lengths than 32 bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, SupportsIndex, TypeAlias, cast, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from jaxkv._util import shown
from jaxkv.types import KEY_BYTES, KEY_WORDS, BlockKey

# Prefixes that separate hash domains. They differ from one another and from the start
# of a block's encoding (`jaxkv.keys.hashing`), whose first byte is 1.
_INT_DOMAIN = b"jaxkv int 1:"
_FOREIGN_DOMAIN = b"jaxkv foreign 1:"

_Words: TypeAlias = NDArray[np.uint32]  # u32[n, 8]
_ONLY_KEYS = {KEY_BYTES}
_ITEM = np.dtype((np.void, KEY_BYTES))


def key_from_int(value: int) -> BlockKey:
    """Make a key from a number, such as a trace's block id.

    Args:
        value: In [0, 2**64).

    Example:
        >>> key_from_int(0).hex()[:16]
        '6428223f5b8d8030'
    """
    if not 0 <= value < 1 << 64:
        raise ValueError(f"value={shown(value)} must be in [0, 2**64).")
    return hashlib.sha256(_INT_DOMAIN + value.to_bytes(8, "little")).digest()


def key_from_foreign(raw: bytes) -> BlockKey:
    """Make a key from another system's key, such as vLLM's BlockHash.

    Args:
        raw: 32 bytes count as a good hash and are returned unchanged; any other length
            is hashed, in a separate domain.

    Example:
        >>> key_from_foreign(bytes(32)) == bytes(32)
        True
        >>> len(key_from_foreign(b"8 bytes."))
        32
    """
    if not isinstance(raw, bytes):
        raise TypeError(f"raw={shown(raw)} must be of type bytes.")
    if len(raw) == KEY_BYTES:
        return raw
    return hashlib.sha256(_FOREIGN_DOMAIN + raw).digest()


class PackedKeys(list[bytes]):
    """Keys that are used repeatedly, with their words.

    In Python, checking and converting thousands of keys takes longer than finding them;
    this class does it once. Only the creator of a list may append to it. A slice is
    also a `PackedKeys`.

    Args:
        keys: n keys.
        words: u32[n, 8]. The words of the keys.
        has_foreign: Whether a key may have another length than `KEY_BYTES`.

    Attributes:
        words: u32[n, 8]. Read-only.
        has_foreign: Whether a key may have another length than `KEY_BYTES`.

    Raises:
        ValueError: The words have a wrong shape or dtype.

    Example:
        >>> keys = [b"k" * 32, b"l" * 32]
        >>> PackedKeys(keys, keys_to_words(keys))[1:].words.shape
        (1, 8)
    """

    __slots__ = ("has_foreign", "words")

    def __init__(
        self,
        keys: Iterable[BlockKey],
        words: _Words,
        *,
        has_foreign: bool = False,
    ) -> None:
        super().__init__(keys)
        self.has_foreign = has_foreign
        self.words = _checked(words, len(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return _repacked, (list(self), self.words, self.has_foreign)

    @overload
    def __getitem__(self, index: SupportsIndex, /) -> BlockKey: ...
    @overload
    def __getitem__(self, index: slice, /) -> PackedKeys: ...
    def __getitem__(self, index: SupportsIndex | slice, /) -> BlockKey | PackedKeys:
        if isinstance(index, slice):
            keys = PackedKeys.__new__(PackedKeys)  # The words were checked before.
            keys += super().__getitem__(index)
            keys.has_foreign = self.has_foreign
            keys.words = np.ascontiguousarray(self.words[index])
            return keys
        return super().__getitem__(index)


def _repacked(keys: list[BlockKey], words: _Words, has_foreign: bool) -> PackedKeys:
    return PackedKeys(keys, words, has_foreign=has_foreign)


class UnlistedKeys(Sequence[bytes]):
    """Keys stored as words, converted to bytes only when Python reads them.

    >>> keys = UnlistedKeys(keys_to_words([b"k" * 32, b"l" * 32]))
    >>> len(keys), list(keys[1:]) == [b"l" * 32]
    (2, True)
    """

    __slots__ = ("words",)
    has_foreign = False

    def __init__(self, words: _Words) -> None:
        self.words = _checked(words, len(words))

    def __len__(self) -> int:
        return len(self.words)

    def __iter__(self) -> Iterator[BlockKey]:
        return iter(words_to_keys(self.words))

    @overload
    def __getitem__(self, index: SupportsIndex, /) -> BlockKey: ...
    @overload
    def __getitem__(self, index: slice, /) -> UnlistedKeys: ...
    def __getitem__(self, index: SupportsIndex | slice, /) -> BlockKey | UnlistedKeys:
        if isinstance(index, slice):
            return UnlistedKeys(self.words[index])
        key: BlockKey = self.words[index].tobytes()
        return key


def pack(names: Iterable[bytes]) -> tuple[Sequence[bytes], _Words]:
    """Return keys as a list (lists are not copied), and their words: u32[n, 8].

    A foreign key has the words of its `key_from_foreign`.
    """
    if isinstance(names, PackedKeys) or type(names) is UnlistedKeys:
        return names, names.words
    return lay_out(names)[:2]


def lay_out(names: Iterable[bytes]) -> tuple[Sequence[bytes], _Words, bool]:
    """Return what `pack` returns, and whether any key is foreign."""
    if type(names) is not list:
        # ABCs are slow.
        if isinstance(names, PackedKeys) or type(names) is UnlistedKeys:
            return names, names.words, names.has_foreign
        if not (hasattr(names, "__iter__") or hasattr(names, "__getitem__")):
            raise TypeError(f"keys={shown(names)} must be a list of keys, of bytes.")
        names = names if isinstance(names, list) else list(names)
    try:
        keys = names
        # Faster than a set of lengths.
        some_foreign = [*map(len, names)].count(KEY_BYTES) < len(names)
        if some_foreign:
            keys = list(map(key_from_foreign, names))
        data = b"".join(keys)
    except TypeError:
        wrong = next((name for name in names if not isinstance(name, bytes)), names)
        raise TypeError(f"key={shown(wrong)} must be of type bytes.") from None
    words = np.ndarray((len(names), KEY_WORDS), np.uint32, data)
    return names, words, some_foreign


def check_are_bytes(keys: Iterable[bytes]) -> None:
    """Raise TypeError for anything except a list of keys; convert nothing."""
    if isinstance(keys, PackedKeys | UnlistedKeys):
        return
    if not isinstance(keys, Sequence) or isinstance(keys, str | bytes):
        raise TypeError(f"keys={shown(keys)} must be a list of keys, of bytes.")
    if not all(issubclass(cls, bytes) for cls in set(map(type, keys))):
        wrong = next(key for key in keys if not isinstance(key, bytes))
        raise TypeError(f"key={shown(wrong)} must be of type bytes.")


def is_foreign(name: bytes) -> bool:
    """Return whether a key is foreign, so that its `key_from_foreign` is stored."""
    return len(name) != KEY_BYTES


def keys_to_words(keys: Sequence[BlockKey]) -> _Words:
    """Convert keys of `KEY_BYTES` to words: u32[n, 8], read-only.

    >>> hex(keys_to_words([bytes(range(32))])[0, 1])  # Bytes 4 to 7, little-endian.
    '0x7060504'
    """
    lengths = set(map(len, keys))
    if not lengths <= _ONLY_KEYS:
        raise ValueError(f"{sorted(lengths)=} of the keys must all be {KEY_BYTES}.")
    return np.frombuffer(b"".join(keys), np.uint32).reshape(-1, KEY_WORDS)


def words_to_keys(words: ArrayLike) -> list[BlockKey]:
    """Convert words (u32[n, 8]), such as `keys_to_words` returns, back to keys.

    >>> words_to_keys(keys_to_words([b"k" * 32]))
    [b'kkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkk']
    """
    words = np.asarray(words)
    if words.dtype != np.uint32 or words.shape[1:] != (KEY_WORDS,):
        raise ValueError(
            f"{words.dtype=}, {words.shape=} must be uint32, (n, {KEY_WORDS})."
        )
    # NumPy converts void items to `bytes` faster than Python slices them.
    items = np.ascontiguousarray(words).view(_ITEM)
    return cast(list[BlockKey], items.ravel().tolist())


def _checked(words: _Words, num_keys: int) -> _Words:
    """Return the words of keys, contiguous and read-only, or refuse them."""
    if words.shape != (num_keys, KEY_WORDS) or words.dtype != np.uint32:
        raise ValueError(
            f"words: {words.dtype}{list(words.shape)} must be "
            f"uint32[{num_keys}, {KEY_WORDS}]."
        )
    words = np.ascontiguousarray(words)
    if words.flags.writeable:
        words = words.view()
        words.flags.writeable = False
    return words
