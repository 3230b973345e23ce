"""The blocks a token reads, and the longest cached prefix, by definition."""

from jaxkv.search.groups import ChunkedLocal, FullAttention, Mamba, SlidingWindow


def first_read(spec, num_tokens):
    match spec:
        case FullAttention():
            return 0
        case SlidingWindow(block_size, window):
            return max(num_tokens - window + 1, 0) // block_size
        case ChunkedLocal(block_size, chunk):
            return num_tokens // chunk * chunk // block_size
        case Mamba(block_size):
            return max(num_tokens - 1, 0) // block_size


def longest_prefix(specs, counts, has, max_tokens, step):
    """Return the longest prefix whose next token can read its blocks in every group."""
    for num_tokens in range(max(max_tokens, 0) // step * step, 0, -step):
        if all(
            num_tokens // spec.block_size <= counts[g]
            and all(
                has(g, index)
                for index in range(
                    first_read(spec, num_tokens), num_tokens // spec.block_size
                )
            )
            for g, spec in enumerate(specs)
        ):
            return num_tokens
    return 0
