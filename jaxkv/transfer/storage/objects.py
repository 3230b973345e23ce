"""The format of an object: a header, and the payload of one shard of a block.

A header is `HEADER_BYTES` long, its numbers little-endian:

    offset  bytes
         0      8  magic: 6a 61 78 6b 76 0d 0a 1a ("jaxkv" and bytes that text
                   modes change)
         8      2  version of the format, 1
        10      2  seal: 1 XXH3-64, 2 HMAC-SHA256
        12      4  bytes of the header, 192
        16     32  key of the block
        48     32  SHA-256 of the namespace
        80     32  SHA-256 of the layout: dtypes and shapes
       112      4  shard
       116      4  shards
       120      8  bytes of the payload, which follows the header
       128     32  zeros
       160     32  the seal: the XXH3-64 of the payload (padded with zeros to 256
                   bytes if it has up to 240), and 24 zeros; or the HMAC-SHA256 of the
                   header before it and the payload, with the SHA-256 of
                   "jaxkv storage secret 1:" and the secret as its key

An object is valid if its header equals, byte for byte, the one that its reader would
have written for this payload under this key. Everything else is refused.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
import xxhash
from numpy.typing import NDArray

from jaxkv._util import check_type, check_whole, shown
from jaxkv.transfer.storage.census import Bound
from jaxkv.transfer.storage.store import Piece
from jaxkv.types import KEY_BYTES, BlockKey

MAGIC = b"jaxkv\r\n\x1a"
VERSION = 1
HEADER_BYTES = 192
MIN_SECRET_BYTES = 16

RefusalReason: TypeAlias = Literal[
    "torn",
    "foreign",
    "version",
    "namespace",
    "layout",
    "shard",
    "key",
    "unsealed",
    "checksum",
    "forged",
]
"""Why an object is refused.

``torn``: it is cut. ``foreign``: jaxkv did not write it. ``version``: it has another
format. ``namespace``, ``layout``, ``shard``, ``key``: another block has this name.
``unsealed``: it has another kind of seal. ``checksum``: its bytes changed. ``forged``:
its bytes changed, or it was written without the secret.
"""
REFUSAL_REASONS: tuple[RefusalReason, ...] = get_args(RefusalReason)

_XXH3, _HMAC = 1, 2
_SEALED = struct.Struct("<8sHHI32s32s32sIIQ32x")
_SEAL_BYTES = 32
# XXH3 has another algorithm for shorter data, which existing stores do not use.
_MIN_BYTES = 241
_PADDED_BYTES = 256
# Reasons of refusals, by index of a field in `_SEALED`. Fields that determine the
# meaning of others come first, the key last.
_REASONS: Sequence[tuple[int, RefusalReason]] = (
    *((1, "version"), (3, "version"), (2, "unsealed"), (5, "namespace")),
    *((6, "layout"), (9, "layout"), (7, "shard"), (8, "shard"), (4, "key")),
)
ORDER_NAME = "order"
ROOT = f"jaxkv{VERSION}"  # The folder of all namespaces
BLOCK_NAME = re.compile(r"([0-9a-f]{2})/(\1[0-9a-f]{62})\.(0|[1-9][0-9]{0,8})")
LABEL_NAME = re.compile(r"label\.((?:[0-9a-f]{2}){1,100})")
BOUND_NAME = re.compile(r"(bound|owner)\.([1-9][0-9]{0,17})\.([0-9a-f]{16})")

Bytes: TypeAlias = bytes | bytearray | memoryview | NDArray[Any]
"""The types of a payload's pieces."""


class Refusal(NamedTuple):
    """The result of decoding an object that is not valid."""

    reason: RefusalReason
    is_ours: bool  # Whether jaxkv wrote it, so that it may be deleted


def object_bytes_of(header: Piece) -> int | None:
    """Return the bytes of an object by its header; None for other objects."""
    if len(header) < HEADER_BYTES or header[: len(MAGIC)] != MAGIC:
        return None
    return HEADER_BYTES + int(_SEALED.unpack_from(header)[-1])


