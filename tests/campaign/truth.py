"""The right bytes of KV, derived from their inputs and not from a key.

The bytes of a token depend on the weights, the request's salt and adapter, and all
tokens and items up to it. Nothing here comes from the library: two requests whose keys
are the same although their KV is not would show.
"""

import functools
import hashlib

import numpy as np

from jaxkv import ChunkedLocal, FullAttention, Mamba, SlidingWindow

BLOCK_ROWS = 8  # of a block of any group; a token of a smaller block has several
ROW_BYTES = 48


def start(weights, extras):
    text = repr((weights, extras.cache_salt, extras.lora_name))
    return hashlib.sha256(text.encode()).digest()


def extend(digest, token, items):
    """The digest after a token; `items` are those that begin at it."""
    text = repr((digest, token, [item.content_hash for item in items]))
    return hashlib.sha256(text.encode()).digest()


@functools.lru_cache(1 << 16)
def rows(digest, group, num_rows):
    """Bytes of a token, or of a state: uint8[num_rows, ROW_BYTES]."""
    raw = hashlib.shake_128(digest + bytes([group])).digest(num_rows * ROW_BYTES)
    return np.frombuffer(raw, np.uint8).reshape(num_rows, ROW_BYTES)


def first_token_read(spec, num_tokens):
    """The first token that the token after `num_tokens` reads."""
    match spec:
        case FullAttention():
            return 0
        case SlidingWindow():
            return max(num_tokens - spec.window + 1, 0)
        case ChunkedLocal():
            return num_tokens // spec.chunk * spec.chunk
        case Mamba():
            return max(num_tokens - 1, 0)


def first_block_read(spec, num_tokens):
    return first_token_read(spec, num_tokens) // spec.block_size


def part(spec, group, digests, block, first, end):
    """Return the rows and bytes of a request's tokens `first` to `end` in a block.

    The rows are bool[BLOCK_ROWS], the bytes uint8[BLOCK_ROWS, ROW_BYTES]; `digests` are
    those after 0, 1, 2, ... tokens.
    """
    if isinstance(spec, Mamba):
        # The state after the last token takes the place of those before.
        return np.ones(BLOCK_ROWS, bool), rows(digests[end], group, BLOCK_ROWS)
    per_token = BLOCK_ROWS // spec.block_size
    is_meant = np.zeros(BLOCK_ROWS, bool)
    values = np.zeros((BLOCK_ROWS, ROW_BYTES), np.uint8)
    for token in range(first, end):
        row = (token - block * spec.block_size) * per_token
        is_meant[row : row + per_token] = True
        values[row : row + per_token] = rows(digests[token + 1], group, per_token)
    return is_meant, values
