"""A synthetic trace: conversations, and documents that are asked about once."""

from __future__ import annotations

import itertools

import numpy as np

from jaxkv.tools.replay.traces import BLOCK_SIZE, Trace, make_trace

_SYSTEM_PROMPTS, _SYSTEM_BLOCKS = 8, 6  # System prompts, and blocks of each
_MEAN_TURNS, _MEAN_GAP_MS = 5.0, 300.0
# Of the requests, and their new blocks in those of a turn: a policy must resist them.
_ONE_OFF_SHARE, _ONE_OFF_TURNS = 0.5, 3.0


def make_synthetic_trace(
    num_requests: int,
    seed: int = 0,
    *,
    turn_blocks: float = 8.0,
    max_open: int = 200,
    block_size: int = BLOCK_SIZE,
) -> Trace:
    """Make a trace. Equal arguments give an equal trace.

    Half of the requests ask about a document that never returns. The others begin a
    conversation, or continue an open one, drawn by Zipf's law from the most recent to
    the oldest. A prompt is a system prompt, drawn by Zipf's law, the conversation so
    far, and new blocks.

    >>> trace = make_synthetic_trace(100, seed=1)
    >>> trace.num_requests, trace.num_block_refs > trace.num_unique_blocks
    (100, True)
    """
    rng = np.random.default_rng(seed)
    popularity, recency = _zipf_cdf(_SYSTEM_PROMPTS), _zipf_cdf(max_open)
    fresh = itertools.count(_SYSTEM_PROMPTS * _SYSTEM_BLOCKS)
    open_: list[list[int]] = []  # the latest last
    requests, input_tokens = [], []
    for _ in range(num_requests):
        rank = int(np.searchsorted(recency, rng.random()))
        is_one_off = rng.random() < _ONE_OFF_SHARE
        if is_one_off or rng.random() * _MEAN_TURNS < 1 or rank >= len(open_):
            prompt = int(np.searchsorted(popularity, rng.random()))
            first = prompt * _SYSTEM_BLOCKS
            said = list(range(first, first + _SYSTEM_BLOCKS))
        else:
            said = open_.pop(-1 - rank)
        mean_new = turn_blocks * (_ONE_OFF_TURNS if is_one_off else 1)
        num_new = int(rng.geometric(1 / mean_new))
        said = said + list(itertools.islice(fresh, num_new))
        if not is_one_off:
            open_ = [*open_, said][-max_open:]
        requests.append(said)
        input_tokens.append(len(said) * block_size + int(rng.integers(block_size)))
    time_ms = np.cumsum(rng.exponential(_MEAN_GAP_MS, num_requests))
    return make_trace(
        f"synthetic, {num_requests:,} requests, seed {seed}",
        requests,
        time_ms,
        input_tokens,
        block_size,
    )


def _zipf_cdf(num: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return the CDF of ranks 0 to num - 1, with probabilities as 1 / (rank + 1)."""
    chances = 1 / np.arange(1, num + 1)
    cdf = np.cumsum(chances)
    # Exactly 1 at the end, so that every random number below 1 has a rank.
    cdf /= cdf[-1]
    return cdf
