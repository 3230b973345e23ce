"""The stage `devices`: what this machine is, and whether blocks can move at all."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv._util import gib
from jaxkv.tools.doctor.facts import Facts, gather_facts
from jaxkv.tools.doctor.findings import Question, judge, recommend
from jaxkv.tools.machine import machine
from jaxkv.tools.verify.oracle import run_to_end
from jaxkv.tools.verify.records import Check, Turn, UnsupportedError, WrongError
from jaxkv.transfer import TransferEngine

DEVICE = "device"
TRANSFERS = "transfers"
"""The check without which no later stage can run."""

# Settings of the runtime that change how blocks move.
_SETTINGS = re.compile(
    r"(XLA_(FLAGS|PJRT|PYTHON_CLIENT)|JAX_(PLATFORMS|ENABLE|DISABLE)|LIBTPU|TPU_|"
    r"CUDA_VISIBLE|MEGASCALE)"
)
_MAX_CHARS = 300


def list_checks() -> Sequence[Check]:
    """List the checks; starts jax."""
    facts = gather_facts()
    checks = {
        DEVICE: _look_at_device,
        "memory": _look_at_memory,
        "settings": _look_at_settings,
        TRANSFERS: _try_transfers,
    }
    return [Check(name, functools.partial(run, facts)) for name, run in checks.items()]


def _look_at_device(facts: Facts, turn: Turn) -> Any:
    if facts.backend is None:
        raise WrongError("; ".join(facts.refusals))
    devices = jax.devices()
    runtime = " ".join(devices[0].client.platform_version.split())[:_MAX_CHARS]
    name = " ".join(dict.fromkeys((facts.backend.platform, facts.backend.kind)))
    figures = {
        "name": f"{len(devices)} x {name}",
        "num_processes": jax.process_count(),
        "runtime": runtime,
        # The coordinates on TPU.
        "devices": [str(getattr(device, "coords", device.id)) for device in devices],
        "machine": machine(),
    }
    text = f"{figures['name']} in {jax.process_count()} process; {facts.system}"
    return f"{text}; runtime {runtime}", figures


def _look_at_memory(facts: Facts, turn: Turn) -> Any:
    if facts.backend is None:
        raise UnsupportedError("jax does not start")
    best = recommend(facts, Question())
    left = min((limit.num_bytes for limit in facts.limits), default=None)
    figures = {
        "memory_kinds": facts.backend.memory_kinds,
        "device_bytes": facts.backend.memory_bytes,
        "host_bytes_left": left,
        "pinned_pool_bytes": facts.pool and facts.pool.num_bytes,
        "recommended_host_tier_bytes": best and best.num_bytes,
    }
    sizes = [
        f"{name.removesuffix('_bytes').replace('_', ' ')} {gib(size)}"
        for name, size in figures.items()
        if isinstance(size, int)
    ]
    return f"{', '.join(facts.backend.memory_kinds)}; {', '.join(sizes)}", figures


def _look_at_settings(facts: Facts, turn: Turn) -> Any:
    """Judge the settings as `jaxkv doctor` does."""
    wrong = [
        finding.what
        for finding in judge(facts, Question())
        if finding.level == "wrong" and finding.what not in facts.refusals
    ]
    if wrong:
        raise WrongError("; ".join(wrong))
    chosen = {
        name: value for name, value in os.environ.items() if _SETTINGS.match(name)
    }
    chosen |= facts.variables
    text = ", ".join(f"{name}={value}" for name, value in sorted(chosen.items()))
    return text[:_MAX_CHARS] or "all defaults", {"variables": chosen}


def _try_transfers(facts: Facts, turn: Turn) -> Any:
    if facts.refusals or facts.mode is None:
        raise UnsupportedError(
            f"{'; '.join(facts.refusals).rstrip('.')}. No block can move. What decides "
            "works: OffloadingManager, OffloadScheduler and jaxkv plan"
        )
    pool = [jnp.zeros((8, 16, 8, 128), jnp.bfloat16)]
    engine = TransferEngine(pool, 8)
    engine.warm_up()
    engine.save(pool, [1], [2])
    run_to_end(engine, pool)
    return f"default mode {engine.mode}, rows copied by {engine.kernel}", {}
