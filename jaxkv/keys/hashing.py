"""Block keys: SHA-256 over everything that a block's bytes depend on.

Blocks with equal keys share memory, so a key that omits an input could serve one user's
text to another. An encoding is a sequence of fields, each ``u8 tag, u64 length,
payload``, with little-endian numbers:

    FORMAT      version of the encoding
    MODEL ...   the namespace: model, weights epoch, stored dtype, layout, block size
    GROUP       index of the group of layers
    SALT, LORA  omitted if the request has none; an empty one is not omitted
    PARENT      the key of the previous block; omitted in the first block
    ITEM        for each multimodal item that begins in the block
    TOKENS      u32 each

Tags ascend and every payload has its length, so an encoding is unambiguous: different
inputs have different encodings, and with SHA-256 different keys. The parent's key
covers all tokens before the block.

Keys do not depend on the process, the machine or the clock: every host computes the
same keys for a request.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import operator
import struct
import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from jaxkv._util import check_type, shown
from jaxkv.types import KEY_BYTES, BlockKey

TokenIds: TypeAlias = Sequence[int] | NDArray[np.integer[Any]]
"""Token ids in [0, 2**32), of any integer dtype and one dimension."""

TOKEN_BYTES = 4


class _Tag(enum.IntEnum):
    """Type of a field. A number is never reused for another field."""

    FORMAT = 1
    MODEL = 2
    WEIGHTS_EPOCH = 3
    KV_DTYPE = 4
    LAYOUT = 5
    BLOCK_SIZE = 6
    GROUP = 7
    SALT = 8
    LORA = 9
    PARENT = 10
    ITEM = 11
    TOKENS = 12


def _head(tag: _Tag, num_bytes: int) -> bytes:
    return struct.pack("<BQ", tag, num_bytes)


def _field(tag: _Tag, payload: bytes) -> bytes:
    return _head(tag, len(payload)) + payload


def _text(tag: _Tag, text: str) -> bytes:
    # JSON allows lone surrogates in a salt, and a request must not fail because of one.
    return _field(tag, text.encode("utf-8", "surrogatepass"))


def _check_type(name: str, value: object, expected: type) -> None:
    if not isinstance(value, expected) or (isinstance(value, bool) and expected is int):
        raise TypeError(f"{name}={shown(value)} must be of type {expected.__name__}.")


def _check_range(name: str, value: int, low: int, bits: int) -> None:
    _check_type(name, value, int)
    if not low <= value < 1 << bits:
        raise ValueError(f"{name}={shown(value)} must be in [{low}, 2**{bits}).")


@dataclasses.dataclass(frozen=True)
class Namespace:
    """The inputs that all blocks share, in addition to the tokens.

    Blocks are shared only within one namespace. Change `weights_epoch` whenever the
    weights change under the same model name: older blocks are then never found.

    Attributes:
        model: The model, with its revision.
        weights_epoch: Version of its weights.
        kv_dtype: The stored dtype, resolved: "bfloat16", never "auto".
        layout: Arrangement of heads, layers and shards in a block.
        block_size: Tokens per block.
    """

    model: str
    weights_epoch: str
    kv_dtype: str
    layout: str
    block_size: int

    def __post_init__(self) -> None:
        for name in ("model", "weights_epoch", "kv_dtype", "layout"):
            _check_type(name, getattr(self, name), str)
        _check_range("block_size", self.block_size, 1, 32)


@dataclasses.dataclass(frozen=True)
class MultimodalItem:
    """An image, a sound, ...: content that its placeholder tokens do not identify.

    Attributes:
        content_hash: A collision-resistant hash of the content, of any length.
        offset: Position of its first token in the request.
    """

    content_hash: bytes
    offset: int

    def __post_init__(self) -> None:
        _check_type("content_hash", self.content_hash, bytes)
        if not self.content_hash:
            raise ValueError("content_hash=b'' must not be empty.")
        _check_range("offset", self.offset, 0, 64)


@dataclasses.dataclass(frozen=True)
class Extras:
    """The inputs of one request's blocks, in addition to the tokens.

    Salt and LoRA are part of every block's key. A multimodal item is part of the key
    of the block in which it begins: earlier blocks do not depend on it, and later ones
    inherit it through their parent.

    Attributes:
        cache_salt: Requests share blocks only with requests of the same salt; a trusted
            party must set it. None and "" are different salts.
        lora_name: The adapter, with its revision.
        multimodal: Items in any order; sorted on construction.
    """

    cache_salt: str | None = None
    lora_name: str | None = None
    multimodal: tuple[MultimodalItem, ...] = ()

    def __post_init__(self) -> None:
        for name in ("cache_salt", "lora_name"):
            if getattr(self, name) is not None:
                _check_type(name, getattr(self, name), str)
        check_type(Iterable, "a tuple of MultimodalItems", multimodal=self.multimodal)
        for item in self.multimodal:
            _check_type("multimodal item", item, MultimodalItem)
        items = sorted(self.multimodal, key=lambda i: (i.offset, i.content_hash))
        object.__setattr__(self, "multimodal", tuple(items))


NO_EXTRAS = Extras()


class KeyedBlock(NamedTuple):
    """A key and the inputs it was computed from."""

    key: BlockKey
    parent: BlockKey | None  # None for a request's first block.
    tokens: bytes  # u32 each, little-endian.
    group: int = 0  # Index of the group of layers.
    # The request's extras, with only the items of the block and their offsets in it.
    extras: Extras = NO_EXTRAS


class ChainKeys(list[BlockKey]):
    """The keys of a request's blocks."""

    __slots__ = ("block_size",)
    block_size: int  # Tokens per block.


