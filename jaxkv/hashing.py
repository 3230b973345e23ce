"""Names for blocks: SHA-256 over everything that a block's bytes depend on.

Two blocks may share memory exactly when they have the same key, so a key that
leaves something out serves one user's text to another. An encoding is a row of
fields, each ``u8 tag, u64 length, payload``, numbers little-endian:

    FORMAT      which encoding this is
    MODEL ...   the namespace: model, weights epoch, stored dtype, layout, block size
    GROUP       which group of layers
    SALT, LORA  left out where the request has none; present but empty is different
    PARENT      the key of the block before; left out at the root
    ITEM        once for each multimodal item that begins in the block
    TOKENS      u32 each

Tags ascend, and a payload is as long as its length says, so an encoding can be read
back in one way only: inputs that differ in anything have different encodings, and
SHA-256 keeps them apart. The parent's key stands for all tokens before the block.

Nothing here depends on the process, the machine or its clock: every host that sees
the same request computes the same keys.
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

from jaxkv.types import KEY_BYTES, BlockKey

TokenIds: TypeAlias = Sequence[int] | NDArray[np.integer[Any]]
"""Token ids in [0, 2**32), of any integer dtype and one dimension."""

TOKEN_BYTES = 4


class _Tag(enum.IntEnum):
    """What a field is. A number once given is never given to another field."""

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
    # A lone surrogate is a str too (JSON can carry one in a salt): encode it as it
    # is rather than fail on one user's request. Still one encoding for each str.
    return _field(tag, text.encode("utf-8", "surrogatepass"))


def _check_type(name: str, value: object, expected: type) -> None:
    if not isinstance(value, expected):
        raise TypeError(f"{name}={value!r} must be of type {expected.__name__}.")


def _check_range(name: str, value: int, low: int, bits: int) -> None:
    _check_type(name, value, int)
    if not low <= value < 1 << bits:
        raise ValueError(f"{name}={value!r} must be in [{low}, 2**{bits}).")


@dataclasses.dataclass(frozen=True)
class Namespace:
    """What the bytes of every block depend on, besides the tokens.

    Blocks are shared only within one namespace. Change `weights_epoch` whenever the
    weights change under the same model name, and all older blocks are out of reach.

    Attributes:
        model: The model, with its revision.
        weights_epoch: Which state of its weights.
        kv_dtype: The dtype that is stored, resolved: "bfloat16", never "auto".
        layout: How heads, layers and shards lie in a block.
        block_size: Tokens in a block.
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
    """An image, a sound, ...: its placeholder tokens do not tell what it is.

    Attributes:
        content_hash: A collision-resistant hash of the content, of any length.
        offset: Where its first token is, counted from the start of the request.
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
    """What the bytes of one request's blocks depend on, besides the tokens.

    Salt and LoRA are part of every block's key. A multimodal item is part of the key
    of the block in which it begins: the blocks before do not depend on it, and those
    after it inherit it through their parent.

    Attributes:
        cache_salt: Requests share blocks only with requests of the same salt; it
            must come from the trusted side. None and "" are different salts.
        lora_name: The adapter, with its revision.
        multimodal: Sorted on construction, so the order of listing does not matter.
    """

    cache_salt: str | None = None
    lora_name: str | None = None
    multimodal: tuple[MultimodalItem, ...] = ()

    def __post_init__(self) -> None:
        for name in ("cache_salt", "lora_name"):
            if getattr(self, name) is not None:
                _check_type(name, getattr(self, name), str)
        for item in self.multimodal:
            _check_type("multimodal item", item, MultimodalItem)
        items = sorted(self.multimodal, key=lambda i: (i.offset, i.content_hash))
        object.__setattr__(self, "multimodal", tuple(items))


NO_EXTRAS = Extras()


class KeyedBlock(NamedTuple):
    """A key, and what it was made of.

    Attributes:
        key: The block's key.
        parent: The key of the block before; None for a request's first block.
        tokens: The block's tokens, u32 each, little-endian.
        group: Which group of layers.
        extras: What the request adds. Multimodal items are those that begin in the
            block, and their offsets count from its start.
    """

    key: BlockKey
    parent: BlockKey | None
    tokens: bytes
    group: int = 0
    extras: Extras = NO_EXTRAS


def encode_block(
    namespace: Namespace,
    group: int,
    parent: BlockKey | None,
    tokens: TokenIds,
    extras: Extras = NO_EXTRAS,
) -> bytes:
    """Encode one full block so that it can be read back in one way only.

    Args:
        namespace: What all blocks share.
        group: Which group of layers, for models that have several; else 0.
        parent: The key of the block before, None for a request's first block.
        tokens: int[block_size]. The block's tokens.
        extras: What this request adds. Here, where there is only one block, the
            offset of a multimodal item counts from the start of the block.

    Returns:
        The encoding that `block_key` hashes.

    Raises:
        ValueError: If `tokens` is not one block, or a number is out of range.
        TypeError: If a token is not an integer.

    Example:
        >>> namespace = Namespace("m", "0", "int8", "flat", 2)
        >>> encode_block(namespace, 0, None, [7, 258])[-8:].hex(" ", 4)
        '07000000 02010000'
    """
    token_bytes = _token_bytes(tokens)
    if len(token_bytes) != TOKEN_BYTES * namespace.block_size:
        raise ValueError(
            f"{len(tokens)=} must be the block size, {namespace.block_size}."
        )
    for item in extras.multimodal:
        if item.offset >= namespace.block_size:
            raise ValueError(f"{item.offset=} must be below {namespace.block_size}.")
    if parent is not None and len(parent) != KEY_BYTES:
        raise ValueError(f"{parent=} must be a key of {KEY_BYTES} bytes.")
    return (
        _encode_constant(namespace, group, extras)
        + _encode_parent(parent)
        + _encode_items(extras)
        + _field(_Tag.TOKENS, token_bytes)
    )


def block_key(
    namespace: Namespace,
    group: int,
    parent: BlockKey | None,
    tokens: TokenIds,
    extras: Extras = NO_EXTRAS,
) -> BlockKey:
    """Make the key of one full block; arguments as for `encode_block`.

    Example:
        >>> namespace = Namespace("m", "0", "int8", "flat", 2)
        >>> block_key(namespace, 0, None, [7, 258]).hex()[:16]
        '5a7874d331002a1c'
    """
    encoding = encode_block(namespace, group, parent, tokens, extras)
    return hashlib.sha256(encoding).digest()


class KeyChain:
    """The keys of one request's full blocks, made as its tokens arrive.

    Holds the tokens of the block that is not yet full, and keys only for the others.

    Args:
        namespace: What all blocks share.
        extras: What this request adds.
        group: Which group of layers.
        record: Called with every block that gets a key (`jaxkv.observe.catalog`).

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
        self._block_bytes = TOKEN_BYTES * namespace.block_size
        self._tokens_head = _head(_Tag.TOKENS, self._block_bytes)
        # All that is the same in each block is hashed here, once.
        self._constant = hashlib.sha256(_encode_constant(namespace, group, extras))
        self._group, self._record = group, record
        self._plain = dataclasses.replace(extras, multimodal=())
        # What differs, by the block in which items begin; offsets from its start.
        self._special: dict[int, Extras] = {}
        for item in extras.multimodal:
            block, offset = divmod(item.offset, namespace.block_size)
            before = self._special.get(block, self._plain)
            items = *before.multimodal, dataclasses.replace(item, offset=offset)
            self._special[block] = dataclasses.replace(extras, multimodal=items)
        self._keys: list[BlockKey] = []
        self._tail = b""  # tokens of the block that is not yet full

    @property
    def keys(self) -> Sequence[BlockKey]:
        """All keys so far: not a copy, it grows with the chain."""
        return self._keys

    @property
    def num_tokens(self) -> int:
        """Tokens so far, those of the block that is not yet full included."""
        return (len(self._keys) * self._block_bytes + len(self._tail)) // TOKEN_BYTES

    def extend(self, tokens: TokenIds) -> list[BlockKey]:
        """Append tokens, and make the keys of the blocks that become full by them.

        Args:
            tokens: int[n]. A list, a tuple or an array is the fast way in.

        Returns:
            The new keys, perhaps none; `keys` has them too.

        Raises:
            ValueError: If a token is out of range; the chain is as before.
            TypeError: If a token is not an integer; the chain is as before.
        """
        data = self._tail + _token_bytes(tokens)
        stop = len(data) - len(data) % self._block_bytes
        parent = self._keys[-1] if self._keys else None
        for start in range(0, stop, self._block_bytes):
            own = data[start : start + self._block_bytes]
            extras = self._special.get(len(self._keys), self._plain)
            hasher = self._constant.copy()
            hasher.update(
                _encode_parent(parent) + _encode_items(extras) + self._tokens_head + own
            )
            key = hasher.digest()
            if self._record is not None:
                self._record(KeyedBlock(key, parent, own, self._group, extras))
            self._keys.append(key)
            parent = key
        self._tail = data[stop:]
        return self._keys[len(self._keys) - stop // self._block_bytes :]


def _encode_constant(namespace: Namespace, group: int, extras: Extras) -> bytes:
    """Encode the fields that are the same in every block of a request."""
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


def _encode_parent(parent: BlockKey | None) -> bytes:
    return b"" if parent is None else _PARENT_HEAD + parent


def _encode_items(extras: Extras) -> bytes:
    """Encode the items of a block, whose offsets count from its start."""
    return b"".join(
        _field(_Tag.ITEM, struct.pack("<Q", item.offset) + item.content_hash)
        for item in extras.multimodal
    )


def _token_bytes(tokens: TokenIds) -> bytes:
    """Return `tokens` as little-endian u32, without work in Python for each."""
    if isinstance(tokens, list | tuple | range):
        try:
            packed = array("I", tokens)
        except (OverflowError, TypeError):
            raise _token_error(tokens) from None
        if sys.byteorder == "big":
            packed.byteswap()
        return packed.tobytes()
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
    """Say which token is at fault."""
    for i, token in enumerate(tokens):
        try:
            inside = 0 <= operator.index(token) < 1 << 32
        except TypeError:
            return TypeError(f"tokens[{i}]={token!r} must be an integer.")
        if not inside:
            return ValueError(f"tokens[{i}]={token!r} must be in [0, 2**32).")
    raise AssertionError("no token is at fault")