class ObjectFormat:
    """Encodes and decodes the objects of one shard of one pool.

    `namespace` is what all blocks depend on besides their tokens, in an encoding that
    is equal in every process. `layout` describes the dtypes and shapes of a payload in
    the caller's words. A `secret` of at least `MIN_SECRET_BYTES`, not counting white
    space around it, seals objects against other writers; None seals them against
    accidents only.
    """

    def __init__(
        self,
        namespace: bytes,
        layout: str,
        payload_bytes: int,
        *,
        shard: int = 0,
        num_shards: int = 1,
        secret: str | bytes | None = None,
    ) -> None:
        check_whole(1, (1 << 63) - 1, payload_bytes=payload_bytes)
        check_type(str, "a text", layout=layout)
        check_whole(0, shard=shard, num_shards=num_shards)
        if not 0 <= shard < num_shards < 1 << 32:
            raise ValueError(f"{shard=} must be in [0, num_shards={num_shards}).")
        self.payload_bytes = payload_bytes
        self.shard = shard
        self.num_shards = num_shards
        self._namespace = hashlib.sha256(namespace).digest()
        self._layout = hashlib.sha256(layout.encode()).digest()
        self._secret = _secret_key(secret)
        self._seal = _XXH3 if self._secret is None else _HMAC
        # Objects that this format cannot use are in other folders. So an invalid object
        # in this folder is damaged, and may be deleted.
        identity = hashlib.sha256(self._sealed(bytes(KEY_BYTES), shard=0))
        if self._secret is not None:
            identity.update(
                hmac.digest(self._secret, b"jaxkv storage folder", "sha256")
            )
        self._folder = f"{ROOT}/{identity.hexdigest()[:32]}"

    @property
    def folder(self) -> str:
        """The folder of all objects that this format can read, of every shard."""
        return self._folder

    @property
    def object_bytes(self) -> int:
        """Bytes of an object: header and payload."""
        return HEADER_BYTES + self.payload_bytes

    def name(self, key: BlockKey) -> str:
        """Name the object of this shard of a block."""
        return self.name_of(key, self.shard)

    def all_names(self, key: BlockKey) -> list[str]:
        """Name the objects of all shards of a block."""
        return [self.name_of(key, shard) for shard in range(self.num_shards)]

    def keys_of(self, names: Iterable[str]) -> tuple[list[BlockKey], list[int]]:
        """Return the keys and shards of this folder's blocks among names."""
        pairs = [match.group(2, 3) for match in self._matches(BLOCK_NAME, names)]
        raw = bytes.fromhex("".join([text for text, _ in pairs]))
        keys = [raw[at : at + KEY_BYTES] for at in range(0, len(raw), KEY_BYTES)]
        return keys, [int(shard) for _, shard in pairs]

    def bound_name(self, bound: Bound) -> str:
        """Name the object that records a bound in its name.

        Two engines that record theirs at once therefore leave both. With a secret, only
        its holders can record a bound.
        """
        text = f"{'owner' if bound.is_owners else 'bound'}.{bound.num_blocks}"
        seal = hmac.digest(self._secret or b"jaxkv", text.encode(), "sha256")
        return f"{self._folder}/{text}.{seal.hex()[:16]}"

    def bounds_of(self, names: Iterable[str]) -> list[Bound]:
        """Return the recorded bounds among names."""
        bounds = []
        for match in self._matches(BOUND_NAME, names):
            bound = Bound(int(match[2]), match[1] == "owner")
            if hmac.compare_digest(self.bound_name(bound), match.string):
                bounds.append(bound)
        return bounds

    def label_name(self, label: str) -> str:
        """Name the object whose name has the first 100 bytes of a label for people."""
        return f"{self._folder}/label.{label.encode()[:100].hex()}"

    def _matches(
        self, pattern: re.Pattern[str], names: Iterable[str]
    ) -> Iterator[re.Match[str]]:
        """Match the part of each name after the folder."""
        start = len(self._folder) + 1
        for name in names:
            if name.startswith(self._folder):
                match = pattern.fullmatch(name, start)
                if match:
                    yield match

    @property
    def order_name(self) -> str:
        """Name the object that records an order of the blocks."""
        return f"{self._folder}/{ORDER_NAME}"

    def check(self, key: BlockKey, payload: Sequence[Bytes]) -> None:
        """Refuse what `encode` would refuse, without reading the bytes."""
        _checked(key)
        self._check_size(sum(map(_num_bytes, payload)))

    def encode(self, key: BlockKey, payload: Sequence[Bytes]) -> list[Piece]:
        """Return the pieces of an object: a header, then views of the payload.

        Only pieces that are not contiguous are copied. ValueError: the payload does not
        have `payload_bytes`, or the key not 32.
        """
        pieces = [as_bytes(piece) for piece in payload]
        self._check_size(sum(map(len, pieces)))
        return [self._header(_checked(key), pieces), *pieces]

    def decode(self, key: BlockKey, data: Piece) -> memoryview | Refusal:
        """Check the bytes of an object; return a view of its payload, or a refusal."""
        view = memoryview(data)
        payload = view[HEADER_BYTES:]
        if len(payload) == self.payload_bytes:
            header = self._header(_checked(key), [payload])
            if hmac.compare_digest(header, view[:HEADER_BYTES]):
                return payload
        return self._refuse(_checked(key), view)

    def _refuse(self, key: BlockKey, view: memoryview) -> Refusal:
        start = bytes(view[: len(MAGIC)])
        if start != MAGIC:
            is_cut = MAGIC.startswith(start)
            return Refusal("torn" if is_cut else "foreign", is_cut)
        if len(view) < HEADER_BYTES:
            return Refusal("torn", True)
        actual = _SEALED.unpack_from(view)
        expected = _SEALED.unpack(self._sealed(key))
        for field, reason in _REASONS:
            if actual[field] != expected[field]:
                return Refusal(reason, True)
        if len(view) < HEADER_BYTES + self.payload_bytes:
            return Refusal("torn", True)
        return Refusal("checksum" if self._secret is None else "forged", True)

    def name_of(self, key: BlockKey, shard: int) -> str:
        """Name the object of any shard of a block."""
        text = _checked(key).hex()
        return f"{self._folder}/{text[:2]}/{text}.{shard}"

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes != self.payload_bytes:
            raise ValueError(
                f"a payload of {num_bytes} bytes must have {self.payload_bytes}."
            )

    def _sealed(self, key: BlockKey, shard: int | None = None) -> bytes:
        """Return the header before the seal."""
        return _SEALED.pack(
            MAGIC,
            VERSION,
            self._seal,
            HEADER_BYTES,
            key,
            self._namespace,
            self._layout,
            self.shard if shard is None else shard,
            self.num_shards,
            self.payload_bytes,
        )

    def _header(self, key: BlockKey, payload: Sequence[Piece]) -> bytes:
        sealed = self._sealed(key)
        if self._secret is None:
            return sealed + checksum(payload).to_bytes(8, "little").ljust(
                _SEAL_BYTES, b"\0"
            )
        code = hmac.new(self._secret, sealed, hashlib.sha256)
        for piece in payload:
            code.update(piece)
        return sealed + code.digest()


