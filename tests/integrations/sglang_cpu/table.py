"""Draws docs/sglang.md's table: returning users with HiCache, with jaxkv, without both.

    python -m tests.integrations.sglang_cpu.table

runs in the environment of `.ci/sglang`. Both host tiers have the same number of pages.
"HiCache, mended" may load into pages that the radix tree can give up.
"""

import contextlib
import os
import statistics
import tempfile
from pathlib import Path

from tests.integrations.sglang_cpu import rig, scenes

POOL_TOKENS, RATIO = 512, 8
HICACHE = {"hicache_storage": "none", "hicache_ratio": float(RATIO)}
VARIANTS = {
    "no host tier": {},
    "HiCache": HICACHE,
    "HiCache, mended": HICACHE,
    "jaxkv": {"config": {"num_host_blocks": RATIO * POOL_TOKENS // rig.PAGE}},
}


def make(model, name, *, overlap):
    """Make an engine, and warm it up."""
    engine = rig.Engine(
        model, pool_tokens=POOL_TOKENS, overlap=overlap, **VARIANTS[name]
    )
    if name == "HiCache, mended":
        tree = engine.scheduler.tree_cache
        load = tree.init_load_back
        tree.init_load_back = lambda *args, mem_quota: load(*args, mem_quota=None)
    waves = scenes.conversations(0, "warm", users=4, turns=2, at_once=True)
    engine.run(engine.waves(waves))
    return engine


def host_bytes(engine):
    """Return the bytes of a host tier's memory."""
    if engine.offload is not None:
        return engine.offload.worker.host_bytes
    pool = getattr(engine.scheduler.tree_cache, "host_pool", None)
    if pool is None:
        return 0
    kv = engine.scheduler.token_to_kv_pool_allocator.get_kvcache().kv_buffer
    page_bytes = sum(array.nbytes // array.shape[0] for array in kv)
    return pool._pool_size * page_bytes


def main():
    """Print the table."""
    print("| loop | host tier | one by one | at once | TTFT, ms | host, MB | tokens |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        rig.make_model(model := Path(folder, "model"))
        for overlap in (False, True):
            wanted = {}
            for name in VARIANTS:
                engine = make(model, name, overlap=overlap)
                cells, first_s, wrong = [], [], 0
                for at_once in (False, True):
                    scene = f"scene{at_once}"
                    waves = scenes.conversations(
                        7, scene, users=5, turns=3, at_once=at_once
                    )
                    answers = engine.run(engine.waves(waves))
                    cells.append(sum(a.num_cached for a in answers.values()))
                    for request, answer in answers.items():
                        tokens = wanted.setdefault(request, answer.tokens)
                        wrong += tokens != answer.tokens
                        if not at_once and f"{scene}-0-" not in request:
                            first_s.append(answer.first_s)
                print(
                    f"| {'overlap' if overlap else 'normal'} | {name} | {cells[0]:,} "
                    f"| {cells[1]:,} | {1e3 * statistics.median(first_s):.0f} "
                    f"| {host_bytes(engine) / 1e6:.1f} "
                    f"| {f'{wrong} differ' if wrong else 'equal'} |",
                    flush=True,
                )


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
    os._exit(0)  # The overlap loops' threads wait for batches.
