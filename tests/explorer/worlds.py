"""The worlds, by name."""

from dataclasses import replace

from jaxkv.scheduling.rules import OffloadRules
from jaxkv.search.groups import ChunkedLocal, FullAttention, Mamba, SlidingWindow
from jaxkv.tiers.retention import Retention
from tests.explorer.world import Setup

EAGER, LAZY = OffloadRules(), OffloadRules(mode="lazy", max_num_batched_tokens=1)
THROUGH = OffloadRules(storage_write="through")
HYBRID = FullAttention(1), SlidingWindow(1, 2)
ACTS = ("fail", "preempt", "abort", "reset")
# Three requests that share a block or two: two are equal, the third continues.
SHORT = (("aab", 3), ("aab", 2), ("aac", 3))
LONG = (("aabb", 4), ("aabb", 3), ("aacc", 4))
GROWING = (("aabbc", 1), ("aabbd", 2))

_PAIR = Setup(
    (("ab", 2), ("ab", 2)),
    num_device_blocks=3,
    num_host_blocks=2,
    acts=("fail", "preempt"),
)
_SMALL = Setup(SHORT, num_device_blocks=4, num_host_blocks=3, acts=ACTS)
_WARM = replace(_SMALL, served=(0,), acts=(*ACTS, "forget", "gap"))
_STORE = replace(_SMALL, rules=THROUGH, num_storage_blocks=3, listed=(0,))
_HYBRID = Setup(
    (("aab", 3), ("aab", 2)),
    HYBRID,
    num_device_blocks=6,
    num_host_blocks=4,
    acts=("fail", "preempt", "forget", "gap"),
)


def _with(setup, *acts, **rules):
    new_rules = replace(setup.rules, **rules)
    return replace(setup, rules=new_rules, acts=(*setup.acts, *acts))


_FEW = _with(
    replace(_STORE, num_host_blocks=5, num_storage_blocks=1),
    "lose",
    max_storage_blocks=1,
)

