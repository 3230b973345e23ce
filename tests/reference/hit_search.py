"""A plain-Python twin of how vLLM 0.19.1 finds the longest cached prefix.

Written from a description of its behaviour. Every kind of attention has its own rule
for which blocks a prefix needs; several kinds have to agree on one length. Each group
has a list of keys at its own block size. `cached` is a function from key to block or
None, such as `BlockPool.get_cached_block`.
"""

from math import lcm

from jaxkv.search.groups import ChunkedLocal, FullAttention, Mamba, SlidingWindow


def cdiv(a, b):
    return -(-a // b)


def is_full(spec):
    return isinstance(spec, FullAttention)


def find_longest_cache_hit(specs, keys_by_group, cached, max_length):
    """Find how many tokens of a prefix are cached for all groups."""
    parts = {}  # Groups of equal description are searched together.
    for group, spec in enumerate(specs):
        parts.setdefault(spec, []).append(group)
    ordered = sorted(parts, key=lambda spec: not is_full(spec))
    alignment = lcm(*(spec.block_size for spec in specs))
    single_pass = len(parts) == 1 or (len(parts) == 2 and is_full(ordered[0]))
    found = {}
    length = max_length
    while True:
        shorter = length
        for spec in ordered:
            if is_full(spec) and spec in found:  # A part of a hit is one too.
                shorter -= shorter % spec.block_size
                continue
            num = shorter // spec.block_size
            rows = zip(*(keys_by_group[g][:num] for g in parts[spec]), strict=True)
            search = _SEARCHES[type(spec)]
            found[spec] = search(spec, list(rows), cached, shorter, alignment)
            shorter = len(found[spec]) * spec.block_size
        is_fixed, length = shorter == length, shorter
        if is_fixed or single_pass:
            break
    blocks = [[] for _ in specs]
    for spec, groups in parts.items():
        num = length // spec.block_size
        for column, group in enumerate(groups):
            blocks[group] = [row and row[column] for row in found[spec][:num]]
    return length, blocks


def _row(keys, cached):
    """The blocks of one position in all groups, or None if one of them lacks it."""
    row = [cached(key) for key in keys]
    return None if None in row else row


def _is_aligned(num_blocks, spec, alignment):
    return num_blocks * spec.block_size % alignment == 0


def _full(spec, rows, cached, max_length, alignment):
    del max_length
    found = []
    for keys in rows:
        row = _row(keys, cached)
        if row is None:
            break
        found.append(row)
    while not _is_aligned(len(found), spec, alignment):
        found.pop()
    return found


def _sliding_window(spec, rows, cached, max_length, alignment):
    """From the right, the first run that covers what the next token looks back on."""
    del max_length
    needed = cdiv(spec.window - 1, spec.block_size)
    found = [None] * len(rows)
    run = 0
    for i in reversed(range(len(rows))):
        row = _row(rows[i], cached)
        if row is None:
            run = 0
        elif run or _is_aligned(i + 1, spec, alignment):
            found[i] = row
            run += 1
            if run >= needed:
                return found[: i + run]
    # What is left begins at block 0, with no token before it to look back on.
    while not _is_aligned(run, spec, alignment):
        run -= 1
    return found[:run]


def _chunked_local(spec, rows, cached, max_length, alignment):
    """From the left, beginning with the chunk that the next token is in."""
    assert spec.block_size == alignment, "chunks beside other block sizes"
    start = max_length // spec.chunk * spec.chunk // spec.block_size
    found = [None] * start
    for keys in rows[start:]:
        row = _row(keys, cached)
        if row is None:
            break
        found.append(row)
    return found


def _mamba(spec, rows, cached, max_length, alignment):
    """From the right, the first state; those before it are not needed."""
    del max_length
    for i in reversed(range(len(rows))):
        if _is_aligned(i + 1, spec, alignment):
            row = _row(rows[i], cached)
            if row is not None:
                return [None] * i + [row]
    return []


_SEARCHES = {
    FullAttention: _full,
    SlidingWindow: _sliding_window,
    ChunkedLocal: _chunked_local,
    Mamba: _mamba,
}