class KeyChain:
    """The keys of one request's full blocks, computed as its tokens arrive.

    It stores the keys of full blocks, and the tokens of the partial block. Once it
    follows a list, it stores all tokens.

    Args:
        namespace: The namespace of the blocks.
        extras: The request's extras.
        group: Index of the group of layers.
        record: Called with each new `KeyedBlock` (`jaxkv.observe.catalog`).

    Example:
        >>> chain = KeyChain(Namespace("m", "0", "int8", "flat", block_size=2))
        >>> [key.hex()[:8] for key in chain.extend([7, 258, 9])]
        ['5a7874d3']
        >>> chain.num_tokens, len(chain.keys)
        (3, 1)
    """

    def __init__(
        self,
        namespace: Namespace,
        extras: Extras = NO_EXTRAS,
        group: int = 0,
        *,
        record: Callable[[KeyedBlock], object] | None = None,
    ) -> None:
        _check_type("namespace", namespace, Namespace)
        _check_type("extras", extras, Extras)
        self._block_bytes = TOKEN_BYTES * namespace.block_size
        self._tokens_head = _head(_Tag.TOKENS, self._block_bytes)
        # The fields that all blocks share are hashed once.
        self._constant = hashlib.sha256(_encode_constant(namespace, group, extras))
        self._group, self._record = group, record
        self._plain = dataclasses.replace(extras, multimodal=())
        # By block in which items begin: the extras, with offsets within the block.
        self._special: dict[int, Extras] = {}
        for item in extras.multimodal:
            block, offset = divmod(item.offset, namespace.block_size)
            before = self._special.get(block, self._plain)
            items = *before.multimodal, dataclasses.replace(item, offset=offset)
            self._special[block] = dataclasses.replace(extras, multimodal=items)
        self._keys = ChainKeys()
        self._keys.block_size = namespace.block_size
        self._tail = b""  # Tokens of the partial block, u32 each.
        # u32[n]. The first tokens of the chain, as far as `follow` knows them.
        self._followed = np.zeros(0, "<u4")

    @property
    def keys(self) -> Sequence[BlockKey]:
        """The keys so far: a live list, not a copy."""
        return self._keys

    @property
    def num_tokens(self) -> int:
        """Tokens so far, including the partial block."""
        return (len(self._keys) * self._block_bytes + len(self._tail)) // TOKEN_BYTES

    def extend(self, tokens: TokenIds) -> list[BlockKey]:
        """Append tokens, and compute the keys of the blocks that they fill.

        Args:
            tokens: int[n]. Lists, tuples and arrays are fast.

        Returns:
            The new keys, if any; `keys` has them too.

        Raises:
            ValueError: If a token is out of range; the chain is unchanged.
            TypeError: If a token is not an integer; the chain is unchanged.
            Exception: What `record` raises; the chain is unchanged, and a retry with
                the same tokens records the same blocks again.
        """
        data = self._tail + token_bytes(tokens)
        stop = len(data) - len(data) % self._block_bytes
        parent = self._keys[-1] if self._keys else None
        keys: list[BlockKey] = []
        for start in range(0, stop, self._block_bytes):
            block = data[start : start + self._block_bytes]
            extras = self._special.get(len(self._keys) + len(keys), self._plain)
            hasher = self._constant.copy()
            context = _encode_context(parent, extras)
            hasher.update(context + self._tokens_head + block)
            key = hasher.digest()
            if self._record is not None:
                self._record(KeyedBlock(key, parent, block, self._group, extras))
            keys.append(key)
            parent = key
        self._keys += keys
        self._tail = data[stop:]
        return keys

    def rewind(self, num_blocks: int) -> None:
        """Drop all tokens after the first full blocks, including the partial block.

        The chain then continues like a new chain of the remaining tokens. `extras` do
        not change: each multimodal item stays at its offset.

        Args:
            num_blocks: Full blocks to keep. To keep later tokens, `extend` the chain by
                them again.

        Raises:
            ValueError: If the chain has fewer full blocks; the chain is unchanged.
            TypeError: If it is not an integer; the chain is unchanged.

        Example:
            >>> chain = KeyChain(Namespace("m", "0", "int8", "flat", block_size=2))
            >>> first, second = chain.extend([7, 258, 9, 10, 11])
            >>> chain.rewind(1)
            >>> chain.num_tokens, chain.extend([9, 10]) == [second]
            (2, True)
        """
        try:
            num = operator.index(num_blocks)
        except TypeError:
            raise TypeError(
                f"num_blocks={shown(num_blocks)} must be an integer."
            ) from None
        if not 0 <= num <= len(self._keys):
            raise ValueError(
                f"num_blocks={shown(num_blocks)} must be in [0, {len(self._keys)}], "
                "the full blocks of the chain."
            )
        del self._keys[num:]
        self._tail = b""
        self._followed = self._followed[: self.num_tokens]

    def follow(self, tokens: TokenIds) -> Sequence[BlockKey]:
        """Set the tokens to a list that grows, shrinks or is rewritten.

        The keys of unchanged leading blocks are kept; only later tokens are hashed. All
        tokens are compared, which is fastest with NumPy arrays; for a list that only
        grows, `extend` costs less.

        Args:
            tokens: int[n]. All tokens of the request.

        Returns:
            The keys of the full blocks: `keys`, the live list.

        Raises:
            ValueError: If a token is out of range; the chain is unchanged.
            TypeError: If a token is not an integer; the chain is unchanged.
            Exception: What `record` raises; the chain then ends before the first
                changed block, and a retry with the same tokens repairs it.

        Example:
            >>> chain = KeyChain(Namespace("m", "0", "int8", "flat", block_size=2))
            >>> first, second = chain.follow([7, 258, 9, 10, 11])
            >>> chain.follow([7, 258, 9]) == [first]
            True
            >>> chain.follow([7, 258, 8, 10])[1] == second
            False
        """
        values = np.frombuffer(token_bytes(tokens), "<u4")
        num_same = min(len(values), len(self._followed))
        differs = values[:num_same] != self._followed[:num_same]
        if differs.any():
            num_same = int(differs.argmax())
        if num_same < self.num_tokens:
            self.rewind(num_same // self._keys.block_size)
        self.extend(values[self.num_tokens :])
        self._followed = values
        return self.keys


def _encode_constant(namespace: Namespace, group: int, extras: Extras) -> bytes:
    """Encode the fields that all blocks of a request share."""
    _check_range("group", group, 0, 32)
    fields = [
        _field(_Tag.FORMAT, b"jaxkv block 1"),
        _text(_Tag.MODEL, namespace.model),
        _text(_Tag.WEIGHTS_EPOCH, namespace.weights_epoch),
        _text(_Tag.KV_DTYPE, namespace.kv_dtype),
        _text(_Tag.LAYOUT, namespace.layout),
        _field(_Tag.BLOCK_SIZE, struct.pack("<I", namespace.block_size)),
        _field(_Tag.GROUP, struct.pack("<I", group)),
    ]
    if extras.cache_salt is not None:
        fields.append(_text(_Tag.SALT, extras.cache_salt))
    if extras.lora_name is not None:
        fields.append(_text(_Tag.LORA, extras.lora_name))
    return b"".join(fields)


_PARENT_HEAD = _head(_Tag.PARENT, KEY_BYTES)


def _encode_context(parent: BlockKey | None, extras: Extras) -> bytes:
    """Encode a block's parent and items, whose offsets count from the block's start."""
    fields = b"" if parent is None else _PARENT_HEAD + parent
    for item in extras.multimodal:
        payload = struct.pack("<Q", item.offset) + item.content_hash
        fields += _field(_Tag.ITEM, payload)
    return fields


def token_bytes(tokens: TokenIds) -> bytes:
    """Return `tokens` as little-endian u32, without a Python loop."""
    if isinstance(tokens, list | tuple | range):
        try:
            packed = array("I", tokens)
        except (OverflowError, TypeError):
            raise _token_error(tokens) from None
        if sys.byteorder == "big":
            packed.byteswap()
        return packed.tobytes()
    if np.ma.is_masked(tokens):
        raise TypeError("tokens must not be masked: a hidden token cannot be hashed.")
    values = np.asarray(tokens)
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise TypeError(
            f"tokens of {values.dtype=}, {values.shape=} must be integers in a row."
        )
    narrow = values.astype("<u4")
    if not (narrow == values).all():
        raise _token_error(values.tolist())
    return narrow.tobytes()


def _token_error(tokens: Iterable[Any]) -> ValueError | TypeError:
    """Return an error that names the first bad token."""
    for i, token in enumerate(tokens):
        try:
            in_range = 0 <= operator.index(token) < 1 << 32
        except TypeError:
            return TypeError(f"tokens[{i}]={shown(token)} must be an integer.")
        if not in_range:
            return ValueError(f"tokens[{i}]={shown(token)} must be in [0, 2**32).")
    raise AssertionError("no token is bad")
