"""The vocabulary of jaxkv: dimension letters and sentinels.

Letters used in shape descriptions, everywhere:

    K   keys or block ids in one call, perhaps padded
    B   blocks of one tier (device or host)
    E   entries that a policy knows (at least B; more where ghosts are kept)
    L   positions in a recency log

An array entry in a docstring begins with its ``dtype[shape]``; quantities carry
their unit in the name (``host_bytes``, ``wall_s``).
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

BlockKey: TypeAlias = bytes
"""Names a block by its content. `jaxkv.keys` makes keys of `KEY_BYTES`."""

PyTree: TypeAlias = Any
"""A nest of containers with arrays at the leaves, as JAX understands it."""

KEY_BYTES = 32
KEY_WORDS = 8
"""A key on the array side is uint32[KEY_WORDS], compared in full."""

NO_BLOCK = -1
"""The block id that stands for "none"; never an index."""

NULL_BLOCK = 0
"""The device block that is never allocated: engines point unused entries of block
tables at it."""

NOT_READY = -1
"""The reference count of a host block whose bytes have not arrived."""

Stop: TypeAlias = Literal["tool_use", "end_turn"]
"""Why a request stopped, which predicts when its prefix will be used again: it called a
tool, whose result will come soon, or it answered a person."""

STOPS: tuple[Stop | None, ...] = (None, "tool_use", "end_turn")
"""On the array side, a stop is its index here; None if it is not known."""