WORLDS = {
    # Small enough that all of it is seen.
    "tiny": Setup((("ab", 2),), num_device_blocks=2, num_host_blocks=1, acts=ACTS),
    "pair": _PAIR,
    "pair, lazy": replace(_PAIR, requests=(("ab", 2), ("ac", 2)), rules=LAZY),
    "pair, store": replace(_PAIR, rules=THROUGH, num_storage_blocks=2, listed=(0,)),
    # Larger ones: only their nearest states are explored.
    "eager": _SMALL,
    "eager, large": _with(
        replace(_SMALL, requests=LONG, num_device_blocks=6), "again", "leave"
    ),
    "lazy": replace(_SMALL, rules=LAZY),
    "store": _STORE,
    "store, on reuse": _with(_STORE, "part", "together", storage_write="on_reuse"),
    "store, on evict": _with(
        replace(_STORE, private="c"), "part", "leave", storage_write="on_evict"
    ),
    "store, few": _FEW,
    "store, in windows": _with(
        replace(
            _STORE,
            requests=(("aabbc", 5), ("aabbd", 4)),
            num_device_blocks=8,
            num_host_blocks=6,
            num_storage_blocks=6,
        ),
        *("part", "lose", "leave"),
        max_storage_blocks=1,
    ),
    "store, large": replace(  # The host has no room for the whole prefix.
        _STORE,
        requests=(("aabbcd", 6), ("aabbcd", 5)),
        num_device_blocks=8,
        num_host_blocks=4,
        num_storage_blocks=6,
    ),
    "store, slow": replace(
        _with(
            replace(
                _STORE,
                requests=(("aabbc", 5), ("aabbd", 4)),
                num_device_blocks=8,
                num_host_blocks=6,
                num_storage_blocks=6,
            ),
            *("forget", "part"),
            skip_slow_loads=True,
            block_bytes=10,
            max_storage_blocks=1,
            storage_probe_s=0.005,
        ),
        rates=((1e3, 1.0, 1e3), (5.0, 1.0, 4.0), (0.0, 1.0, 4.0), (1e3, 0.0, 1e3)),
        served=(0,),
    ),
    "hybrid, large": replace(
        _HYBRID,
        requests=(("aabbcd", 6), ("aabbc", 5)),
        num_device_blocks=14,
        num_host_blocks=4,
        rules=replace(THROUGH, storage_probe_s=0.005),
        num_storage_blocks=12,
        listed=(0,),
    ),
    "hybrid, in windows": replace(
        _HYBRID,
        requests=(("aabb", 4), ("aabb", 3)),
        num_device_blocks=10,
        num_host_blocks=8,
        rules=replace(THROUGH, max_storage_blocks=1),
        num_storage_blocks=8,
        listed=(0,),
        acts=(*_HYBRID.acts, "part", "lose"),
    ),
    "store, asked": _with(
        replace(_STORE, private="c"),
        *("part", "together", "leave"),
        storage_probe_s=0.005,
    ),
    "down": _with(
        replace(_STORE, num_host_blocks=4),
        *("part", "down"),
        storage_probe_s=0.005,
        max_storage_blocks=1,
    ),
    "store, awaited": _with(
        # No engine computes the prompt of the last one.
        replace(
            _STORE,
            requests=(*SHORT[:2], ("dec", 3)),
            num_host_blocks=4,
            private="c",
            awaiting=(1, 2),
        ),
        *("part", "together", "leave"),
        storage_probe_s=0.005,
    ),
    "store, awaited, few": _with(
        replace(
            _STORE,
            requests=(("abc", 3), ("def", 3), ("dee", 3)),
            num_device_blocks=8,
            num_host_blocks=4,
            num_storage_blocks=2,
            awaiting=(0, 1, 2),
        ),
        *("part", "leave"),
    ),
    "store, queue": _with(
        replace(
            _STORE,
            requests=(("aab", 3), ("cdb", 3), ("eef", 3)),
            num_host_blocks=4,
            num_storage_blocks=6,
            listed=(0, 1),
        )
    ),
    "hybrid": _HYBRID,
    "hybrid, lazy": replace(_HYBRID, rules=LAZY),
    "hybrid, store": replace(_HYBRID, rules=THROUGH, num_storage_blocks=4, listed=(0,)),
    "hybrid, asked": replace(
        _HYBRID,
        rules=replace(THROUGH, storage_probe_s=0.005),
        num_storage_blocks=4,
        listed=(0,),
        awaiting=(1,),
    ),
    "states": replace(_HYBRID, groups=(FullAttention(1), Mamba(1))),
    "chunks": replace(_HYBRID, groups=(FullAttention(1), ChunkedLocal(1, 2))),
    "local": Setup(  # At a chunk's start nothing is read, so nothing is loaded.
        (("aabb", 4), ("aab", 3)),
        (ChunkedLocal(1, 2),),
        num_device_blocks=5,
        num_host_blocks=4,
        acts=("fail", "preempt", "forget", "gap"),
    ),
    # Rules, one or two at a time.
    "shared": _with(_WARM, "less", "lose", delay_shared_loads=True),
    "few in flight": _with(_WARM, "together", "less", max_blocks_in_flight=1),
    "lazy, few in flight": _with(
        replace(_SMALL, rules=LAZY), "lose", "forget", max_blocks_in_flight=1
    ),
    "together": _with(
        replace(_WARM, num_device_blocks=7),
        "less",
        store_batch_blocks=3,
        store_max_wait_steps=2,
    ),
    "overwritten": _with(
        replace(_SMALL, requests=GROWING, num_device_blocks=7, num_host_blocks=5),
        *("back", "lose"),
    ),
    "overwritten, together": _with(
        replace(_SMALL, requests=GROWING, num_device_blocks=9, num_host_blocks=6),
        *("back", "together", "less"),
        store_batch_blocks=3,
        store_max_wait_steps=2,
    ),
    "lazy, together": _with(
        replace(_SMALL, rules=LAZY, num_device_blocks=6),
        *("lose", "forget"),
        store_batch_blocks=2,
        store_max_wait_steps=3,
    ),
    "reused": _with(_SMALL, "forget", "gap", store_threshold=2),
    "paused": _with(
        replace(_WARM, num_host_blocks=1), "less", pause_unused_stores=True
    ),
    "flush": _with(_WARM, "less", "unasked", flush_on_preemption=True),
    "rows": replace(
        _SMALL,
        requests=LONG,
        rules=OffloadRules(blocks_per_host_block=2),
        num_device_blocks=5,
        num_host_blocks=3,
    ),
    "gate": replace(
        _with(_STORE, "forget", skip_slow_loads=True, block_bytes=10),
        rates=((5.0, 1.0, 4.0), (0.0, 1.0, 4.0), (1e3, 1.0, 1e3)),
        served=(0,),
    ),
    "prompts": _with(_SMALL, prompt_only=True, max_unseen_blocks=1),
    "heads kept": _with(
        replace(_SMALL, requests=GROWING, num_device_blocks=7), keep_heads=True
    ),
    "heads kept, large": _with(
        replace(
            _WARM,
            requests=(("aabbcd", 6), ("aabbcc", 5)),
            num_device_blocks=9,
            num_host_blocks=4,
        ),
        "less",
        keep_heads=True,
    ),
    "heads kept, one story": Setup(  # It outgrows the host, turn after turn.
        (("abcdefgh", 2), ("abcdefgh", 5), ("abcdefgh", 7)),
        rules=OffloadRules(keep_heads=True),
        num_device_blocks=17,
        chunk=2,
        acts=("preempt", "abort", "forget", "less"),
        is_story=True,
    ),
    "heads": _with(replace(_WARM, requests=LONG), max_offload_tokens=2),
    # What is rare.
    "two workers": _with(_WARM, "part", "together", world_size=2),
    "two workers, store": _with(
        _STORE, "part", "together", world_size=2, storage_probe_s=0.005
    ),
    "two sizes": Setup(
        (("aabbc", 5), ("aabb", 4)),
        (FullAttention(1), FullAttention(2)),
        num_device_blocks=10,
        num_host_blocks=8,
        acts=("fail", "preempt", "forget", "gap", "less", "unasked"),
        served=(0,),
    ),
    "halves": Setup(
        (("aabbc", 5), ("aabb", 4), ("aabbcc", 5)),
        (FullAttention(2),),
        num_device_blocks=5,
        num_host_blocks=3,
        acts=(*ACTS, "forget", "gap", "less", "blind"),
        served=(0,),
    ),
    "wide rows": Setup(
        (("aabbccd", 7), ("aabbccd", 5)),
        (FullAttention(2),),
        OffloadRules(blocks_per_host_block=2),
        num_device_blocks=6,
        num_host_blocks=3,
        acts=("fail", "preempt", "forget", "gap", "less", "again"),
        served=(0,),
    ),
    "many": Setup(
        (("aabbccddee", 3), ("aabbcc", 5)),
        rules=THROUGH,
        num_device_blocks=12,
        num_host_blocks=9,
        num_storage_blocks=12,
        chunk=2,
        acts=("fail", "preempt", "forget"),
        is_ahead=True,
    ),
    "arc": replace(_WARM, policy="arc", has_events=True),
    "hazard": replace(_STORE, policy="hazard", has_events=True, served=(0,)),
    "hazard, small": _with(
        replace(_FEW, policy="hazard", served=(0,)), "forget", "gap", "less"
    ),
    "few, on reuse": _with(
        replace(_FEW, served=(0,)), "forget", "gap", "less", storage_write="on_reuse"
    ),
    "kept": replace(
        _with(_WARM, retention=True),
        retentions=(Retention(50, ttl_s=60), Retention(20, ttl_s=60, num_tokens=1)),
    ),
    "bound": replace(
        _with(_STORE, "relist", "unlist", "part", "leave"),
        bound=2,
        has_events=True,
    ),
}