def checksum(pieces: Sequence[Piece]) -> int:
    """Return the XXH3-64 of a payload, padded with zeros to 256 bytes if below 241.

    The GIL is released meanwhile.
    """
    total = xxhash.xxh3_64()
    for piece in pieces:
        total.update(piece)
    num_bytes = sum(map(len, pieces))
    if num_bytes < _MIN_BYTES:
        total.update(bytes(_PADDED_BYTES - num_bytes))
    return total.intdigest()


def as_bytes(data: Bytes) -> memoryview:
    """View data as bytes; copy it only if it is not contiguous."""
    if isinstance(data, np.ndarray):
        # The buffer protocol does not support bfloat16.
        return np.ascontiguousarray(data).reshape(-1).view(np.uint8).data
    return memoryview(data).cast("B")


def _num_bytes(data: Bytes) -> int:
    return len(data) if isinstance(data, bytes | bytearray) else data.nbytes


def _secret_key(secret: str | bytes | None) -> bytes | None:
    if secret is None:
        return None
    if not isinstance(secret, str | bytes):  # The message must not contain it.
        raise TypeError("storage_secret must be a str, bytes or None.")
    # Files with secrets often end in a newline.
    raw = secret.strip().encode() if isinstance(secret, str) else secret.strip()
    if len(raw) < MIN_SECRET_BYTES:
        # The message must not contain the value: it may be logged.
        raise ValueError(
            f"storage_secret has {len(raw)} bytes and must have at least "
            f"{MIN_SECRET_BYTES}."
        )
    return hashlib.sha256(b"jaxkv storage secret 1:" + raw).digest()


def _checked(key: BlockKey) -> BlockKey:
    if len(key) != KEY_BYTES:
        raise ValueError(f"key={shown(key)} must have {KEY_BYTES} bytes.")
    return key
