"""A plain-Python twin of how vLLM 0.19.1 finds the longest cached prefix.

Written from a description of its behaviour. Every kind of attention has its own rule
for the blocks a prefix needs; several kinds must agree on one length. Each group
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
    groups_of = {}  # Groups of equal description are searched together.
    for group, spec in enumerate(specs):
        groups_of.setdefault(spec, []).append(group)
    ordered = sorted(groups_of, key=lambda spec: not is_full(spec))
    alignment = lcm(*(spec.block_size for spec in specs))
    single_pass = len(groups_of) == 1 or (len(groups_of) == 2 and is_full(ordered[0]))
    hits = {}
    length = max_length
    while True:
        shorter = length
        for spec in ordered:
            if is_full(spec) and spec in hits:  # A part of a hit is one too.
                shorter -= shorter % spec.block_size
                continue
            num = shorter // spec.block_size
            rows = zip(*(keys_by_group[g][:num] for g in groups_of[spec]), strict=True)
            search = _SEARCHES[type(spec)]
            hits[spec] = search(spec, list(rows), cached, shorter, alignment)
            shorter = len(hits[spec]) * spec.block_size
        is_fixed, length = shorter == length, shorter
        if is_fixed or single_pass:
            break
    blocks = [[] for _ in specs]
    for spec, groups in groups_of.items():
        num = length // spec.block_size
        for column, group in enumerate(groups):
            blocks[group] = [row and row[column] for row in hits[spec][:num]]
    return length, blocks


def _row(keys, cached):
    """Return the blocks of one position in all groups; None if a group misses it."""
    row = [cached(key) for key in keys]
    return None if None in row else row


def _is_aligned(num_blocks, spec, alignment):
    return num_blocks * spec.block_size % alignment == 0


def _full(spec, rows, cached, max_length, alignment):
    del max_length
    hit = []
    for keys in rows:
        row = _row(keys, cached)
        if row is None:
            break
        hit.append(row)
    while not _is_aligned(len(hit), spec, alignment):
        hit.pop()
    return hit


def _sliding_window(spec, rows, cached, max_length, alignment):
    """From the right, the first run that covers what the next token looks back on."""
    del max_length
    needed = cdiv(spec.window - 1, spec.block_size)
    hit = [None] * len(rows)
    run = 0
    for i in reversed(range(len(rows))):
        row = _row(rows[i], cached)
        if row is None:
            run = 0
        elif run or _is_aligned(i + 1, spec, alignment):
            hit[i] = row
            run += 1
            if run >= needed:
                return hit[: i + run]
    # What is left begins at block 0, with no token before it to look back on.
    while not _is_aligned(run, spec, alignment):
        run -= 1
    return hit[:run]


def _chunked_local(spec, rows, cached, max_length, alignment):
    """From the left, beginning with the chunk that the next token is in."""
    assert spec.block_size == alignment, "chunks beside other block sizes"
    start = max_length // spec.chunk * spec.chunk // spec.block_size
    hit = [None] * start
    for keys in rows[start:]:
        row = _row(keys, cached)
        if row is None:
            break
        hit.append(row)
    return hit


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
