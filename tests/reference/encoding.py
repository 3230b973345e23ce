"""Reads block encodings back: a parser that shares nothing with `jaxkv.keys.hashing`.

If every encoding can be read back to the inputs that it was made from, no two
inputs have the same one.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from jaxkv.keys.hashing import Extras, MultimodalItem, Namespace

FORMAT, SALT, LORA, PARENT, ITEM, TOKENS = 1, 8, 9, 10, 11, 12
NAMESPACE_AND_GROUP = range(2, 8)


class Decoded(NamedTuple):
    """The inputs of a block's encoding."""

    namespace: Namespace
    group: int
    parent: bytes | None
    tokens: list[int]
    extras: Extras


def split_fields(encoding: bytes) -> list[tuple[int, bytes]]:
    """Cut an encoding into (tag, payload); ValueError if it does not come out even."""
    fields, at = [], 0
    while at < len(encoding):
        if at + 9 > len(encoding):
            raise ValueError(f"{at=}: a field's head is cut off")
        tag, length = struct.unpack_from("<BQ", encoding, at)
        at += 9
        if at + length > len(encoding):
            raise ValueError(f"{at=}: a field's payload is cut off")
        fields.append((tag, encoding[at : at + length]))
        at += length
    return fields


def decode_block(encoding: bytes) -> Decoded:
    """Read back what a block was encoded from; ValueError if it is no encoding."""
    fields = split_fields(encoding)

    def take(tag: int) -> bytes:
        if not fields or fields[0][0] != tag:
            raise ValueError(f"{tag=} is not next in {fields}")
        return fields.pop(0)[1]

    def take_if_present(tag: int) -> bytes | None:
        return take(tag) if fields and fields[0][0] == tag else None

    if take(FORMAT) != b"jaxkv block 1":
        raise ValueError("not a block")
    *texts, block_size, group = map(take, NAMESPACE_AND_GROUP)
    salt, lora, parent = map(take_if_present, (SALT, LORA, PARENT))
    items = []
    while (item := take_if_present(ITEM)) is not None:
        items.append(MultimodalItem(item[8:], struct.unpack("<Q", item[:8])[0]))
    tokens = take(TOKENS)
    if fields:
        raise ValueError(f"{fields} are left over")
    return Decoded(
        Namespace(*map(_text, texts), *struct.unpack("<I", block_size)),
        *struct.unpack("<I", group),
        parent,
        [token for (token,) in struct.iter_unpack("<I", tokens)],
        Extras(_text(salt), _text(lora), tuple(items)),
    )


def _text(payload: bytes | None) -> str | None:
    return None if payload is None else payload.decode("utf-8", "surrogatepass")
