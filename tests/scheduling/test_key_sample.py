"""A sample of keys stands for all of them."""

import itertools
import random

import numpy as np
import pytest

from jaxkv.keys.packed import PackedKeys, key_from_int, keys_to_words
from jaxkv.scheduling.rules import parse_shadows
from jaxkv.scheduling.whatif.key_sample import KeySample
from jaxkv.scheduling.whatif.shadows import Shadows

HEAD = [key_from_int(number) for number in range(40)]


def some_keys(seed, num):
    rng = random.Random(seed)
    return [rng.randbytes(32) for _ in range(num)]


def chats(num, seed=0):
    """Chats that all begin alike, and come back with a longer prompt."""
    rng = random.Random(seed)
    running = []
    for _ in range(num):
        if len(running) < 150 or rng.random() < 0.2:
            running.append(HEAD[: rng.choice((6, 6, 40))])
        number = min(int(rng.expovariate(0.02)), len(running) - 1)
        chat = running.pop(-1 - number)
        chat = chat + [rng.randbytes(32) for _ in range(rng.randrange(1, 30))]
        running.append(chat)
        yield PackedKeys(chat, keys_to_words(chat))


def count_found(policy, num_blocks, bits, requests):
    """Count what a shadow finds that sees one key in ``2**bits``."""
    shadows = Shadows(parse_shadows(f"{policy}*1"), num_blocks, 16, sample_bits=bits)
    for number, keys in enumerate(requests):
        name, num = f"{number}", len(keys)
        shadows.look_up(name, keys, 0, num)
        begun = name, keys, 16 * num, 1000 * number
        shadows.begin(*begun, has_lookup=True, has_load=False)
        shadows.offer(name, keys, num, (), None)
        shadows.offer(name, keys, num, (), None, is_end=True)
        shadows.finish(name, keys, 1000 * number, None, None)
        shadows.forget(name)
    (count,) = shadows.counts
    return count


@pytest.mark.parametrize("policy", ["lru", "hazard"])
def test_a_sample_estimates_the_hits_of_all_keys(policy):
    counts = []
    for bits in (0, 4):
        counts.append(count_found(policy, 1500, bits, chats(3000)))
    exact, sampled = counts
    error = sampled.error_tokens / sampled.num_asked_tokens
    assert 0.2 < exact.share < 0.9
    assert abs(sampled.share - exact.share) < 0.015
    assert 0.001 < error < 0.02
    for word in ("num_asked_tokens", "num_loads", "num_stored", "num_evicted"):
        ratio = getattr(sampled, word) / getattr(exact, word)
        assert ratio == pytest.approx(1, abs=0.2), word


def test_keys_behind_the_hottest_that_are_new_to_the_sample_lose_no_prefix():
    """Whenever there were more of these, requests lost what they had behind them."""
    chats = [some_keys(seed, 400) for seed in range(20)]
    requests = [
        PackedKeys(chat[:end], keys_to_words(chat[:end]))
        for end in range(8, 400, 8)
        for chat in chats
    ]
    exact, sampled = (count_found("lru", 9000, bits, requests) for bits in (0, 3))
    assert sampled.num_found_tokens < sampled.num_asked_tokens
    assert abs(sampled.share - exact.share) < 0.002


@pytest.mark.parametrize("bits", [1, 4, 5, 7])
def test_a_sample_takes_as_many_blocks_of_every_row(bits):
    sample = KeySample(bits, 1000)
    sizes = []
    for seed in range(60):
        words = keys_to_words(some_keys(seed, 512))
        rows = sample.choose_of_prefix(words, 0)
        assert rows == sorted(set(rows))
        sizes.append(len(rows))
        if bits <= 5:
            assert [row >> bits for row in rows] == list(range(512 >> bits))
        # A prefix samples the same rows, as far as it goes.
        part = sample.choose_of_prefix(words[:100], 0)
        assert part == [row for row in rows if row < 100]
    assert sum(sizes) / len(sizes) == pytest.approx(512 >> bits, rel=0.15)


@pytest.mark.parametrize("bits", [1, 4, 7])
@pytest.mark.parametrize("num_hot", [0, 5, 32, 50])
def test_a_growing_prefix_samples_the_same_keys(bits, num_hot):
    sample, rng = KeySample(bits, 1000), random.Random(7)
    words = keys_to_words(some_keys(1, 400))
    grown, first = [], 0
    while first < len(words):
        num = first + rng.randint(1, 40)
        grown += sample.choose_of_prefix(words[:num], num_hot, first)
        first = num
        assert grown == sample.choose_of_prefix(words[:num], num_hot)


def test_keys_behind_the_hottest_are_sampled_by_their_bits():
    sample = KeySample(3, 1000)
    words = keys_to_words(some_keys(1, 256))
    alone = sample.choose(words)
    assert alone == np.flatnonzero(words[:, 7] % 8 == 0).tolist()
    rows = sample.choose_of_prefix(words, 12)
    assert rows[0] >= 12
    assert [row for row in rows if row < 16] == [row for row in alone if 12 <= row < 16]
    plain = sample.choose_of_prefix(words, 0)
    assert rows[-30:] == plain[-30:]


def test_the_hottest_keys_begin_the_most_prompts():
    sample = KeySample(3, 200)
    ends = (some_keys(seed, 20) for seed in itertools.count())
    nums_hot = [sample.record_request(HEAD[:5] + next(ends)) for _ in range(100)]
    assert nums_hot[:16] == [0] * 16
    assert nums_hot[-1] == 5
    # What is seldom asked for is not.
    assert sample.record_request(some_keys(0, 20)) == 0
    # Nor is what no one asks for any more.
    for _ in range(3000):
        sample.record_request(next(ends))
    assert sample.record_request(HEAD[:5]) == 0
